"""One run of one service: how it is built, opened, started and ended; the life of its process."""
