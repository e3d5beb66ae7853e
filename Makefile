# Two commands do everything on a fresh machine with Python 3.11+: `make run` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help run demo test check campaign servers faults outage image lint format reference lock sbom bench clean

help:
	@echo "make run        serve on 127.0.0.1:8077, on local disk; prints the calls that try it"
	@echo "make demo       a live writer, an export, the home deleted, a restore elsewhere, the receipts"
	@echo "make test       the tests, with a real S3 server and a real claude-mem worker (minutes)"
	@echo "make check      the inner loop: linters, types, and the tests that need no other process"
	@echo "make campaign   the long ones: hundreds of exports under a live writer, kill -9 at any moment"
	@echo "make servers    the store's contract and races over MinIO, versitygw and s3proxy (Go and Java; minutes to make them, once)"
	@echo "make faults     every injected fault, at every step, at both providers, and what came of it (minutes)"
	@echo "make outage     an hour of exports while Postgres is away, and what is found afterwards"
	@echo "make bench      measure, beside restic and borg, and write benchmarks/results.md and docs/plots (an hour, 10 GB of disk)"
	@echo "make image      build the container image and check what it promises (docker or podman)"
	@echo "make lint       ruff and mypy"
	@echo "make lock       choose the newest versions of what is installed, and write them down: requirements.lock, the SBOM"
	@echo "make reference  write what comes from the code: docs/reference, docs/options.md, docs/openapi.json"

# With LOCKED=1, as CI has it, packages are those of the lock files, by their hashes; pip then finds nothing left to choose.
# What it takes to run: about 150 MB, under a minute. Tests and linters come on top of that, in the same place.
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 …"; exit 1; }
	@echo "Making a virtual environment in .venv, with what the sidecar needs to run (once):"
	$(PYTHON) -m venv .venv
	@if [ -n "$(LOCKED)" ]; then $(BIN)/python -m pip install --disable-pip-version-check --no-compile --require-hashes -r requirements.lock; fi
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --editable .
	@touch $@

.venv/dev: pyproject.toml .venv/ready
	@echo "Adding what the tests need: a real S3 server, Postgres, a browser's driver, the SDKs (once; 1 GB, minutes):"
	$(BIN)/python -m pip install --quiet --upgrade pip
	@if [ -n "$(LOCKED)" ]; then $(BIN)/python -m pip install --require-hashes -r requirements-dev.lock; fi
	$(BIN)/python -m pip install --editable . --group dev
	-@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null  # some have files for other Pythons
	@touch $@

run: .venv/ready
	@$(BIN)/memory-sidecar serve

demo: .venv/ready
	@$(BIN)/memory-sidecar demo

test: .venv/dev
	@$(BIN)/python -m compileall -q sidecar adapters emulators  # the tests start thousands of processes
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist worksteal

QUICK := tests/test_rooms.py tests/docs tests/config tests/records tests/retention tests/store/test_format.py tests/store/test_ids.py \
	tests/program/test_rules.py tests/program/test_tarballs.py tests/program/test_filters.py tests/limits/test_plan.py
# These start a server, or take half of the minute that all of it may take.
NOT_QUICK := tests/store/test_ids.py::test_over_http_too tests/store/test_format.py::test_objects_of_a_bucket_read_as_those_of_a_folder \
	tests/records/test_trees.py tests/records/test_estimate.py

check: lint
	$(BIN)/python -m pytest -n 2 $(QUICK) $(NOT_QUICK:%=--deselect=%)

campaign: .venv/dev
	$(BIN)/python -m pytest -n 2 -m slow

# Made in .cache/servers. Where Go, Java or Maven is missing its tests are skipped, and the reasons are listed at the end.
servers: .venv/dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup -rs -m servers tests/contracts/test_store_contract.py tests/campaigns/test_s3_servers.py

faults: .venv/dev
	$(BIN)/python -m pytest -n 2 tests/engine/test_faults.py -m "slow or not slow" --fault-table

outage: .venv/dev
	$(BIN)/python -m pytest tests/search/test_outage.py --outage 60

image: .venv/dev
	$(BIN)/python deploy/build_image.py $(IMAGE_FLAGS)
	$(BIN)/python deploy/check_image.py $(if $(findstring --nested,$(IMAGE_FLAGS)),--nested)

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

reference: .venv/dev
	$(BIN)/python -m docs.generate

lock:
	$(PYTHON) deploy/lock.py

sbom:
	$(PYTHON) deploy/lock.py --bill

bench: .venv/dev
	$(BIN)/python -m benchmarks --write

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache
