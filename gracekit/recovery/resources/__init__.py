"""Resources of the application that nobody works on any more: found by status, and settled."""
