# Needs make, Python 3.11 or later, and a network for pip on the first call. `make PYTHON=python3.12 ...` takes another Python.

PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
SAY = @printf '%-8s %s\n'

# The environment remembers which Python made it; asking for another one makes it anew.
MADE := .venv/made-by-$(notdir $(PYTHON))
ifeq ($(origin PYTHON),file)
MADE := $(firstword $(wildcard .venv/made-by-*) $(MADE))
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # all targets share one environment
.PHONY: help accuracy demo setup test pages test-gpu check lint types imports schema-current docs site golden schema fast plain test-compiled bench bench-harness bench-peers clients notebooks clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' Makefile

DEMO_SLO := ttft p99 < 8 s, tpot p99 < 50 ms
# The obvious guess: all GPUs of one server, half of them for each role.
DEMO_GUESS := --set prefill.instances=4 --set decode.instances=4

demo: .venv/demo ## the cheapest H100s for a public trace and an SLO, and what they save: an answer and a page
	@$(BIN)/python -m compileall -q pdsim
	$(SAY) demo "Qwen3-8B, 3 conversations a second of a public trace: does it need all eight H100 of a server?"
	@$(BIN)/pdsim plan experiments/demo/scenario.yaml $(DEMO_GUESS) --slo "$(DEMO_SLO)" --gpu h100=2.5 --max-gpus 8 --out runs/demo
	@$(BIN)/pdsim report runs/demo --out runs/demo/report.html

setup: .venv/dev ## make .venv with all tools

# Without compiled bytecode, each of the hundreds of commands that tests start would compile pdsim anew.
test test-compiled docs golden: export PYTHONDONTWRITEBYTECODE :=

# Tests of real mode start processes of their own. Worksteal keeps neighbours together, which share what they set up.
WORKERS ?= 2

# Half of each law's examples, so that all tests take under ten minutes on two cores. PDSIM_EXAMPLES=1 make test takes all.
test: export PDSIM_EXAMPLES ?= 0.5

test: .venv/dev ## run all tests, WORKERS=2 at a time
	$(SAY) pytest tests
	@$(BIN)/pytest -q --durations=25 --numprocesses $(WORKERS) --dist worksteal

PAGES := $(addprefix tests/,test_transcripts.py test_docs.py test_notebooks.py test_calibration_guide.py studies/test_user_questions.py)

pages: .venv/dev ## do what pages and notebooks say, and compare what they show
	$(SAY) pytest "-m pages"
	@$(BIN)/pytest -q --durations=25 --numprocesses $(WORKERS) --dist worksteal -m pages $(PAGES)

GPU_TESTS := tests/kernels tests/real/test_decode_graphs.py tests/real/test_experts.py tests/real/test_transports.py

test-gpu: ## compile the kernels and run their tests and real mode's on GPUs, with the torch of $(PYTHON), on a machine with a GPU
	$(SAY) pytest '$(GPU_TESTS)'
	@$(PYTHON) -c 'import torch; torch.cuda.is_available() or exit("torch sees no GPU here")'
	@PYTHONPATH=.:real:kernels $(PYTHON) -m pytest -q $(GPU_TESTS)

check: lint types imports schema-current ## lint, format, types, import law, schema

lint: .venv/dev
	$(SAY) ruff check
	@$(BIN)/ruff check --quiet
	$(SAY) ruff "format --check"
	@$(BIN)/ruff format --quiet --check

types: .venv/dev
	$(SAY) mypy "pdsim pdreal pdkernels"
	@$(BIN)/mypy --no-error-summary

imports: .venv/dev
	$(SAY) imports "the layers of pyproject.toml"
	@$(BIN)/lint-imports > .venv/imports.log || { cat .venv/imports.log; exit 1; }

schema-current: .venv/dev
	$(SAY) schema "pdsim.schema.json pdsim.sweep.schema.json"
	@$(BIN)/pdsim schema | cmp -s - pdsim.schema.json || { echo "pdsim.schema.json is out of date: make schema"; exit 1; }
	@$(BIN)/pdsim schema sweep | cmp -s - pdsim.sweep.schema.json || { echo "pdsim.sweep.schema.json is out of date: make schema"; exit 1; }

docs: site .venv/dev ## make the site, and check links, examples and tables of the documentation
	$(SAY) links "*.md"
	@$(BIN)/pytest -q -m "pages or not pages" tests/test_docs.py tests/test_settings_tables.py tests/studies/test_marked_tables.py

# Made anew each time, so that what is gone leaves the navigation too. What Sphinx warns of is an error.
site: .venv/docs ## make a site with search of the documentation: build/site/index.html
	$(SAY) sphinx build/site
	@rm -rf build/site build/doctrees
	@$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/site
	@cp build/site/README.html build/site/index.html

fast: .venv/dev ## compile the core in place; `make plain` goes back
	$(SAY) mypyc "the core, which takes a minute or two"
	@$(MAKE) --no-print-directory plain
	@$(BIN)/python compiled.py

