# Every target makes what it needs: a virtual environment in .venv, by pip and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-ci test-fast check format bench docs clean

demo: $(VENV)/.base
	$(BIN)/attnres compare --arms prenorm block full --preset tiny --out runs/demo --resume

test: $(VENV)/.dev
	$(BIN)/python -m pytest

test-ci: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not grid" -n 2 --dist loadfile

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow"

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	$(BIN)/attnres bench op --csv benchmarks/results/op.csv
	$(BIN)/attnres bench phases --csv benchmarks/results/phases.csv --figure docs/figures/depth.svg
	$(BIN)/attnres bench overhead --csv benchmarks/results/overhead.csv
	$(BIN)/attnres bench memory --csv benchmarks/results/memory.csv
	$(BIN)/attnres bench inference --csv benchmarks/results/inference.csv
	$(BIN)/attnres bench pipeline --csv benchmarks/results/pipeline.csv
	$(BIN)/attnres bench tables --page docs/performance.md

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

# What each stamp stands for is installed: the package, the package with what tests and checks need, or with what docs need.
$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) runs site build dist
