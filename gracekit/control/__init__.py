"""What operators can ask of one run: the control verbs, and orders about single tasks."""
