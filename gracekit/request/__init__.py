"""The stages of one request's life, in the order of their use; `dispatcher` calls them.

`arrivals` reads it, `refusals` refuses it, `lanes` gives it a place and a turn,
`custody` commits it, `waits` waits for a lease that another process holds,
`context` is what its handler sees, `attempt` runs the handler, `answers` replies.
"""
