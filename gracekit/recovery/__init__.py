"""What becomes of the unfinished: decisions as values, and the reconciler that acts on them."""
