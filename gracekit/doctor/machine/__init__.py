"""This machine, and the processes of the service on it."""
