"""What gracekit costs, each time beside the barest thing that does the same."""
