#!/bin/sh
# What happens now and then. The transparent cache: killed ONDECK_CRASHES (200) times three random moments; ONDECK_OPERATIONS
# (20,000) random operations on a file of three times its capacity, and as many of fsx in each of several configurations;
# ONDECK_FILES (10,000) files; a tree of ONDECK_NAMES (100,000) files, and as many that are made; its machine lost at
# ONDECK_LOST_MACHINES (200) moments; ONDECK_USERS_SEEDS (20) orders of what several users do, and ONDECK_OTHERS (1000) of what others do with the backing
# directory meanwhile; eight writers for
# ONDECK_WRITERS_SECONDS (600). Jobs inside a real Slurm: ONDECK_AT_ONCE (200) at once, ONDECK_WAITING (300) that wait,
# ONDECK_CANCELLED (140) that are cancelled then, and ONDECK_HELD (130) results that find no room. ONDECK_CLASSIFIER (20) jobs of each of
# seven kinds, three times, whose use of files is to be told. Then all scenarios beside a
# real Slurm, ROUNDS times (10) in a row, with ONDECK_SOAK jobs (50) in the one of many jobs. It stops at nothing: per round it
# says how many passed and failed, which failed, and the seconds; at the end all of it together. What the failed ones said stays
# in target/soak, with where the logs of their daemons are. It needs root. 1 if anything failed. ONDECK_CLUSTERS (3) scenarios
# run at a time; many more than there are cores make it rough.
set -u
cd "$(dirname "$0")/.." || exit 1
CARGO=${CARGO:-cargo}
ROUNDS=${ROUNDS:-10}
ONDECK_SOAK=${ONDECK_SOAK:-50}
ONDECK_CLUSTERS=${ONDECK_CLUSTERS:-3}
ONDECK_CRASHES=${ONDECK_CRASHES:-200}
ONDECK_OPERATIONS=${ONDECK_OPERATIONS:-20000}
ONDECK_FILES=${ONDECK_FILES:-10000}
ONDECK_NAMES=${ONDECK_NAMES:-100000}
ONDECK_LOST_MACHINES=${ONDECK_LOST_MACHINES:-200}
ONDECK_USERS_SEEDS=${ONDECK_USERS_SEEDS:-20}
ONDECK_OTHERS=${ONDECK_OTHERS:-1000}
ONDECK_WRITERS_SECONDS=${ONDECK_WRITERS_SECONDS:-600}
ONDECK_AT_ONCE=${ONDECK_AT_ONCE:-200}
ONDECK_WAITING=${ONDECK_WAITING:-300}
ONDECK_CANCELLED=${ONDECK_CANCELLED:-140}
ONDECK_HELD=${ONDECK_HELD:-130}
ONDECK_CLASSIFIER=${ONDECK_CLASSIFIER:-20}
export ONDECK_SOAK ONDECK_CLUSTERS ONDECK_CRASHES ONDECK_OPERATIONS ONDECK_FILES ONDECK_NAMES ONDECK_LOST_MACHINES \
    ONDECK_USERS_SEEDS ONDECK_OTHERS ONDECK_WRITERS_SECONDS
logs=target/soak

# Name, value, and the least with which there is something to be seen.
at_least() {
    [ "$2" -ge "$3" ] || { echo "soak: $1=$2 shows nothing; give it $3 or more" >&2; exit 2; }
}

at_least ONDECK_LOST_MACHINES "$ONDECK_LOST_MACHINES" 4
at_least ONDECK_NAMES "$ONDECK_NAMES" 40000
[ "$(id -u)" = 0 ] || { echo "soak: it needs root" >&2; exit 1; }
mkdir -p "$logs" || exit 1
rm -f "$logs"/round-* "$logs"/once-*
"$CARGO" build --locked -p ondeck && "$CARGO" test --locked -p ondeck-cachefs --test crash --test directories --no-run &&
    "$CARGO" test --locked -p ondeck --test cache_data --test cache_names --test cache_lost --test cache_users --test cache_load \
        --no-run &&
    "$CARGO" test --locked -p ondeck-testbed --test slurm --no-run || exit 1

of_result() {
    sed -n "s/^test result: .* \([0-9]*\) $2;.*/\1/p" "$1" | tail -n 1
}

# What it is, the log, and the command.
once() {
    what=$1 log=$logs/once-$2
    shift 2
    start=$(date +%s)
    if timeout -s KILL 1h "$@" > "$log" 2>&1; then
        echo "$what: nothing lost, $(($(date +%s) - start)) s"
        passed=$((passed + 1))
        rm "$log"
    else
        echo "$what: failed; see $log"
        failed=$((failed + 1))
    fi
}

# A test of a crate.
test_cache() {
    once "a cache, $1" "$2" "$CARGO" test --locked -p "$3" --test "$4"
}

began=$(date +%s)
round=1 passed=0 failed=0
test_cache "killed in $ONDECK_CRASHES rounds" crashes ondeck-cachefs crash
test_cache "$ONDECK_OPERATIONS operations and $ONDECK_FILES files" data ondeck cache_data
once "a cache, $ONDECK_OPERATIONS operations of fsx" fsx tests/fsx.sh
test_cache "$ONDECK_NAMES names" names ondeck cache_names
test_cache "its machine lost at $ONDECK_LOST_MACHINES moments" lost ondeck cache_lost
test_cache "users in $ONDECK_USERS_SEEDS orders" users ondeck cache_users
test_cache "others in $ONDECK_OTHERS orders" others ondeck-cachefs directories
test_cache "eight writers for $ONDECK_WRITERS_SECONDS s" load ondeck cache_load
# One cluster at a time: a hundred RAM disks are a hundred servers.
once "hundreds of jobs inside Slurm" crowd env ONDECK_AT_ONCE="$ONDECK_AT_ONCE" ONDECK_WAITING="$ONDECK_WAITING" \
    ONDECK_CANCELLED="$ONDECK_CANCELLED" ONDECK_HELD="$ONDECK_HELD" \
    "$CARGO" test --locked -p ondeck-testbed --test slurm -- --test-threads=1 crowd::
once "$ONDECK_CLASSIFIER jobs of each kind" classifier env ONDECK_CLASSIFIER="$ONDECK_CLASSIFIER" \
    "$CARGO" test --locked -p ondeck-testbed --test slurm -- classifier::
while [ "$round" -le "$ROUNDS" ]; do
    log=$logs/round-$round
    start=$(date +%s)
    # One that hangs must not be the last.
    timeout -s KILL 2h "$CARGO" test --locked -p ondeck-testbed --test slurm -- --test-threads="$ONDECK_CLUSTERS" "$@" > "$log" 2>&1
    status=$?
    seconds=$(($(date +%s) - start))
    good=$(of_result "$log" passed) bad=$(of_result "$log" failed)
    if [ -z "$good" ]; then
        echo "round $round: the tests did not end (status $status), $seconds s; see $log"
        failed=$((failed + 1))
    else
        echo "round $round: $good passed, $bad failed, $seconds s"
        sed -n 's/^test \(.*\) \.\.\. FAILED$/    failed: \1/p' "$log"
        passed=$((passed + good)) failed=$((failed + bad))
        [ "$status" = 0 ] && rm "$log"
    fi
    round=$((round + 1))
done

echo "together: $passed passed, $failed failed in $((round - 1)) rounds, $(($(date +%s) - began)) s"
[ "$failed" = 0 ] && exit 0
cat "$logs"/round-* | sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' | sort | uniq -c | sort -rn |
    while read -r times name; do echo "    failed $times times: $name"; done
exit 1
