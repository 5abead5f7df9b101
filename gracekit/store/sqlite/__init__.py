"""The engines of SQLite, in a file and in memory, and what is theirs alone."""
