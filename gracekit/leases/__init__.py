"""Who may act on a resource: lease rows with fencing tokens, store epochs, lines in the process."""
