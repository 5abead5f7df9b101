"""Rows: one schema, one way to change it.

`batch` says what a commit is, `engine` carries batches out on SQLite, and
`migrations/` holds the schema as numbered SQL files.
"""
