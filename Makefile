# Everything is set up in a virtual environment of its own; nothing global is touched.
# PYTHON picks the interpreter (3.11 or newer), VENV the place: make test PYTHON=python3.12 VENV=/tmp/venv

# The first that works and is new enough: an installed name may be a version manager's that runs nothing.
PYTHON ?= $(shell for each in python3.11 python3 python3.12 python3.13; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; done || echo python3)
VENV ?= .venv
EXTRA ?= dev
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup run test compile test-compiled wheel lint format schema proto test-engines test-deploy lock image sbom bench bench-setup bench-check bench-image bench-path bench-growth bench-log bench-xds bench-routes bench-qos bench-quotas bench-micro bench-tokens breaker-ab breaker-ab-small breaker-live rollouts invariants soak load clean

help:  ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Debian's Python has venv without ensurepip unless python3-venv is there: then the system's pip installs one.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "setting up $(VENV), once"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --quiet --disable-pip-version-check --python $(BIN)/python install pip; }
	$(PIP) install --upgrade pip
	PYTHONWARNINGS=ignore $(PIP) install -e '.[$(EXTRA)]'
	@touch $(STAMP)

setup: $(STAMP)  ## the virtual environment with everything in it

run: setup  ## three simulated engines and a sidecar on 127.0.0.1:9400
	$(BIN)/sidecar demo

# A file's tests stay together, in order; two files run at a time. make test WORKERS=0: one after the other.
WORKERS ?= 2
TESTS := -n $(WORKERS) --dist loadfile

test: setup  ## the test suite (no engine, no network but loopback)
	$(BIN)/pytest $(TESTS)

compile: setup  ## build/compiled: the same with its request path compiled, for test-compiled and bench; a minute
	@$(BIN)/python -m tests.checks.compiled

test-compiled: compile  ## the test suite against the compiled package
	cd build/compiled && .venv/bin/python -m pytest --compiled $(TESTS)

