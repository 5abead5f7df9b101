"""Who may act: lease rows with fencing tokens, the epoch of the store, lines in the process."""
