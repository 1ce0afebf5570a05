# Every target makes .venv itself when it is missing or pyproject.toml is newer.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-slow lint format bench clean

demo: $(STAMP)
	$(BIN)/flatmin compare --task mnist1d --methods sgd,sam,asam,ad,ema,sema,sam+sema --seeds 5 --out demo --overwrite

test: $(STAMP)
	$(BIN)/pytest -m "not slow"

test-slow: $(STAMP)
	$(BIN)/pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/steps.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis demo

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@
