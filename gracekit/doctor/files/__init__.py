"""The store and the queue as files: their place, their inside, the runs on record."""
