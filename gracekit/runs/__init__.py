"""Runs: one row for each life of a process, the seat that it holds, and its siblings."""
