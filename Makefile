# make bench | test | build | lint | format; the first two pass options on: make bench ARGS="--case NAME".
# All of them set up what is missing first; CONTRIBUTING.md says what.
PYTHON ?= python3
ARGS ?=

.DEFAULT_GOAL := bench
.PHONY: bench test build lint format
bench test build lint format:
	@$(PYTHON) tools/dev.py $@ $(ARGS)
