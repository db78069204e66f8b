#!/usr/bin/env bash
# Installs the tools that `ondeck-bench` compares Ondeck with: Debian's packages through apt-get, the four
# written in Rust through cargo, and AccaSim through pip, into a directory of their own:
#
#   ${XDG_CACHE_HOME:-$HOME/.cache}/ondeck-bench
#
# Quick when everything is there. A tool that cannot be installed is named and left out: the
# benchmark then shows it as "not installed".
set -u

# The versions are part of the figures, so they do not move by themselves.
crates=(fcp@0.2.2 cpz@3.2.1 xcp@0.24.9 lms@0.4.0)

# command:package
packages=(
    cp:coreutils rsync:rsync tar:tar rclone:rclone fpsync:fpart
    mergerfs:mergerfs fusermount3:fuse3 python3:python3-venv
    # What the benchmark itself needs: a disk of its own, and an ordinary user.
    mkfs.ext4:e2fsprogs losetup:mount setpriv:util-linux
)

root=${XDG_CACHE_HOME:-$HOME/.cache}/ondeck-bench
# Administrators' programs are not on everyone's PATH, and cargo often is only in its own directory.
PATH=$PATH:/usr/sbin:/sbin:${CARGO_HOME:-$HOME/.cargo}/bin
missing=()

say() { printf 'bench/setup.sh: %s\n' "$*"; }

install_packages() {
    local entry wanted=()
    for entry in "${packages[@]}"; do
        command -v "${entry%%:*}" >/dev/null || wanted+=("${entry#*:}")
    done
    [ ${#wanted[@]} -eq 0 ] && return

    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        say "cannot install ${wanted[*]}: this takes root and apt-get"
    else
        say "installing ${wanted[*]}"
        # Another apt-get may be running; a stale list of packages is the usual reason to fail.
        local apt=(apt-get -q -y -o DPkg::Lock::Timeout=300)
        export DEBIAN_FRONTEND=noninteractive
        "${apt[@]}" update >/dev/null || say "the list of packages could not be brought up to date"
        # One by one: a package that is gone must not keep the others away.
        local package
        for package in "${wanted[@]}"; do
            "${apt[@]}" install --no-install-recommends "$package" >/dev/null ||
                say "$package could not be installed"
        done
    fi
    for entry in "${packages[@]}"; do
        command -v "${entry%%:*}" >/dev/null || missing+=("${entry%%:*}")
    done
}

install_crate() {
    local name=${1%@*} version=${1#*@} log
    if [ -x "$root/bin/$name" ] && grep -q "^\"$name $version " "$root/.crates.toml" 2>/dev/null; then
        return
    fi
    if ! command -v cargo >/dev/null; then
        missing+=("$name (no cargo)")
        return
    fi
    say "building $name $version"
    log=$root/$name.log
    local install=(cargo install --quiet --force --root "$root" --version "$version" "$name")
    # Not from the workspace, whose cargo configuration (static linking) is not the peers'. With the
    # versions of libraries that its authors tested, unless those no longer build.
    if (cd "$root" && { "${install[@]}" --locked || "${install[@]}"; }) >"$log" 2>&1; then
        rm -f "$log"
    else
        tail -n 5 "$log"
        missing+=("$name")
    fi
}

# A simulator that `ondeck-bench simulator` is compared with, in a Python of its own.
install_accasim() {
    local version=1.1.3 at=$root/accasim log=$root/accasim.log
    if "$at/bin/python3" -c "import accasim" 2>/dev/null && [ "$(cat "$at/version" 2>/dev/null)" = "$version" ]; then
        return
    fi
    say "installing AccaSim $version"
    if { python3 -m venv --clear "$at" && "$at/bin/python3" -m pip install --quiet "accasim==$version" &&
        echo "$version" >"$at/version"; } >"$log" 2>&1; then
        rm -f "$log"
    else
        tail -n 5 "$log"
        missing+=(accasim)
    fi
}

mkdir -p "$root" || exit 1
install_packages
for crate in "${crates[@]}"; do
    install_crate "$crate"
done
install_accasim

if [ ${#missing[@]} -gt 0 ]; then
    say "going on without: ${missing[*]}"
else
    say "everything is there"
fi
