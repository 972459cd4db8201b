# What people and CI run. `make train ARGS="--data my.yaml --epochs 50"` hands ARGS to train.py.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: train test check bench docs

# One process per CUDA device; without several of them, the one process of accelerate_config.yaml. On a CPU that
# process may use all cores: `accelerate launch` would give it one thread.
train: $(VENV)/.installed-core
	devices=$$($(BIN)/python -c "import torch; print(torch.cuda.device_count())") || exit 1; \
	if [ "$$devices" -gt 1 ]; then set -- --multi_gpu --num_processes "$$devices"; fi; \
	if [ "$$devices" -eq 0 ]; then export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(getconf _NPROCESSORS_ONLN)}; fi; \
	$(BIN)/accelerate launch --config_file accelerate_config.yaml "$$@" train.py $(ARGS)

# Several test processes share the cores; threads inside each would fight over them.
test check: export OMP_NUM_THREADS := 1

test: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadgroup

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadgroup tests/unit

bench: $(VENV)/.installed-core
	for script in $(wildcard benchmarks/*.py); do $(BIN)/python $$script || exit 1; done

# The pages of docs/ are plain Markdown, read where they lie; what can rot is their links.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/unit/test_docs.py

# The stamps stand for what is installed: a second call starts at once, a new pyproject.toml installs again.
$(VENV)/.installed-core: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed-core
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@
