# Keepsake. `make serve` sets up and serves, `make test` tests, `make check` is what CI wants to see.
#
# All cargo commands use --release and --workspace: the same profile and features, so RocksDB's C++ is compiled once
# for serving, tests, clippy and documentation, and once for all clones that share the target folder.

SHELL := /bin/bash
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help setup system toolchain build model nvrtc serve test check format clippy doc deny boundaries bench clean

CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)
export CARGO_TARGET_DIR ?= $(CACHE)/keepsake/target
# rustup's default place, for a shell that has not read its profile since the installation.
export PATH := $(PATH):$(HOME)/.cargo/bin

KEEPSAKE := $(CARGO_TARGET_DIR)/release/keepsake
# `make serve CONFIG=my.toml ARGS="--bind 127.0.0.1:9000"`
SERVE_ARGS := $(if $(CONFIG),--config $(CONFIG)) $(ARGS)

help:
	@echo "make setup   install what is missing (Debian, Ubuntu), build, fetch the demo model"
	@echo "make serve   setup, then serve on 127.0.0.1:8000; CONFIG=FILE and ARGS='...' are passed on"
	@echo "make test    setup, then all tests"
	@echo "make check   format, clippy, documentation, licences, boundaries, and the tests"
	@echo "make nvrtc   fetch NVIDIA's run-time compiler, so that the tests compile the GPU kernels without a GPU"
	@echo "make bench   setup, then prefill and decode rates of this machine"
	@echo "make clean   remove this workspace's build output, but not RocksDB's"

setup: model

system:
	@scripts/install-packages

toolchain: system
	@command -v cargo >/dev/null || { \
	  echo "keepsake: cargo not found: install Rust with rustup (https://rustup.rs), then run make again" >&2; exit 1; }

build: toolchain
	@compgen -G "$(CARGO_TARGET_DIR)/release/build/librocksdb-sys-*/out/librocksdb.a" >/dev/null || \
	  echo "keepsake: first build: RocksDB's C++ takes 20-30 minutes on 2 cores, once ($(CARGO_TARGET_DIR))"
	@cargo build --release --workspace --bin keepsake --locked

model: build
	@$(KEEPSAKE) model fetch >/dev/null

# Found there by the server and by the tests; about 90 MB. A GPU's user may have it from the CUDA toolkit already.
nvrtc:
	@test -e $(CACHE)/keepsake/nvrtc/nvidia/cu13/lib/libnvrtc.so.13 || \
	  python3 -m pip install --quiet --no-deps --target $(CACHE)/keepsake/nvrtc 'nvidia-cuda-nvrtc==13.0.*'

serve: setup
	@exec $(KEEPSAKE) serve $(SERVE_ARGS)

test: setup
	cargo test --release --workspace --locked --no-fail-fast

check: format clippy doc deny boundaries test

format: toolchain
	cargo fmt --all --check

clippy: toolchain
	cargo clippy --release --workspace --all-targets --locked -- -D warnings

doc: toolchain
	RUSTDOCFLAGS="-D warnings" cargo doc --release --workspace --no-deps --locked

# cargo-deny is the better judge, but takes ten minutes to install on 2 cores: without it a script applies the licence,
# source and ban rules of the same deny.toml.
deny: toolchain
	@if cargo deny --version >/dev/null 2>&1; then cargo deny --locked check bans licenses sources; \
	  else python3 scripts/check.py deny; fi

boundaries: toolchain
	@python3 scripts/check.py boundaries

bench: setup
	@$(KEEPSAKE) bench $(ARGS)

clean:
	cargo clean --release -p keepsake-config -p keepsake-kernels -p keepsake-model -p keepsake-tiers \
	  -p keepsake-runtime -p keepsake-tests
