#!/bin/sh
# Whether the oldest Rust that Cargo.toml promises (rust-version) still compiles everything but the tests. By rustup, which
# installs it if need be.
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
[ -n "$version" ] || { echo "minimum: Cargo.toml says no rust-version" >&2; exit 1; }
command -v rustup >/dev/null || { echo "minimum: it needs rustup, to have Rust $version" >&2; exit 1; }
rustup run "$version" rustc --version 2>/dev/null || {
    rustup toolchain install "$version" --profile minimal
    rustup run "$version" rustc --version
}
# A directory of its own: otherwise all would be built anew for each of the two.
exec cargo "+$version" check --locked --workspace --target-dir target/minimum
