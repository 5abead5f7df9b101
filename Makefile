# Every target is one command of tools/dev.py, which needs Python and pip alone.
# Arguments: make test ARGS="-k drain"

PYTHON ?= python3
ARGS ?=

# The first target: what `make` alone does.
.PHONY: help demo test quick cover check soak docs dist bench bench-postgres bench-rabbitmq mutate lock
help demo test quick cover check soak docs dist bench bench-postgres bench-rabbitmq mutate lock:
	@$(PYTHON) tools/dev.py $@ $(ARGS)
