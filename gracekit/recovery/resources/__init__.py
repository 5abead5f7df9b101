"""Finds and settles resources that are stuck in a transient status and on which no task works."""
