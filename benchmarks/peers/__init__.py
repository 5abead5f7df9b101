"""Workers of other libraries, a program each; in environments that have not gracekit's packages.

Each is written as its library's documentation shows it, with what all have in common: a durable
classic queue, persistent messages, the same prefetch, arguments as JSON, a handler that only
counts, and no log line for each message. Whatever else was chosen stands in its docstring.
"""
