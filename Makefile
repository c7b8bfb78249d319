# make setup   everything a fresh Debian 12 or 13 machine needs (as root); again, it does nothing
# make demo    redis moves from one node to another under a client that goes on writing
# make test    every test
# make check   after make setup, in a minute: lint, and the tests of single parts
# make bench   BENCH=basic, BENCH=shim: the figures of docs/benchmarks.md
# make lock    requirements.lock from pyproject.toml
# make clean   removes what the others made in this folder

VENV := .venv
PYTHON := $(VENV)/bin/python
SHIM := $(VENV)/bin/containerd-shim-cedana-v1
INSTALLED := $(VENV)/.installed
BENCH ?= basic
PYTEST := $(PYTHON) -m pytest

.PHONY: setup setup-test demo test check lint bench lock clean

setup: $(SHIM)
	@packaging/node/install

setup-test: setup
	@packaging/node/install --containerd-1.7
	@packaging/node/install --crun
	@packaging/node/install --cri-tools

demo: setup
	@$(PYTHON) -m tests.node.demo

test: setup-test
	$(PYTEST) $(ARGS)

check: lint
	$(PYTEST) --numprocesses logical tests/unit $(ARGS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check . packaging/node/install
	$(VENV)/bin/ruff format --check . packaging/node/install
	$(VENV)/bin/mypy
	cd packaging/node && MYPYPATH=../.. ../../$(VENV)/bin/mypy --strict --cache-dir ../../.mypy_cache \
		--scripts-are-modules debian.py install
	$(VENV)/bin/lint-imports

bench: setup
	@$(PYTHON) -m bench.$(BENCH) $(ARGS)

lock:
	/usr/bin/python3 -m venv .cache/uv
	.cache/uv/bin/pip install --quiet uv
	.cache/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --extra dev $(ARGS) pyproject.toml --output-file requirements.lock

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(SHIM): $(INSTALLED) packaging/shim_launcher.py
	@$(PYTHON) packaging/shim_launcher.py $@
	@touch $@

# The lock file is installed first, every file checked against its hash; then Cedana alone, by a plain .pth file:
# the import hook of setuptools' other ways costs 20 ms at every start.
$(INSTALLED): requirements.lock pyproject.toml
	@packaging/system_python
	@test -x $(PYTHON) || /usr/bin/python3 -m venv $(VENV)
	@echo "installing Cedana's dependencies into $(VENV)"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--config-settings editable_mode=compat --editable .
	@touch $@
