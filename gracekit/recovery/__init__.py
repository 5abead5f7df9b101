"""What becomes of the unfinished: verdicts as values, and the reconciler that acts on them."""
