"""The transport by a SQLite file."""
