"""What could keep a service from stopping and starting well, looked for before it does.

Each check is a small function that answers with findings; none changes
anything. `examine` is the list of them.
"""
