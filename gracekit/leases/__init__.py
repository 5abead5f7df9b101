"""Who may act: runs and their proof of life, lease rows with fencing tokens, lines in the process."""
