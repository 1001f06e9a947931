# make demo | test | thorough | lint | docs | sanitize | dist | clean. PYTHON chooses the interpreter that .venv is made from (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles what it imports when it does so, which is a part of what is installed.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile
# Prints what an extra of pyproject.toml requires: installing the extra itself would build the native library again.
EXTRA = $(BIN)/python -c "import tomllib; \
	print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'], sep='\n')"
# Without an NVIDIA GPU this release of torch is installed first: package indexes that offer its CPU build serve that.
TORCH_WITHOUT_GPU := torch==2.13.0
# Tests run in a process per core, each with one thread; a process takes up to 2 GiB.
TESTS_AT_A_TIME := -n auto --maxprocesses 8 --dist worksteal
# What the native library is built from: installing again builds it anew.
NATIVE := setup.py $(wildcard csrc/*.cpp csrc/*.h)

.PHONY: demo test thorough lint docs sanitize dist clean

demo: $(VENV)/.installed
	$(BIN)/python -m flexengine demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(TESTS_AT_A_TIME)

# More cases of what tests hold, which `make test` leaves out.
thorough: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(TESTS_AT_A_TIME) -m thorough

lint: $(VENV)/.installed-test $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --threads 2 --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run --Werror csrc/*.cpp csrc/*.h csrc/tests/*.cpp

# docs/ as a site in site/. A warning, such as a link to a page that is not there, is an error.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The programs of csrc/tests under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer.
sanitize: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/native/test_sanitizers.py -m "thorough or not thorough"

# An sdist and a wheel in dist/; tests/test_distribution.py installs what this makes.
dist: $(VENV)/.installed-test
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) runs build dist site *.egg-info flexengine/_native*.so .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(BIN)/python
	command -v nvidia-smi >/dev/null 2>&1 || $(INSTALL) "$(TORCH_WITHOUT_GPU)"
	touch $@

# A stamp is older than pyproject.toml when requirements may have changed: then pip looks again, quickly.
$(VENV)/.installed: pyproject.toml $(NATIVE) $(VENV)/.torch
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml $(NATIVE) $(VENV)/.torch
	$(INSTALL) --editable ".[test]"
	touch $@ $(VENV)/.installed

$(VENV)/.installed-lint: pyproject.toml $(VENV)/.torch
	$(call EXTRA,lint) | $(INSTALL) --requirement /dev/stdin
	touch $@

$(VENV)/.installed-docs: pyproject.toml $(VENV)/.torch
	$(call EXTRA,docs) | $(INSTALL) --requirement /dev/stdin
	touch $@
