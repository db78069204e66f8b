# `make demo` and `make test` are all that a newcomer needs; each does its own set-up.

CARGO ?= cargo
ONDECK = target/$(shell rustc -vV | sed -n 's/^host: //p')/release/ondeck
DEBUG = $(abspath $(dir $(ONDECK))../debug)

.PHONY: help build install setup demo test soak study testbed lint deny bench bench-scheduler clean-testbed

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

build: setup ## Build the release binary
	$(CARGO) build --release --locked -p ondeck
	@echo "built: $(ONDECK)"

# Four fifths of what is built are debug symbols. They stay in a file that the installed binary names: who copies that to
# /usr/lib/debug on a node has the lines of the source in a backtrace again.
install: build ## Install the binary, without its debug symbols, to $(PREFIX)/bin (default /usr/local)
	objcopy --only-keep-debug $(ONDECK) $(ONDECK).debug
	objcopy --strip-debug --add-gnu-debuglink=$(ONDECK).debug $(ONDECK) $(ONDECK).stripped
	install -D -m 755 $(ONDECK).stripped $(DESTDIR)$(or $(PREFIX),/usr/local)/bin/ondeck
	@echo "installed: $(DESTDIR)$(or $(PREFIX),/usr/local)/bin/ondeck; its debug symbols: $(ONDECK).debug"

setup:
	@tests/setup.sh

demo: build ## Run a program on a slow disk, once directly and once through `ondeck run`
	$(CARGO) build --release --locked -p ondeck-bench
	ONDECK=$(abspath $(ONDECK)) bench/demo.sh

test: setup ## Run all tests (as root also those that need mounts and other users), and say how many were skipped
	@CARGO='$(CARGO)' tests/all.sh

soak: setup ## All tests beside a real Slurm ROUNDS (10) times, one of them with ONDECK_SOAK (50) jobs (hours, as root)
	ROUNDS=$(or $(ROUNDS),10) ONDECK_SOAK=$(or $(ONDECK_SOAK),50) tests/soak.sh

study: ## What RSA nodes would save for the logs of jobs in TRACES, a directory of *.swf and *.swf.gz (ten minutes)
	TRACES='$(TRACES)' CARGO='$(CARGO)' tests/study.sh

testbed: setup ## A shell on a cluster of HOSTS (4) nodes here, with agents; SLURM=2: with a Slurm, for docs/admin.md (root)
	$(CARGO) build --locked -p ondeck -p ondeck-testbed
	ONDECK=$(DEBUG)/ondeck $(DEBUG)/ondeck-testbed shell --hosts $(or $(HOSTS),4) --with-munge \
	    $(if $(SLURM),--with-slurm $(SLURM),--with-agents)

lint: setup ## Check formatting, lints and that dependencies point down
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) test --locked -p ondeck-testbed --test dependencies

deny: ## Check licences, duplicates and advisories of dependencies with cargo-deny (network)
	$(CARGO) deny --locked check

bench: build ## Compare with other copy tools and write docs/benchmarks.md (an hour or more, best as root)
	bench/setup.sh
	$(CARGO) build --release --locked -p ondeck-bench -p ondeck-testbed
	ONDECK=$(abspath $(ONDECK)) $(dir $(ONDECK))ondeck-bench stage --rounds 3 --markdown docs/benchmarks.md
	ONDECK=$(abspath $(ONDECK)) $(dir $(ONDECK))ondeck-bench ramdisk --rounds 3 --markdown docs/engine-benchmarks.md
	ONDECK=$(abspath $(ONDECK)) $(dir $(ONDECK))ondeck-bench cache --rounds 3 --markdown docs/cache-benchmarks.md
	ONDECK=$(abspath $(ONDECK)) $(dir $(ONDECK))ondeck-bench layouts --markdown docs/layout-benchmarks.md
	$(MAKE) bench-scheduler

bench-scheduler: build ## Measure the scheduler beside a real Slurm and write docs/scheduler-benchmarks.md (45 minutes, as root)
	$(CARGO) build --release --locked -p ondeck-bench -p ondeck-testbed
	set -e; for part in schedule hooks burst-buffers thesis simulator replay layout-history observer; do \
		ONDECK=$(abspath $(ONDECK)) $(dir $(ONDECK))ondeck-bench $$part --markdown docs/scheduler-benchmarks.md; \
	done

clean-testbed: ## Remove what a crashed test, benchmark or demonstration left behind
	@tests/clean.sh
