"""Checks of the files of store and queue: the directory, the contents, the runs on record."""
