"""The stages of one request's life, in the order of their use; `dispatcher` strings them together.

`arrivals` reads it, `refusals` turns it away, `lanes` gives it a place and a
turn, `custody` commits it, `waits` stands in line for a lease that another
process holds, `context` is what its handler sees, `attempt` runs the handler,
`answers` replies.
"""
