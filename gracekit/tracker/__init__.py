"""The tasks in flight in this process: their states, waits, durations and stacks."""
