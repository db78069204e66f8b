#!/bin/sh
# A study of real logs: TRACES names a directory of logs in SWF (*.swf, *.swf.gz). For each, at two loads and with two models of I/O,
# what RSA nodes save: where jobs start on disk if their input is not there, and, where that can be simulated in time, where they are
# held. Before that, that all jobs start when a simple EASY starts them. The tables are written to target/study, one page each, and
# the advice of each is printed. SEEDS (3) of each. 1 if anything failed. It takes ten minutes. With GRID=1 it is five loads, three
# models of I/O, five sizes and ten seeds of each log instead, and how many seconds that took: half an hour for large logs.
set -u
cd "$(dirname "$0")/.." || exit 1
CARGO=${CARGO:-cargo}
SEEDS=${SEEDS:-3}
[ -d "${TRACES:-}" ] || { echo "study: TRACES names no directory of logs: make study TRACES=DIR" >&2; exit 1; }
out=target/study
mkdir -p "$out" || exit 1
"$CARGO" build --release --locked -p ondeck || exit 1
ondeck=${ONDECK:-target/$(rustc -vV | sed -n 's/^host: //p')/release/ondeck}
failed=0 found=0
for log in "$TRACES"/*.swf "$TRACES"/*.swf.gz; do
    [ -f "$log" ] || continue
    found=1
    name=$(basename "$log" .gz)
    name=${name%.swf}
    if [ "${GRID:-}" = 1 ]; then
        began=$(date +%s)
        for load in 0.3 0.5 0.7 0.9 1.0; do
            for io in bursts kopanski daly; do
                "$ondeck" simulate "$log" --rescale "$load" --io "$io" --rsa-nodes 2,4,8,16,32 --seeds 10 \
                    --csv "$out/$name-grid-$load-$io.csv" > /dev/null || failed=1
            done
        done
        echo "$name, 5 loads, 3 models of I/O, 5 sizes, 10 seeds: $(($(date +%s) - began)) s"
        continue
    fi
    "$CARGO" run --release --locked -q -p ondeck-sim --example compare_easy -- "$log" || failed=1
    for load in 0.4 0.9; do
        for io in bursts kopanski; do
            for wait in disk hold; do
                # Where all are held and there is nearly no room, thousands wait, and the simulation takes hours.
                case "$load $io $wait" in "0.9 "*" hold" | *" kopanski hold") continue ;; esac
                page=$out/$name-$load-$io-$wait
                echo "$name, load $load, $io, $wait:"
                if "$ondeck" simulate "$log" --rescale "$load" --io "$io" --wait "$wait" --seeds "$SEEDS" \
                    --rsa-nodes 0,4,8,16,32 --html "$page.html" --csv "$page.csv" > "$page.txt"; then
                    tail -n 1 "$page.txt" | sed 's/^/    /'
                else
                    failed=1
                fi
            done
        done
    done
done
[ "$found" = 1 ] || { echo "study: no *.swf or *.swf.gz in $TRACES" >&2; exit 1; }
exit $failed
