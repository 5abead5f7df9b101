"""The journal: the rows of tasks, holds and orders; what recovery claims and retention removes."""
