"""One drain: its coordinator, its steps and times, its progress, and its report."""
