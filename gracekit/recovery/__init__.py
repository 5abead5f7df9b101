"""Recovery of unfinished work: decisions as values, and the reconciler that carries them out."""
