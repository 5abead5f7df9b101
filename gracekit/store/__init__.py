"""The store: one database schema, and one way to change its rows.

`batch` describes a commit, `engine` executes batches on SQLite, and
`migrations/` holds the schema as numbered SQL files.
"""
