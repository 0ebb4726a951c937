PYTHON ?= python3
BIN := .venv/bin
APT := DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends
STAMP := .venv/.installed
PEERS := .venv/.installed-peers

# A photograph that the embedded model recognises: a cup of espresso.
PHOTO := src/vitrail/data/samples/coffee.jpg

# Byte code is kept: collecting tests and starting processes would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test pytest test-all soak mutations lint docs notebooks browser wheel audit-dependencies clean

# A virtual environment with vitrail and its development tools; made again when the dependencies change.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(STAMP)

# The libraries that vitrail is tested together with; half a gigabyte.
$(PEERS): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[peers]"
	touch $(PEERS)

demo: $(STAMP)
	$(BIN)/vitrail explain $(PHOTO) --out vitrail-out
	@echo
	@echo "The model sees an espresso in $(PHOTO)."
	@echo "Open vitrail-out/coffee.decompx.skipplus.png: red patches speak for this class, blue ones against it."
	@echo "Next: .venv/bin/vitrail explain YOUR-PHOTO.jpg, or .venv/bin/vitrail serve for the web page."

# Type checks run beside the first tests.
test: $(STAMP) browser
	$(MAKE) --no-print-directory -j2 lint pytest

pytest: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal

# With the full cross products of methods, families, precisions and modes, of which `make test` runs some pairs, and
# inside the libraries of the extra `peers`.
test-all: lint browser $(PEERS)
	VITRAIL_TEST_ALL=1 $(BIN)/python -m pytest -n auto --dist worksteal -m ""

# The long tests of docs/reliability.md, which write docs/results/soak.md.
SOAK_MINUTES ?= 30
soak: $(STAMP)
	$(BIN)/python tools/soak.py --minutes $(SOAK_MINUTES)

# Shows that the tests of docs/reliability.md can fail: half an hour, in a copy of the tree.
mutations: $(STAMP)
	$(BIN)/python tools/mutations.py

# Debian's Chromium for the tests of the pages, where it may be installed; without one they are skipped by name. The build
# without a user interface takes half of their time.
browser:
	@test -n "$$CHROMIUM" || command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null \
	  || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
	       && { $(APT) chromium-headless-shell || $(APT) chromium; }; } \
	  || echo "No Chromium, and it cannot be installed here: the tests of the pages will be skipped."

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site needs nothing from elsewhere: look at it with `python3 -m http.server --directory site`.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The notebooks of examples/ from its scripts, executed.
notebooks: $(PEERS)
	$(BIN)/python tools/notebooks.py

# Wheel and sdist into dist/; the same to the byte wherever and whenever they are built with the same hatchling.
wheel: $(STAMP)
	$(BIN)/python -m build --no-isolation

# Known vulnerabilities of the installed packages and of our own code; asks an advisory service, so it needs a network.
audit-dependencies: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[audit]"
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive src
	$(BIN)/pip-audit --local --skip-editable

clean:
	rm -rf .venv dist build site vitrail-out
