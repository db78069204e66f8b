#!/usr/bin/env bash
# The demo: one program, run once straight on a slow disk and once under `ondeck run`.
#
# The program (checkpoint-writer) reads 256 MiB and writes a checkpoint of 1 GiB, one file per
# simulated rank, and knows nothing about Ondeck. As root the slow disk is an ext4 on a loop device
# that a cgroup holds to 50 MB/s each way, and whose write-back cache is kept small, as that of a
# parallel filesystem's client is; otherwise the disk is what it is, and the output says so.
#
# Environment: ONDECK, ONDECK_BENCH and CHECKPOINT_WRITER name the programs (default: the release
# build of this workspace), DEMO_DIR a directory on disk with 4 GB free (default: /var/tmp).
set -euo pipefail

rate=50000000                 # bytes per second, each way
write_back=$((32 << 20))      # bytes that may wait in the page cache for the slow disk
input_files=64
input_file_size=4M
rank_files=2048
rank_size=512KiB
image_size=3G
space_needed_kib=$((4 << 20))

PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "$0")" && pwd)

say() { printf '%s\n' "$*"; }
fail() { printf 'demo: %s\n' "$*" >&2; exit 1; }

# The newest release build of a program, with or without the directory that `--target` adds.
built() {
    local candidate newest=''
    for candidate in "$here"/../target/release/"$1" "$here"/../target/*/release/"$1"; do
        if [ -x "$candidate" ] && { [ -z "$newest" ] || [ "$candidate" -nt "$newest" ]; }; then
            newest=$candidate
        fi
    done
    printf '%s' "$newest"
}

ondeck=${ONDECK:-$(built ondeck)}
bench=${ONDECK_BENCH:-$(built ondeck-bench)}
writer=${CHECKPOINT_WRITER:-$(built checkpoint-writer)}
for program in "$bench" "$writer"; do
    [ -x "$program" ] || fail "not built: run cargo build --release -p ondeck-bench"
done

# --- what is set up, and how each step is undone -------------------------------------------------

work='' child='' device='' mounted='' throttled=''
cgroup_v1='' cgroup_v2='' cgroup_v2_parent='' io_enabled='' bdi='' bdi_before=''

cleanup() {
    # A second signal must not leave the rest of this undone.
    trap '' INT TERM HUP
    set +e
    [ -n "$child" ] && kill -TERM "$child" 2>/dev/null
    # Before waiting: Ondeck does not give results up, and saves them faster on a fast disk.
    unthrottle
    [ -n "$child" ] && wait "$child" 2>/dev/null
    if [ -n "$mounted" ]; then
        umount "$mounted" || umount --lazy "$mounted"
    fi
    [ -n "$device" ] && losetup --detach "$device"
    [ -n "$work" ] && rm -rf "$work"
}

# In the background, because the shell handles signals only between commands or in `wait`.
run() {
    "$@" &
    child=$!
    local status=0
    wait "$child" || status=$?
    child=''
    return "$status"
}

make_slow_disk() {
    [ "$(id -u)" -eq 0 ] || { say "unthrottled: no permission, not root"; return; }
    local image=$work/slow.img
    truncate -s "$image_size" "$image"
    if ! device=$(losetup --find --show --direct-io=on "$image" 2>/dev/null); then
        device=''
        say "unthrottled: no permission, no loop device can be had"
        return
    fi
    mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0,nodiscard "$device"
    mkdir "$work/slow"
    mount "$device" "$work/slow"
    mounted=$work/slow
    disk=$mounted
}

throttle() {
    [ -n "$device" ] || return 0
    local number
    number=$(cat "/sys/class/block/${device#/dev/}/dev")
    if throttle_v1 "$number"; then
        say "slow disk: ext4 on a loop device, cgroup v1 blkio at $((rate / 1000000)) MB/s each way"
    elif unthrottle && throttle_v2 "$number"; then
        say "slow disk: ext4 on a loop device, cgroup v2 io.max at $((rate / 1000000)) MB/s each way"
    else
        say "unthrottled: no controller (neither cgroup v1 blkio nor cgroup v2 io can be used)"
        return
    fi
    throttled=yes
    limit_write_back "$number"
}

# Version 1 counts what the kernel writes back from the page cache for nobody but the root group.
# The limit is therefore the root group's, on this one device, and we go there.
throttle_v1() {
    local root
    root=$(awk '$3 == "cgroup" && $4 ~ /(^|,)blkio(,|$)/ { print $2; exit }' /proc/mounts)
    [ -n "$root" ] || return 1
    { echo $$ >"$root/cgroup.procs"; } 2>/dev/null || return 1
    local way
    for way in read write; do
        { echo "$1 $rate" >"$root/blkio.throttle.${way}_bps_device"; } 2>/dev/null || return 1
        cgroup_v1=$root:$1
    done
}

# Version 2 charges write-back to the group that dirtied the pages, if memory is counted as well.
throttle_v2() {
    local root
    root=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
    [ -n "$root" ] && grep -qw io "$root/cgroup.controllers" || return 1
    if ! grep -qw io "$root/cgroup.subtree_control"; then
        { echo '+io' >"$root/cgroup.subtree_control"; } 2>/dev/null || return 1
        io_enabled=$root
    fi
    { echo '+memory' >"$root/cgroup.subtree_control"; } 2>/dev/null || true
    mkdir "$root/ondeck-demo.$$" 2>/dev/null || return 1
    cgroup_v2=$root/ondeck-demo.$$
    cgroup_v2_parent=$root$(sed -n 's/^0:://p' /proc/self/cgroup)
    { echo "$1 rbps=$rate wbps=$rate" >"$cgroup_v2/io.max"; } 2>/dev/null || return 1
    { echo $$ >"$cgroup_v2/cgroup.procs"; } 2>/dev/null || return 1
}

# Without this the page cache would take the whole checkpoint, and the program would seem to have
# a fast disk; a client of a parallel filesystem may hold back only some tens of megabytes.
limit_write_back() {
    bdi=/sys/class/bdi/$1
    if [ ! -w "$bdi/strict_limit" ] || [ ! -w "$bdi/max_bytes" ]; then
        bdi=''
        say "its write-back cache is not limited (Linux before 6.2): the disk takes writes late"
        return
    fi
    # The loop device outlives this script, and so would its limits.
    bdi_before="$(cat "$bdi/strict_limit") $(cat "$bdi/max_ratio_fine")"
    echo 1 >"$bdi/strict_limit"
    echo "$write_back" >"$bdi/max_bytes"
}

unthrottle() {
    local way
    if [ -n "$cgroup_v1" ]; then
        for way in read write; do
            echo "${cgroup_v1#*:} 0" >"${cgroup_v1%%:*}/blkio.throttle.${way}_bps_device"
        done
        cgroup_v1=''
    fi
    if [ -n "$cgroup_v2" ]; then
        echo $$ >"$cgroup_v2_parent/cgroup.procs"
        rmdir "$cgroup_v2"
        cgroup_v2=''
    fi
    if [ -n "$io_enabled" ]; then
        echo '-io' >"$io_enabled/cgroup.subtree_control"
        io_enabled=''
    fi
    if [ -n "$bdi" ]; then
        echo "${bdi_before#* }" >"$bdi/max_ratio_fine"
        echo "${bdi_before% *}" >"$bdi/strict_limit"
        bdi=''
    fi
}

make_input() {
    mkdir "$disk/input"
    local number
    for number in $(seq -w "$input_files"); do
        head -c "$input_file_size" /dev/urandom >"$disk/input/field-$number.dat"
    done
    sync -f "$disk/input"
}

# --- the two runs --------------------------------------------------------------------------------

now() { date +%s.%N; }
# sum A B ...: the sum of its arguments, which may be negative
sum() { printf '%s\n' "$@" | awk '{ s += $1 } END { printf "%.3f", s }'; }
# seconds_of WORD FILE: from the program's own line, "read 64 files 268435456 bytes in 5.123 s, ..."
seconds_of() { sed -n "s/^$1 .* in \([0-9.]*\) s.*/\1/p" "$2" | head -n 1; }

program() { # OUTPUT
    printf '%s\0' "$writer" --processes 2 --files "$rank_files" --size "$rank_size" \
        --input "$disk/input" --output "$1"
}

# Runs the program as it is, and waits until its results are on disk.
run_direct() {
    local command start end synced
    mkdir "$disk/direct"
    "$bench" evict "$disk/input"
    mapfile -d '' command < <(program "$disk/direct")
    start=$(now)
    run "${command[@]}" >"$work/direct.txt" || fail "the program failed on the disk"
    end=$(now)
    run sync -f "$disk/direct"
    synced=$(now)
    direct_sync=$(sum "$synced" "-$end")
    direct_total=$(sum "$synced" "-$start")
}

# Runs the same command under Ondeck. The sync that follows is Ondeck's own duty; it is repeated
# and counted so that both totals end at the same point.
run_ondeck() {
    local command start
    mkdir "$disk/ondeck"
    "$bench" evict "$disk/input"
    mapfile -d '' command < <(program "$disk/ondeck")
    start=$(now)
    run "$ondeck" run --data-in "$disk/input" --data-out "$disk/ondeck" --size 2GiB \
        --report "$work/report.json" -- "${command[@]}" >"$work/ondeck.txt" ||
        fail "ondeck run failed"
    run sync -f "$disk/ondeck"
    ondeck_total=$(sum "$(now)" "-$start")
}

# --- what is shown -------------------------------------------------------------------------------

row() { printf '  %-34s %16s %16s\n' "$@"; }
figure() { if [ -n "$1" ]; then printf '%.2f s' "$1"; else printf 'unknown'; fi; }

show() {
    local direct_read direct_write ondeck_read ondeck_write stage_in stage_out
    direct_read=$(seconds_of read "$work/direct.txt")
    direct_write=$(seconds_of wrote "$work/direct.txt")
    say
    if [ -z "$ondeck_total" ]; then
        row '' 'direct'
        row 'program reads 256 MiB' "$(figure "$direct_read")"
        row 'program writes 1 GiB' "$(figure "$direct_write")"
        row 'until the results are on disk' "$(figure "$direct_sync")"
        row 'total' "$(figure "$direct_total")"
        return
    fi
    ondeck_read=$(seconds_of read "$work/ondeck.txt")
    ondeck_write=$(seconds_of wrote "$work/ondeck.txt")
    "$bench" phases "$work/report.json" >"$work/phases.txt"
    stage_in=$(awk '$1 ~ /^stage.?in$/ { print $2; exit }' "$work/phases.txt")
    stage_out=$(awk '$1 ~ /^stage.?out$/ { print $2; exit }' "$work/phases.txt")

    row '' 'direct' 'ondeck run'
    row 'stage in' '-' "$(figure "$stage_in")"
    row 'program reads 256 MiB' "$(figure "$direct_read")" "$(figure "$ondeck_read")"
    row 'program writes 1 GiB' "$(figure "$direct_write")" "$(figure "$ondeck_write")"
    row 'until the results are on disk' "$(figure "$direct_sync")" '-'
    row 'stage out' '-' "$(figure "$stage_out")"
    row 'total' "$(figure "$direct_total")" "$(figure "$ondeck_total")"
    say
    row "the program's nodes were busy for" \
        "$(figure "$(sum "$direct_read" "$direct_write")")" \
        "$(figure "$(sum "$ondeck_read" "$ondeck_write")")"
    [ -n "$throttled" ] || return 0
    say
    say 'The disk is as slow either way. The difference is who waits for it: staging needs one copy'
    say 'process and no compute nodes, and on a cluster happens before and after the job has them.'
}

# digest DIRECTORY: of all names and contents, read from the disk and not from the page cache
digest() {
    "$bench" evict "$1"
    (cd "$1" && find . -type f -print0 | sort -z | xargs -0 sha256sum) | sha256sum | cut -d ' ' -f 1
}

compare_results() {
    local direct staged
    direct=$(digest "$disk/direct")
    staged=$(digest "$disk/ondeck")
    say
    [ "$direct" = "$staged" ] || fail "the results differ: $direct direct, $staged under ondeck run"
    say "The same $(find "$disk/ondeck" -type f | wc -l) files are on the disk both times (sha256 ${direct:0:16}...)."
}

# --- the demo ------------------------------------------------------------------------------------

trap cleanup EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

parent=${DEMO_DIR:-/var/tmp}
[ "$(df --output=avail "$parent" | tail -n 1)" -ge "$space_needed_kib" ] ||
    fail "$parent needs 4 GB free; name another directory in DEMO_DIR"
work=$(mktemp -d "$parent/ondeck-demo.$$.XXXXXX")
disk=$work
ondeck_total=''

make_slow_disk
make_input
throttle
say 'program: checkpoint-writer reads 64 x 4 MiB and writes 2048 x 512 KiB from 2 processes'
say 'running it straight on the disk ...'
run_direct
if [ -x "$ondeck" ]; then
    say 'running it under ondeck run ...'
    run_ondeck
else
    say 'ondeck is not built: run cargo build --release; its half of the demo is left out'
fi
unthrottle
show
[ -z "$ondeck_total" ] || compare_results
