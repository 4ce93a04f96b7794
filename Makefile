# Ringfence. `make demo` and `make test` set up everything they need on a fresh Debian or Ubuntu machine.
SHELL        := /bin/bash
.SHELLFLAGS  := -euo pipefail -c
MAKEFLAGS    += --no-print-directory
PYTHON       := .venv/bin/python
FUZZ_SECONDS ?= 20
PYTEST_ARGS  ?=
MATRIX_ARGS  ?=
BENCH_ARGS   ?= --against bwrap,runc
# Machines that set this for a reason of their own would make every start compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-user check format bench bench-runtimes figures matrix fuzz sanitize wheel lock clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/make \1\t\2/p' Makefile | expand -t 18

setup: ## .venv, locked packages, native programs (and, as root, Debian packages)
	@scripts/setup.sh test

demo: ## an agent's job in the jail, end to end: what it made, what was stopped, by what
	@scripts/setup.sh run
	@$(PYTHON) scripts/demo.py

test: ## every test, as the user you are (PYTEST_ARGS="-k jail" for some)
	@scripts/setup.sh test
	@$(PYTHON) -m pytest -q $(PYTEST_ARGS)

test-user: ## as root: conformance, security and acceptance once more as a normal user
	@scripts/setup.sh test
	@scripts/test_user.sh $(PYTEST_ARGS)

check: ## format, lint, types, layers, file sizes, spelling, lock
	@scripts/setup.sh test
	@scripts/check.sh

format: ## what `make check` would complain about and ruff can mend
	@scripts/setup.sh test
	@$(PYTHON) -m ruff format -q
	@$(PYTHON) -m ruff check -q --fix

bench: ## cold start, exec, rate, memory, beside bwrap and runc in the same run
	@scripts/setup.sh test
	@$(PYTHON) -m ringfence bench $(BENCH_ARGS); one=$$?; $(PYTHON) -m ringfence bench --egress $(BENCH_EGRESS_ARGS) || one=1; \
	    $(PYTHON) -m ringfence bench --api $(BENCH_API_ARGS) && exit $$one

bench-runtimes: ## each runtime beside the program that it is built on, restores, images of any size
	@scripts/setup.sh test
	@$(PYTHON) scripts/bench_runtimes.py $(BENCH_RUNTIMES_ARGS)

figures: ## all of it, and into docs/SPECIFICATION.md
	@scripts/setup.sh test
	@mkdir -p build
	@$(PYTHON) -m ringfence bench $(BENCH_ARGS) --json > build/bench.json || test -s build/bench.json
	@$(PYTHON) -m ringfence bench --api $(BENCH_API_ARGS) --json > build/bench-api.json || test -s build/bench-api.json
	@$(PYTHON) -m ringfence bench --egress $(BENCH_EGRESS_ARGS) --json > build/bench-egress.json || test -s build/bench-egress.json
	@$(PYTHON) scripts/bench_runtimes.py --json > build/bench-runtimes.json || test -s build/bench-runtimes.json
	@$(PYTHON) scripts/spec_figures.py build/bench.json build/bench-api.json build/bench-egress.json build/bench-runtimes.json

matrix: ## conformance, probe and bench of every runtime that works here, into docs/matrix.md and README.md
	@scripts/setup.sh test
	@$(PYTHON) scripts/matrix.py --run $(MATRIX_ARGS)

fuzz: ## every parser's fuzzer for FUZZ_SECONDS (20) each
	@scripts/setup.sh fuzz
	@$(MAKE) -C native fuzz FUZZ_SECONDS=$(FUZZ_SECONDS) 2>&1 | grep -vE '# Uses: [0-9]+$$|^###### '

sanitize: ## agent and link with AddressSanitizer and UBSan, through their own tests (make test does it for the launcher)
	@scripts/setup.sh test
	@$(MAKE) -s -C native sanitize
	@RINGFENCE_AGENT=$(CURDIR)/native/build/sanitize/ringfence-agent RINGFENCE_LINK=$(CURDIR)/native/build/sanitize/ringfence-link \
	    $(PYTHON) -m pytest -q tests/integration/agent tests/integration/linking

wheel: ## a wheel with the native programs, into dist/
	@scripts/setup.sh test
	@$(PYTHON) -m pip wheel -q --no-build-isolation --no-deps -w dist . && ls dist/*.whl

lock: ## requirements/*.txt anew, newest versions
	@scripts/setup.sh test
	@scripts/lock.sh

clean: ## what was built; .venv stays (rm -r .venv if you mean it)
	@$(MAKE) -s -C native clean
	@rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find src tests examples scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
