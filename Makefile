# make demo            sets everything up and runs the main job
# make test            sets everything up and passes the tests (at most 10 minutes)
# make test-deployment everything with Flower's real processes
# make test-docker     everything in containers (needs a Docker engine)
# make test-newest-flower  strategies and clients on Flower's newest release
# make benchmark       are we slower than docs/performance.md says? (some 10 minutes)
# make docs            builds the documentation's pages in site/
# make compose-up      starts a federation in containers: CLIENTS=5 BYZANTINE=1, TLS=1 for TLS
# make compose-run     runs RECIPE=recipes/demo.toml there; results are in deployment/runs
# make compose-down    stops it
#
# PYTHON=python3.12          another interpreter (3.11 or later)
# TORCH_INDEX_URL=...        an index with other PyTorch wheels, for example CPU-only ones

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTS_READY := $(VENV)/.tests-ready
DOCS_READY := $(VENV)/.docs-ready
NEWEST := $(VENV)/newest-flower
export OMP_WAIT_POLICY ?= PASSIVE
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: demo test lint test-deployment test-docker test-newest-flower test-slow benchmark setup \
  docs clean \
  compose-up compose-run compose-down
.DEFAULT_GOAL := demo

setup: $(TESTS_READY)

# How much there is to fetch is the sum of the wheels that these versions have for Python 3.11 on
# Linux x86-64, by their index (2026-11-30); pip fetches less where its cache has some.
, := ,

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "error: $(PYTHON) not found. Install Python 3.11 or later, or name one: make PYTHON=/path/to/python3"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Blackthorn needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "error: $(PYTHON) cannot make a virtual environment (on Debian: apt install python3-venv)"; exit 2; }
	@echo "Installing into $(VENV), which takes some minutes and up to 7 GB the first time:"
	@echo "  1/2 PyTorch$(if $(TORCH_INDEX_URL), from $(TORCH_INDEX_URL),: on Linux with CUDA$(,) about 3000 MB to fetch)"
	@$(BIN)/python -m pip install -q -c constraints.txt \
	  $(if $(TORCH_INDEX_URL),--index-url "$(TORCH_INDEX_URL)") torch torchvision
	@echo "  2/2 Flower and what else the commands need: about 220 MB"
	@$(BIN)/python -m pip install -q -c constraints.txt "hatchling>=1.26" "editables>=0.5"
	@$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[app]"
	@touch $(READY)

# What the tests, the checks and Flower's own simulation need beyond.
$(TESTS_READY): $(READY)
	@echo "Installing the developers' tools: about 110 MB"
	@$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[app,simulation,dev]"
	@touch $(TESTS_READY)

demo: $(READY)
	@$(BIN)/blackthorn demo

lint: $(TESTS_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

# Two cores' worth, and one for what waits. Each collects all tests for itself, which takes as long
# as some hundreds of them, and some two GB: TEST_PROCESSES=1 where there are less than eight.
TEST_PROCESSES ?= 3
test: lint
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal \
	  -m "not deployment and not docker and not slow" --durations=20

# Two files at a time: each has clusters that its tests share. In the order of their names, with
# which those that take longest come early: by their numbers of tests they came last, one by one.
test-deployment: $(TESTS_READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "deployment and not slow" --durations=20

test-docker: $(TESTS_READY)
	$(BIN)/python -m pytest -m docker

# Its packages come first; all others are those of .venv, this one too.
$(NEWEST)/.ready: newest-flower.txt $(TESTS_READY)
	@rm -rf $(NEWEST)
	@$(BIN)/python -m venv --without-pip $(NEWEST)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "import _editable_impl_blackthorn", sep="\n")' \
	  > "$$($(NEWEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	@$(BIN)/python -m pip --python $(NEWEST)/bin/python install -q --ignore-installed --no-deps -r newest-flower.txt
	@touch $@

# Of every strategy and of ClientApps a test file in which messages are made, sent or answered, and
# which starts no command; and what an installation without extras brings, which has this Flower.
ON_NEWEST_FLOWER := $(addprefix tests/,test_golden_models.py simulation/test_engine.py \
  $(patsubst %,flower_port/test_%.py,http_rounds reply_pull transports versions) \
  $(patsubst %,strategies/test_%.py,adaptive_threshold array_codec attestation bad_replies base \
    biclip client_momentum clipping_strategies enrolment error_feedback evaluation fed_langevin hooks \
    private_averaging quorum rounds screening turns what_a_client_learns) \
  $(patsubst %,client_app/test_%.py,any_client_app disclosure mod_counts mod_under_a_claim \
    noised_models) \
  $(patsubst %,attacks/test_%.py,attacking_grid misbehaviour) \
  test_wheel.py::test_without_an_extra_the_library_imports_and_runs)
test-newest-flower: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m pytest -n $(TEST_PROCESSES) --dist worksteal \
	  -m "not slow" $(ON_NEWEST_FLOWER)

test-slow: $(TESTS_READY)
	$(BIN)/python -m pytest -m slow

# ONLY=engine,rules,rounds,starts,instructions: some of it.
benchmark: $(TESTS_READY)
	$(BIN)/python -m benchmarks.against_the_record $(if $(ONLY),--only $(ONLY))

$(DOCS_READY): $(READY)
	@$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[docs]"
	@touch $(DOCS_READY)

# Without --quiet, which would hide the warnings from --strict.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the pages are in site/: begin with site/index.html"

RECIPE ?= recipes/demo.toml
export CLIENTS BYZANTINE ATTACK TLS POLICY DEPLOYMENT PROJECT BASE_IMAGE TORCH_INDEX_URL

compose-up:
	@docker/federation up

compose-run:
	@docker/federation run $(RECIPE)

compose-down:
	@docker/federation down

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache
