# Every target is one command of tools/dev.py, which needs Python and pip alone.
# Arguments: make test ARGS="-k drain"

PYTHON ?= python3
ARGS ?=

.PHONY: demo test check soak bench bench-rabbitmq mutate lock
demo test check soak bench bench-rabbitmq mutate lock:
	@$(PYTHON) tools/dev.py $@ $(ARGS)
