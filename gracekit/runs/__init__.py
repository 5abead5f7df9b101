"""Runs: the row of each life of a process, its instance and locks, and its siblings."""
