"""Remembers, never talks: what was accepted, where it stands, and what is on disk of it."""