# What an earlier build left in build/ would be packed as well.
wheel: setup  ## dist/*.whl, compiled for this machine and this Python; make wheel SIDECAR_COMPILE=0: plain, for any
	rm -rf build/lib* build/bdist* build/temp*
	SIDECAR_COMPILE=$(or $(SIDECAR_COMPILE),1) $(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist/*.whl

lint: setup  ## style, types, import contracts, schema drift, modules without a test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.checks.drift

format: setup  ## rewrite the sources in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: setup  ## policies/schema.json from the policy types
	$(BIN)/python -m sidecar.policy.json_schema > policies/schema.json.new
	mv policies/schema.json.new policies/schema.json

proto: setup  ## sidecar/control/pb from proto/
	$(BIN)/python -m tests.checks.proto

test-engines: setup  ## against the real engines on this machine's CPU: installs them (8 GB, minutes), then takes minutes
	$(PYTHON) tests/engines/install_vllm.py
	$(PYTHON) tests/engines/install_triton.py
	$(PYTHON) tests/engines/install_deepspeed.py
	$(PIP) install -e '.[$(EXTRA),engines]'
	$(BIN)/pytest -m engines tests/engines

# In an environment of its own: half a gigabyte of schemas and tools, and no sidecar needs them.
test-deploy:  ## the manifests, overlays, CRDs and chart without a cluster; needs kubectl and Istio's CRDs (ISTIO_CRDS=FILE)
	@$(MAKE) --no-print-directory --silent setup VENV=build/deploy/.venv EXTRA=deploy
	@command -v kubectl >/dev/null || { echo "kubectl is needed, for kubectl kustomize: https://kubernetes.io/docs/tasks/tools/" >&2; exit 1; }
	build/deploy/.venv/bin/python -m pytest $(TESTS) tests/deploy $(DEPLOY)

# Of this version of Python, for any platform. pip's settings say where packages come from; nothing of them is written.
LOCK := build/image/.venv/bin/python -m piptools compile --quiet --generate-hashes --strip-extras --allow-unsafe --no-annotate \
	--no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options
IMAGE_TOOLS := $(MAKE) --no-print-directory --silent setup VENV=build/image/.venv EXTRA=image

lock:  ## requirements.lock, requirements-build.lock: what the image is made of, by hash; see LOCKED, such as LOCKED=--upgrade
	@$(IMAGE_TOOLS)
	$(LOCK) $(LOCKED) --output-file requirements.lock pyproject.toml
	@$(BIN)/python -m tests.checks.lock compile | $(LOCK) $(LOCKED) --constraint requirements.lock --output-file requirements-build.lock -

# The name has the version; the times in it are the commit's, so that the same commit and bases make the same image.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE ?= llm-sidecar:$(VERSION)
BUILDER ?= $(shell for each in docker podman buildah; do command -v $$each >/dev/null && echo $$each && break; done)

image:  ## the container image; IMAGE=name:tag, BUILDER=docker|podman|buildah, see BUILD, such as BUILD="--build-arg BASE=..."
	@test -n "$(BUILDER)" || { echo "none of docker, podman and buildah is here: install one, such as Debian's packages buildah or podman" >&2; exit 1; }
	$(BUILDER) build --tag $(IMAGE) --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git describe --always --dirty --abbrev=40 --exclude '*') \
		--build-arg CREATED=$$(TZ=UTC git log -1 --format=%cd --date=format-local:%Y-%m-%dT%H:%M:%SZ) \
		--build-arg SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BUILD) .

sbom:  ## dist/llm-sidecar.cdx.json: what requirements.lock puts into the image (CycloneDX), with licences
	@$(IMAGE_TOOLS)
	@$(BIN)/python -m tests.checks.sbom build/image/.venv/bin/cyclonedx-py dist/llm-sidecar.cdx.json

bench: bench-setup compile  ## beside Envoy and others, 12 minutes; wants two quiet cores; see BENCH, such as BENCH="--quick"
	$(BIN)/python -m bench.compare $(BENCH)

bench-setup: setup  ## what `make bench` measures against, installed once under build/bench
	@$(BIN)/python -m bench.setup --quiet

bench-check: setup  ## that the comparison refuses answers that are not whole, and counts right; seconds
	$(BIN)/pytest bench/checks

bench-image: setup  ## the image's size, cold start and idle memory, from its own steps run into a folder, as root; minutes
	$(BIN)/python -m bench.image

bench-path: setup  ## the request path's cost without sockets
	$(BIN)/python -m bench.path_cost

bench-growth: setup  ## cost per request by number of endpoints, sessions, services; memory per session; see GROWTH, such as GROWTH=--json
	$(BIN)/python -m bench.sessions
	$(BIN)/python -m bench.growth $(GROWTH)

bench-log: compile  ## the transaction log: probes, opens, tails, memory, CPU, with real processes, 6 minutes; see LOG, such as LOG=--quick
	$(BIN)/python -m bench.txlog $(LOG)

bench-routes: compile  ## routing tables: T15, 20 sidecars and 3 Envoys, killed writers, 1,000 services, 10 minutes; see ROUTES, such as ROUTES=--quick
	$(BIN)/python -m bench.routes $(ROUTES)

bench-xds: bench-setup  ## real Envoys told the routes: under load, a refusal, a restart; 2 minutes; see XDS, such as XDS=--quick
	$(BIN)/python -m bench.xds $(XDS)

bench-qos: setup  ## who is served in time under overload, simulated, 10 minutes of CPU; see QOS, such as QOS=--quick
	$(BIN)/python -m bench.qos $(QOS)

bench-quotas: setup  ## one budget on ten sidecars, their log killed, nine minutes; see QUOTAS, such as QUOTAS=--quick
	$(BIN)/python -m bench.qos.quotas $(QUOTAS)

bench-tokens: setup  ## counting prompts: the loop's lag, the cache, estimates' errors, 8 minutes; see TOKENS, such as TOKENS="--quick cache"
	$(BIN)/python -m bench.qos.tokens $(TOKENS)

# The clock is CPU time: neighbours on the machine cost less of it than of the wall's.
bench-micro: setup  ## the request path's parts against their budgets in ns; see MICRO, such as MICRO=--benchmark-json=out.json
	$(BIN)/pytest bench/micro --benchmark-timer=time.process_time --benchmark-disable-gc --benchmark-quiet $(MICRO)

breaker-ab: setup  ## the adaptive breaker beside others, simulated; half an hour; see AB, such as AB="--arms none,ours --seeds 101"
	$(BIN)/python -m bench.breaker_ab $(AB)

breaker-ab-small: setup  ## the same on three scenarios and one seed, as a gate: under a minute
	$(BIN)/python -m bench.breaker_ab --small

rollouts: setup  ## good and bad canaries, simulated by the thousand, 45 minutes of CPU; see ROLLOUTS, such as ROLLOUTS=--small
	$(BIN)/python -m bench.rollouts $(ROLLOUTS)

breaker-live: setup  ## the real sidecar before simulated engines, breakers on and then off, 7 minutes; see LIVE, such as LIVE="--seconds 60"
	$(BIN)/python -m bench.breaker_live $(LIVE)

invariants: setup  ## the shared log's invariants over random histories with faults, ten minutes; see MINUTES, SEED
	$(BIN)/python -m tests.txlog.invariants --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

soak: setup  ## ten minutes of traffic, faults and aborts, then what is left; see SOAK, such as SOAK="--minutes 2 --seed 7"
	$(BIN)/python -m soak $(SOAK)

# In an environment of its own, so that no test and no sidecar ever runs where gevent is.
load:  ## a claim under load: SCENARIO=stall, without it the list; see LOAD, such as LOAD="--seconds 60 --json"
	@$(MAKE) --no-print-directory --silent setup VENV=build/loadtest EXTRA=load
	@build/loadtest/bin/python -m loadtest $(or $(SCENARIO),list) $(LOAD)

clean:  ## remove what was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
