#!/bin/sh
# fsx, the exerciser of filesystems (https://crates.io/crates/fsx), for ONDECK_OPERATIONS (100,000) operations on a file of a
# cache in each of several configurations; afterwards the backing directory has what the cache shows. It needs root, and a
# network once, and the debug build of ondeck, or what ONDECK names. ONDECK_SEED (1) chooses the operations. 1 if anything differs.
set -u
cd "$(dirname "$0")/.." || exit 1
CARGO=${CARGO:-cargo}
operations=${ONDECK_OPERATIONS:-100000}
seed=${ONDECK_SEED:-1}
root=$PWD/target/fsx
[ "$(id -u)" = 0 ] || { echo "fsx: it needs root" >&2; exit 1; }
# The version is part of what a seed means.
[ -x "$root/bin/fsx" ] || "$CARGO" install --quiet --locked fsx --version 0.3.2 --root "$root" || exit 1
ondeck=${ONDECK:-$PWD/target/$(rustc -vV | sed -n 's/^host: //p')/debug/ondeck}
dir=$(mktemp -d) || exit 1
export ONDECK_STATE_DIR="$dir/state"
reader=
cleanup() {
    [ -z "$reader" ] || kill "$reader"
    "$ondeck" cache unmount --force-lose --yes "$dir/fast" > /dev/null 2>&1
    rm -rf --one-file-system "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT TERM HUP
mkdir "$dir/backing" "$dir/fast"

# What it is, the largest size of the file, how often the file is closed, how often sendfile(2) is called, and options of the cache.
exercise() {
    what=$1 size=$2 closes=$3 sends=$4
    shift 4
    cat > "$dir/fsx.toml" << END
flen = $size
[opsize]
max = 131072
[weights]
close_open = $closes
invalidate = 0.5
mapread = 1
mapwrite = 1
read = 1
write = 1
truncate = 0.3
fsync = 0.1
fdatasync = 0.1
posix_fallocate = 0.3
punch_hole = 0.5
sendfile = $sends
posix_fadvise = 0.1
copy_file_range = 0.5
END
    "$ondeck" cache mount --backing "$dir/backing" --capacity 32MiB "$@" "$dir/fast" || return 1
    file=$dir/fast/file
    echo resident > "$file"
    if [ "$what" = passthrough ]; then
        # Its open decides that all others are of the same kind.
        sleep 100000 < "$file" &
        reader=$!
    fi
    start=$(date +%s)
    "$root/bin/fsx" -f "$dir/fsx.toml" -N "$operations" -S "$seed" -P "$dir" "$file" > "$dir/log" 2>&1
    status=$?
    [ -z "$reader" ] || { kill "$reader"; wait "$reader" 2> /dev/null; reader=; }
    if [ "$status" = 0 ]; then
        before=$(sha256sum < "$file") && "$ondeck" cache unmount "$dir/fast" &&
            [ "$(sha256sum < "$dir/backing/file")" = "$before" ] || status=1
    fi
    echo "fsx, $what: $operations operations, status $status, $(($(date +%s) - start)) s"
    [ "$status" = 0 ] || { head -n 5 "$dir/log"; tail -n 50 "$dir/log"; "$ondeck" cache unmount --force-lose --yes "$dir/fast"; failed=1; }
    rm -rf "$dir/backing/file"
}

failed=0
exercise "a file larger than the cache" 50331648 0.2 0.5 --dirty-high 30 --dirty-low 10 --full-high 60 --full-low 40
exercise "a resident file" 6291456 0.2 0.5
# A writer beside a passthrough reader is refused sendfile: see docs/semantics.md.
exercise passthrough 6291456 0.2 0 --age 1s
exercise "--sync close" 12582912 0.05 0.5 --sync close
exit $failed
