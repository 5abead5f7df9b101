"""One run of one service: laid out, opened, started, ended; and the life of its process."""
