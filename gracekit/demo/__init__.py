"""`gracekit demo`: a demonstration of a drain, a crash and a recovery, for new users."""
