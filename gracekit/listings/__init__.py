"""Lists the runs and tasks of a store as plain data, for the command line and for HTTP."""
