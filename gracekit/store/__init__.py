"""The store: one database schema, and one way to change its rows.

`batch` describes a commit, `engine` is what an engine must do, and `sqlite/` has the engines of
SQLite and their schema as numbered SQL files. Another engine is a package beside it.
"""
