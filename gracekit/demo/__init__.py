"""`gracekit demo`: what somebody tries after `pip install`; a drain, a crash and a recovery."""
