# `make demo` and `make test` need nothing but Python 3.10+ and pip; both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTS := tests
PACKAGES := chromium chromium-driver prometheus libopenmpi-dev openmpi-bin openssh-server cmake g++ make python3-dev fish zsh

.PHONY: help demo test test-deps check coverage bench docs clean

help:
	@echo "make demo       trace a real two-rank training run and print its report"
	@echo "make test       run the whole suite"
	@echo "make test-deps  install the Debian packages that some tests want ($(PACKAGES))"
	@echo "make check      ruff, mypy --strict, import-linter"
	@echo "make coverage   the coverage of all processes that the tests start; takes an hour"
	@echo "make bench      the benchmarks of docs/benchmarks.md"
	@echo "make docs       write what is generated: tables of docs/, configurations, dashboards, completions"
	@echo "make clean      remove .venv and what the tools leave"

$(READY): pyproject.toml constraints.txt otel_dltrace.pth
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt -e '.[torch,otel,test,dev]'
	touch $@

demo: $(READY)
	$(BIN)/otel-dltrace run -- $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_ddp.py --slow-rank 1 --slow-ms 5
	@run=$$(ls -dt dltrace-train_ddp-* | head -1) && \
	$(BIN)/otel-dltrace export $$run --to chrome -o $$run.trace.json.gz && \
	echo && echo "the run directory      $$run" && \
	echo "the Chrome trace       $$run.trace.json.gz   (open it in https://ui.perfetto.dev or chrome://tracing)" && \
	echo "the report again       $(BIN)/otel-dltrace report $$run"

# The tests start thousands of processes; each would compile what it imports anew where nothing may write it down.
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY)
	$(BIN)/python -m tests.support.build_horovod
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --cov --cov-report=term:skip-covered tests

test-deps:
	@if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  mkdir -p /run/sshd; `# sshd wants it, and a container that has not booted lacks it` \
	  dpkg -s $(PACKAGES) >/dev/null 2>&1 || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(PACKAGES) >/dev/null; } || \
	  echo "make test-deps: the packages could not be installed; the tests that want them are skipped"; \
	else echo "make test-deps: needs apt-get and root; the tests that want $(PACKAGES) are skipped without"; fi

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A few tests fail under it: they compare what a process prints, imports or leaves in its folder.
coverage: export CHECKOUT = $(CURDIR)
coverage: $(READY)
	rm -rf .coverage-all && mkdir .coverage-all
	$(BIN)/python -m tests.support.build_horovod
	-$(BIN)/coverage run --rcfile=tests/coverage.ini -m pytest -p no:cov -n 3 --dist loadfile --no-loadscope-reorder $(TESTS)
	$(BIN)/coverage combine --rcfile=tests/coverage.ini --quiet
	$(BIN)/coverage report --rcfile=tests/coverage.ini

bench: $(READY)
	$(BIN)/python -m benchmarks

docs: $(READY)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/sizing.py
	$(BIN)/python deploy/grafana/generate.py

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
