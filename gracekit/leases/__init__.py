"""Who may act: runs and proof of life, lease rows with tokens, lines in the process."""
