# make venv | demo | test | test-all | test-browser | check | pages | tutorial | docs | bench      each does everything it needs, from a fresh clone on
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS ?= .work/peers
DOCS ?= .work/docs
SITE ?= .work/site
WORKLOADS ?= W1 W2 W4
# In a folder of their own, $(VENV)/timm: transformers uses any torchvision that it finds, and this one is built for CUDA.
TIMM := timm==1.0.31 torchvision==0.28.0
EXAMPLE := examples/stdlib_lm.py
# All GPUs where there are any, else two CPU processes.
DEVICES := $(if $(shell nvidia-smi -L 2>/dev/null),,--devices 2)

# Many processes start from these sources: each file is compiled once, when it is first imported.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv demo test test-all test-browser check pages tutorial docs bench
.DELETE_ON_ERROR:

venv: $(READY)

# torch comes first and alone: what follows then takes the build that is there, not another.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --upgrade --target $(VENV)/timm $(TIMM)
	touch $@

demo: $(READY)
	$(BIN)/evenly run $(EXAMPLE) $(DEVICES)
	$(BIN)/evenly verify $(EXAMPLE) --plans "single;ddp" --devices 2 --steps 3
	@folder=$$(ls -td runs/stdlib_lm-* | head -n 1); \
	echo "The run lies in $$folder: its losses in metrics.jsonl, its weights in checkpoints/."

# Three files beside each other on two cores, the longest first: most tests wait for processes to start.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Those marked `full` too: every plan, model and fault, where `make test` has one case of a kind.
test-all: $(READY)
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "full or not full"
	PYTHON=$(BIN)/python benchmarks/gpu/run.sh --cpu --out .work/gpu

# Pages of runs and plans in chromium, which is installed where that is allowed; without one this fails.
test-browser: $(READY)
	$(BIN)/python -m benchmarks.packages chromium
	BROWSER_REQUIRED=1 $(BIN)/python -m pytest -m browser tests/report

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# All commands that the pages show, against what they say is printed; takes minutes.
pages: $(READY)
	$(BIN)/python -m docs.run_pages

# All chapters of the tutorial as pages and as notebooks, against what they show; takes long.
tutorial: $(READY)
	$(BIN)/python -m docs.notebooks

# The pages as a site in $(SITE), which asks no network. The package is read from here; its reference needs no torch.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(DOCS)/bin/mkdocs build --quiet --strict --site-dir "$(abspath $(SITE))"
	@echo "The site: $(SITE)/index.html; its search needs a server: $(PYTHON) -m http.server --directory $(SITE)"

$(DOCS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt $$($(PYTHON) -c "import tomllib; \
	print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@

# The rivals have an environment of their own, whose versions they pin. WORKLOADS="W1 W2 W3 W4" for all; takes long.
bench: $(PEERS)/.ready
	cd benchmarks/peers && export PATH="$(abspath $(PEERS))/bin:$$PATH" && \
	python bench.py speed $(WORKLOADS) && python bench.py equal W1s W2s W1p5 W1p21 W2p21 && python bench.py table

$(PEERS)/.ready: benchmarks/peers/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -r benchmarks/peers/requirements.txt
	$(PEERS)/bin/python -m pip install --quiet --no-deps -e .
	touch $@
