"""`gracekit doctor`: checks for problems that would spoil a later stop or start of a service.

Each check is a small function that returns findings; none changes anything.
`examine` lists them.
"""
