# Every target makes what it needs: a virtual environment in .venv, by pip and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := test,check

.PHONY: demo test test-fast check format bench docs clean

demo: $(VENV)/.installed
	$(BIN)/attnres compare --arms prenorm block full --preset tiny --out runs/demo --resume

test: $(VENV)/.installed
	$(BIN)/python -m pytest

test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not slow"

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed
	$(BIN)/attnres bench op --csv benchmarks/results/op.csv

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) runs site build dist
