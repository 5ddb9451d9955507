# Every target makes the virtual environment it needs; nothing is installed outside of it.
#
#   make demo PYTHON=python3.12     another interpreter (3.11 to 3.13)
#   make test ARGS="-k settings"    arguments for pytest, which then runs one test after the other
#   make test JOBS=8                so many side by side; more than cores, as half of the tests wait

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
JOBS   ?= 3
BIN    := $(VENV)/bin
EXTRAS := worker,gateway,batch,embedded,dev

# Tests start a thousand processes; without cached bytecode each compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

# Strict, because only then type checkers see the mapped folders. Strict links file by file, so
# that an added or removed file needs the links made again.
EDITABLE := --config-settings editable_mode=strict
RELINK := $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable . $(EDITABLE)
LIST_FILES := find producer gpu_worker kernels shared tools -type f -not -path '*/__pycache__/*' | sort

# What counts or times what a whole machine does comes last, one after the other. Both parts run even
# if the first one fails.
define TEST_ALL
status=0; \
$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=20 -m "not slow and not alone" || status=$$?; \
$(BIN)/pytest tests/faults tests/simulate -m "alone and not slow" || status=$$?; \
exit $$status
endef

.PHONY: help demo test oracle check fuzz api-fuzz bench check-native faults deploy-test soak install clean FORCE
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## Say what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: install ## Run the whole pipe on this machine: Redis, a worker, streaming requests
	$(BIN)/penstock demo $(ARGS)

test: install ## Run the tests
ifeq ($(strip $(ARGS)),)
	@$(TEST_ALL)
else
	$(BIN)/pytest $(ARGS)
endif

oracle: install ## Compare every model family in every mode with transformers: minutes
	$(BIN)/pytest tests/model tests/engine tests/kernels tests/bench tests/unit -n $(JOBS) --dist loadfile -m slow $(ARGS)

check: install ## Lint, formatting, types, known vulnerabilities of dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/audit_dependencies.py

fuzz: install ## Send a million malformed cases, shared out among all entrances, going on where it was: FUZZ_CASES=N
	$(BIN)/python tests/fuzz/driver.py --cases $${FUZZ_CASES:-1000000} $(ARGS)

api-fuzz: install ## Send 20,000 requests to the gateway, made from its OpenAPI page
	$(BIN)/pytest tests/gateway/test_openapi.py -m slow --timeout 3600 -s $(ARGS)

bench: install ## Measure engine, scheduler and queue on this machine
	$(BIN)/penstock bench engine $(ARGS)
	$(BIN)/penstock bench scheduler $(ARGS)
	$(BIN)/penstock bench queue $(ARGS)

# The sanitisers' runtimes come first in the process. What Python keeps to its end is no leak.
check-native: install ## Test the native library under address and undefined-behaviour sanitisers
	NATIVE_SANITISERS=1 ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest -n 0 tests/kernels/test_native_largest.py tests/kernels/test_native_draw.py tests/kernels/test_native_logprobs.py tests/kernels/test_native_forbid.py \
	  tests/kernels/test_native_linear.py tests/kernels/test_native_coded.py \
	  tests/kernels/test_native_experts.py \
	  tests/kernels/test_native_attention.py \
	  tests/kernels/test_native_steps.py tests/kernels/test_native_packed.py tests/kernels/test_native_screen.py \
	  tests/kernels/test_native_short.py tests/kernels/test_kv_8_bit.py $(ARGS)

faults: install ## Run fault storms and the long form of the fault tests: twenty minutes
	$(BIN)/penstock chaos --seconds 60 --all
	$(BIN)/penstock chaos --seconds 60 --all --model demo --workers 3 --in-flight 16 --tokens 80
	$(BIN)/penstock chaos --stall
	$(BIN)/pytest tests/faults -m "" --timeout 3600 $(ARGS)
	$(BIN)/pytest tests/batchers tests/batches tests/delivery tests/integration -m slow --timeout 3600 $(ARGS)

deploy-test: install ## Build the images, run the compose file, kill, scale and restart: needs Docker
	$(BIN)/pytest tests/deploy -m "" -s --timeout 900 $(ARGS)

soak: install ## A million requests through the simulator, twice, and minutes of real ones: what stays?
	$(BIN)/pytest tests/simulate/test_soak.py tests/faults/test_soak.py -m "" $(ARGS)

install: $(VENV)/.linked $(VENV)/.native ## Make the virtual environment, or bring it up to date

# Compiled now, so that no worker waits for it. Without a compiler PyTorch computes instead.
$(VENV)/.native: $(shell find kernels/cpu/src -type f) $(wildcard kernels/cpu/*.py) | $(VENV)/.linked
	@$(BIN)/python -m penstock.kernels.cpu || true
	@touch $@

clean: ## Remove the virtual environment and everything built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit("penstock needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[$(EXTRAS)]' $(EDITABLE)
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # 18,000 files; pip uses one core for them
	@$(LIST_FILES) > $(VENV)/.files
	@touch $@ $(VENV)/.linked

# Rewritten only when it differs, so that links are made again only then.
$(VENV)/.files: $(VENV)/.installed FORCE
	@$(LIST_FILES) > $@.new
	@if cmp --silent $@.new $@; then rm $@.new; else mv $@.new $@; fi

# An installation that has just been made is linked already, which make cannot know.
$(VENV)/.linked: $(VENV)/.files
	@test ! $< -nt $@ || { echo "linking added and removed files"; $(RELINK); }
	@touch $@
