"""One drain: its coordinator, what it reports while it goes on, and what it leaves behind."""
