"""Checks of this machine, and of the service's processes on it."""
