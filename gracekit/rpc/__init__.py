"""Talks, never remembers: messages, the wire they travel in, and the ways they are carried.

`message` and `transport` are the words; `memory` and `sqlite` carry, `oslo_wire`
spells, `methods` says what is served, `server` and `client` are the two ends.
"""
