PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Entries of the three source folders, linked as the one package they install as.
TYPECHECK := build/typecheck

.PHONY: demo test test-slow lint types clean

demo: $(STAMP)
	$(BIN)/comera-fx demo $(ARGS)

test: lint types
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	rm -rf $(TYPECHECK)
	mkdir -p $(TYPECHECK)/comera_fx
	ln -s $(CURDIR)/comera_fx/* $(TYPECHECK)/comera_fx/
	ln -s $(CURDIR)/passes $(CURDIR)/kernels $(TYPECHECK)/comera_fx/
	MYPYPATH=$(TYPECHECK) $(BIN)/mypy --config-file pyproject.toml --explicit-package-bases $(TYPECHECK)/comera_fx

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "comera_fx needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist demo .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