plain: ## remove what `make fast` compiled
	@find . -maxdepth 1 -name 'pdsim_compiled__mypyc.*' -delete
	@find pdsim -name '*.so' -delete

# What mypy narrows is checked at run time only, so the laws run compiled, too: from a wheel like that of users, optimised
# less, which compiles in a third of the time. A quarter of the examples will do: interpreted, all of them run.
USE_COMPILED = grep -lE 'pdsim\.(core|cost|sim)|tests\.(support|strategies)' tests/laws/*.py tests/unit/*.py

test-compiled: export PDSIM_OPT_LEVEL = 1
test-compiled: build/compiled ## build a compiled wheel, and run the golden scenarios, laws and replays on it
	$(SAY) pytest "tests, compiled"
	@PDSIM_COMPILED=1 PDSIM_EXAMPLES=0.25 $(BIN)/pytest -q -o pythonpath="build/compiled ." --numprocesses $(WORKERS) --dist worksteal \
	tests/golden tests/test_determinism.py tests/test_compiled_runs.py tests/unit/test_compiled.py $$($(USE_COMPILED))

.PHONY: build/compiled
build/compiled: .venv/dev plain
	$(SAY) wheel build/wheel
	@rm -rf build/wheel build/compiled
	@command -v cc > /dev/null || { echo "a compiled wheel needs a C compiler (Debian, Ubuntu: apt install gcc)" >&2; exit 1; }
	@HATCH_BUILD_HOOKS_ENABLE=1 $(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w build/wheel .
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target build/compiled build/wheel/*.whl

golden: .venv/dev ## store what the golden scenarios give now
	@$(BIN)/pytest -q tests/golden --update-golden

schema: .venv/dev ## write pdsim.schema.json and pdsim.sweep.schema.json
	@$(BIN)/pdsim schema > .venv/schema.json
	@cp .venv/schema.json pdsim.schema.json
	@$(BIN)/pdsim schema sweep > .venv/schema.json
	@cp .venv/schema.json pdsim.sweep.schema.json

accuracy: .venv/dev ## simulate every measured number of the studies anew: docs/accuracy.csv, which takes half an hour
	@$(BIN)/python -m docs.accuracy

notebooks: .venv/dev ## run the notebooks and write them with their figures
	@$(BIN)/python notebooks/execute.py

bench: .venv/demo ## time the simulator
	@$(BIN)/python -m compileall -q pdsim
	@$(BIN)/python bench/speed.py

bench-harness: .venv/dev ## time what real mode adds to a decode step, of a tiny model on this CPU
	@$(BIN)/python bench/harness.py

clients: .venv/dev ## run public HTTP clients against pdreal serve, each in its own environment
	@real/clients/run.sh

bench-peers: build/compiled ## time other simulators on the same load, beside pdsim as it is and compiled
	@$(BIN)/python -m compileall -q pdsim build/compiled
	@$(BIN)/python bench/peers.py build/compiled

clean: ## remove .venv, .bench, .clients, caches and the demo's results
	@$(MAKE) --no-print-directory plain
	@rm -rf .venv .bench .clients build runs/demo .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	@find bench experiments kernels pdsim real tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(MADE):
	$(SAY) venv "$(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdsim needs Python 3.11 or later, found " + sys.version.split()[0] + "; give another: make PYTHON=python3.12")'
	@rm -rf .venv
	@$(PYTHON) -m venv .venv > /dev/null 2>&1 \
	|| uv venv --quiet --clear --seed --python "$(PYTHON)" .venv 2> /dev/null \
	|| virtualenv --quiet --clear --python "$(PYTHON)" .venv > /dev/null 2>&1 \
	|| { rm -rf .venv; echo "$(PYTHON) cannot make virtual environments; install its venv module (Debian, Ubuntu: apt install python3-venv), uv or virtualenv" >&2; exit 1; }
	@touch $@

# Folder or page with compiled wheels of this version, such as the files of a release.
WHEELS ?=
INTERPRETED = no compiled wheel was $(if $(WHEELS),found in $(WHEELS) for this Python,given (make demo WHEELS=FOLDER)): simulations take twice the CPU time

.venv/demo: $(MADE) pyproject.toml constraints.txt
	$(SAY) install pdsim
	@$(PIP_INSTALL) --editable .
	@{ [ -n "$(WHEELS)" ] && $(PIP_INSTALL) --no-deps --force-reinstall --no-index --find-links "$(WHEELS)" pdsim 2> /dev/null; } \
	|| printf '%-8s %s\n' install "$(INTERPRETED)"
	@touch $@

.venv/dev: $(MADE) pyproject.toml constraints.txt
	$(SAY) install "pdsim[dev,kernels,real]"
	@$(PIP_INSTALL) --editable ".[dev,kernels,real]"
	@touch .venv/demo $@

.venv/docs: $(MADE) pyproject.toml constraints.txt
	$(SAY) install "pdsim[docs]"
	@$(PIP_INSTALL) --editable ".[docs]"
	@touch .venv/demo $@
