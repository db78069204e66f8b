#!/bin/sh
# All tests of the workspace, with what cargo is told beside that. At the end, how many tests were skipped, and why: the
# harness takes them for passed. ONDECK_TESTS=require makes each of them fail.
#
# The unit tests of core, the model check among them, only compute, for minutes. The scenarios beside a real Slurm mostly wait.
# So the former run beside all others, on what these leave of the processors; what they say comes at the end. And of the latter
# there are ONDECK_CLUSTERS (3) at a time, whatever the number of processors.
set -u
cd "$(dirname "$0")/.." || exit 1
skipped=$(mktemp) && built=$(mktemp) && beside=$(mktemp) || exit 1
pid=
trap 'rm -f "$skipped" "$built" "$beside"; [ -z "$pid" ] || kill "$pid" 2> /dev/null' EXIT
trap 'exit 130' INT TERM HUP
export ONDECK_SKIPPED=$skipped ONDECK_CLUSTERS="${ONDECK_CLUSTERS:-3}"
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$ONDECK_CLUSTERS}"
cargo=${CARGO:-cargo}
if [ $# -gt 0 ]; then
    "$cargo" test --locked --workspace "$@"
    status=$?
else
    "$cargo" test --locked --workspace --no-run || exit
    # Nothing is left to build; it tells where everything is.
    "$cargo" test --locked --workspace --no-run 2> "$built" || { cat "$built" >&2; exit 1; }
    core=$(sed -n 's/.*(\(.*\/ondeck_core-[0-9a-f]*\))$/\1/p' "$built")
    [ -x "$core" ] || { echo "tests/all.sh: cargo does not tell where the unit tests of core are" >&2; exit 1; }
    if chrt --idle 0 true 2> /dev/null; then idle="chrt --idle 0"; else idle="nice -n 19"; fi
    case $core in /*) ;; *) core=$PWD/$core ;; esac
    # shellcheck disable=SC2086 # it is a command and its arguments
    (cd crates/core && exec $idle "$core") > "$beside" 2>&1 &
    pid=$!
    "$cargo" test --locked --workspace --exclude ondeck-core && "$cargo" test --locked --doc -p ondeck-core
    status=$?
    if [ "$status" = 0 ]; then
        wait "$pid"
        status=$?
        echo "the unit tests of core, beside these:"
        cat "$beside"
    else
        kill "$pid" 2> /dev/null
    fi
    pid=
fi
if [ -s "$skipped" ]; then
    echo "skipped: $(wc -l < "$skipped")"
    sort "$skipped" | uniq -c | sed 's/^/    /'
elif [ "$status" = 0 ]; then
    echo "skipped: none"
fi
exit $status
