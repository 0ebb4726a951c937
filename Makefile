PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# A photograph in the public domain (Rear Admiral Grace Hopper) that matplotlib ships.
PHOTO := import matplotlib; print(matplotlib.get_data_path() + "/sample_data/grace_hopper.jpg")

.PHONY: demo test lint clean

# A virtual environment with vitrail and its development tools; made again when the dependencies change.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/vitrail explain "$$($(BIN)/python -c '$(PHOTO)')" --out vitrail-out

test: lint
	$(BIN)/python -m pytest -n auto

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv dist build vitrail-out
