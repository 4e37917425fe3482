# `make` lists the targets. Any of them builds .venv first, if it is missing or out of date.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# `make test TORCH=2.7.1`, as any other target: with that torch, in a virtual environment of its own
VENV := .venv$(addprefix -torch,$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/ready
# more than 2 cores: many tests wait for a SLURM, or for a moment to come
JOBS ?= 3
# each process that a test starts would compile this repository again
unexport PYTHONDONTWRITEBYTECODE
# threads of each program that a test starts: `make test OMP_NUM_THREADS=2`; `OMP_NUM_THREADS=` leaves it unset
OMP_NUM_THREADS ?= 1
# folders that have the house style
READ_ONCE := alma benchmarks data_prep examples fairseq_alma slurm transformers_alma vision
UV = $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python
IDENTITY := import sys; print(sys.base_prefix, sys.version)
# fairseq and fairscale come as sources and import torch while they are built
SOURCES := ^(fairseq-fixed|fairscale)==
# requirements.txt with one line for each package, its hashes in it
LINES := sed -e ':line' -e '/\\$$/{N;s/ *\\\n */ /;b line' -e '}' requirements.txt
# TORCH's CUDA and torchvision are left to the resolver; newer torchaudios do not say which torch they fit. So
# there are no hashes with TORCH: uv takes them for all packages or for none.
PINS := $(LINES)$(if $(TORCH), | sed -E 's/ --hash=[^ ]+//g; /^(nvidia-|cuda-|triton)/d; s/^(torch==).*/\1$(TORCH)/; \
	s/^(torchvision)==.*/\1/; s/^(torchaudio)==.*/\1<=$(TORCH)/')
HASHED := $(if $(TORCH),,--require-hashes)

# The first of these that starts and is 3.11 to 3.13. Newer versions are refused: nothing here was tried on them.
PYTHON ?= $(shell for python in $(BIN)/python python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$python && break; done)

# PYTHON=... on the command line rebuilds a .venv made with another Python; without it any .venv is kept.
ifneq ($(filter command environment%,$(origin PYTHON)),)
identity = $(shell { $(1) -c '$(IDENTITY)'; } 2>/dev/null)
ifneq ($(call identity,$(PYTHON)),$(call identity,$(BIN)/python))
$(READY): FORCE
endif
endif

.PHONY: help demo test test-all lint mutants docs bench clean pin FORCE

PYTEST = $(if $(OMP_NUM_THREADS),OMP_NUM_THREADS=$(OMP_NUM_THREADS),env -u OMP_NUM_THREADS) \
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

demo: $(READY) ## corpus, mega-batches, learners of text and of images, report, in demo_out/
	PATH="$(abspath $(BIN)):$$PATH" sh experiments/demo.sh

test: $(READY) ## every promise once: the tests without those marked thorough, slow or gpu
	$(PYTEST) -m "not thorough and not slow and not gpu"

test-all: test ## what `make test` leaves out, too: real SLURM, programs of docs and examples, calibrations
	$(PYTEST) -m "thorough and not slow and not gpu"

lint: $(READY) ## ruff, formatting, types, the house style
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m tests.house_style $(READ_ONCE)

mutants: $(READY) ## make mutants MODULE=alma/stages.py TESTS=tests/alma: bugs planted by cosmic-ray; those that no test sees
	sh tests/mutants.sh "$(BIN)" "$(MODULE)" "$(TESTS)"

docs: $(READY) ## the pages in docs/ as a web site, in build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(READY) ## speed and memory against named peers
	$(BIN)/python -m benchmarks

clean: ## remove what make has made
	rm -rf $(VENV) .venv-torch* demo_out build dist *.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis

pin: $(READY) ## requirements.txt from setup.py; keeps the pins that still fit, delete lines to renew them
	$(BIN)/uv pip compile setup.py --extra all --extra dev --extra docs --extra build --universal --python-version 3.11 --fork-strategy fewest \
		--python $(BIN)/python --no-build-isolation --quiet \
		--no-annotate --generate-hashes --custom-compile-command "make pin" --output-file requirements.txt

$(READY): setup.py requirements.txt
	@rm -f $(READY)
	fail() { echo "error: $$*" >&2; exit 2; }
	python="$(PYTHON)"
	[ -n "$$python" ] || fail "no Python 3.11 to 3.13 found; install one and name it: make PYTHON=/path/to/python3.12"
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
		fail "$$python does not start or is not Python 3.11 to 3.13; try make PYTHON=/path/to/python3.12"
	$$python -c 'import venv, ensurepip' 2>/dev/null ||
		fail "$$python cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)"
	command -v $${CXX:-c++} >/dev/null && command -v $${CC:-cc} >/dev/null ||
		fail "no C and C++ compiler, which fairseq needs (on Debian and Ubuntu: apt install build-essential)"
	[ -f "$$($$python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
		fail "$$python has no Python.h, which fairseq needs (on Debian and Ubuntu: apt install python3-dev)"
	if [ "$$($$python -c '$(IDENTITY)')" != "$$($(BIN)/python -c '$(IDENTITY)' 2>/dev/null)" ]; then
		rm -rf $(VENV)
		$$python -m venv $(VENV)
	fi
	echo "installing into $(VENV) with $$python; the first time takes a few minutes, most of it to build fairseq"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r <($(LINES) | grep '^uv==')
	$(UV) $(HASHED) -r <($(PINS) | grep -vE '$(SOURCES)')
	# CUDA_HOME would have fairseq build kernels that nothing here uses; the cache does not know TORCH's builds
	env -u CUDA_HOME $(UV) --no-build-isolation $(if $(TORCH),--no-cache) $(HASHED) -r <($(PINS))
	$(UV) --no-build-isolation --no-deps -e .
	touch $(READY)
