# SPDX-License-Identifier: Apache-2.0
# On a fresh Debian 12 machine, as root:
#   make demo    sets everything up and runs three scenarios for real
#   make test    sets everything up and passes the tests
.PHONY: help setup install demo test test-guest nccl-check gpu-check check lint bpf proto pxd bench lab-clean clean
PY := .venv/bin
POLICIES := stagger,static,cubic,reno,bbr
# Tests that nothing outside of their process has a say in: they share the processors.
PURE := tests/core tests/scenario tests/sim
# Tests that mostly wait, on sockets and in namespaces of their own: two files at a time.
WAITING := $(addprefix tests/,daemon switchemu proto shm bench torch) $(wildcard tests/test_*.py)

help:           ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup:          ## packages by apt, .venv, compiled loops, BPF programs; quick when nothing changed
	@scripts/setup.sh

install: setup  ## programs and systemd units into PREFIX (/usr)
	@scripts/install.sh

demo: setup     ## three scenarios for real, in 5 minutes: tables and figures against cubic, reno, bbr, static
	@mkdir -p results
	@for s in ps-incast two-equal ps-plus-ring; do \
	  $(PY)/flowslot lab run lab/scenarios/$$s.toml --policy $(POLICIES) --repeat 2 --iterations 12 \
	    --figure results/$$s.png || exit 1; \
	done

test: setup     ## all tests, kernel tests included (root)
	@$(PY)/python -m pytest -n auto $(PURE)
	@$(PY)/python -m pytest -n 2 --dist loadfile $(WAITING)
	@$(PY)/python -m pytest $(foreach done,$(PURE) $(WAITING),--ignore=$(done))

test-guest: setup  ## kernel tests of the pacing back ends in Debian's own kernel (emulated, minutes)
	@scripts/guest.sh

nccl-check: setup  ## all tests of the NCCL plugin: every version, socket count and size, under sanitizers, in stock NCCL (fetches 1.2 GB)
	@NCCL_CHECK=1 FLOWSLOT_NCCL_DOWNLOAD=1 $(PY)/python -m pytest tests/nccl

gpu-check:      ## the NCCL plugin in stock NCCL on a real GPU; needs neither a set-up nor root
	@python3 nccl_patch/gpu_check.py

check: setup lint   ## before every commit: linters, types, import rules, tests without root
	@$(PY)/python -m pytest -m "not root"

lint: setup
	@$(PY)/ruff check .
	@$(PY)/ruff format --check .
	@$(PY)/mypy
	@$(PY)/python scripts/rooms.py >build/import_rules.toml
	@$(PY)/lint-imports build/import_rules.toml

bpf:            ## the BPF programs
	@$(MAKE) --no-print-directory -C bpf

proto: setup    ## regenerate the protobuf code that is checked in
	@scripts/gen_proto.sh

pxd:            ## rewrite the structs in .pxd files from the dtypes of the rows, before a set-up
	@$(PY)/python scripts/gen_pxd.py

bench: setup    ## benchmarks against their recorded bounds, and how fast the simulator is
	@$(PY)/python -m bench.run; broken=$$?; $(PY)/python -m bench.engine_speed && exit $$broken

lab-clean:      ## remove what a killed lab run left behind
	@$(PY)/flowslot lab clean

clean:
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis results build
	@find */flowslot*/ -name '*.so' -delete
	@$(MAKE) --no-print-directory -s -C bpf clean
