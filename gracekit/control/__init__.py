"""What an operator may ask of one run: the verbs, and the orders about single tasks."""
