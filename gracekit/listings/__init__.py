"""What a store says of its runs and tasks, as plain data: for the command line and for HTTP."""
