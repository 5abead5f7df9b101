"""The journal: tasks, holds and orders on record, what recovery claims, what retention removes."""
