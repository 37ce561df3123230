# Functions of the scripts that measure `glinthawk run`; sourced by them, not run.

# GLINTHAWK names the binary to use; by default the one built here. FOLDER is for files and is removed at the end.
set -euo pipefail
export LC_ALL=C
if [ -z "${GLINTHAWK:-}" ]; then
    cargo build --release --quiet
    GLINTHAWK=target/release/glinthawk
fi
GLINTHAWK=$(realpath "$GLINTHAWK")
FOLDER=$(mktemp -d)
CHILDREN=()
finish() {
    for child in "${CHILDREN[@]}"; do
        pkill -P "$child" || true # of a function in the background, what it runs
        kill "$child" 2> /dev/null || true
    done
    wait
    rm -rf "$FOLDER"
}
trap finish EXIT

# requests COUNT INPUT OUTPUT [SPREAD]: COUNT prompts of INPUT tokens each that generate OUTPUT tokens, or up to SPREAD
# fewer or more.
requests() {
    awk -v count="$1" -v input="$2" -v output="$3" -v spread="${4:-0}" 'BEGIN {
        for (n = 0; n < count; n++) {
            prompt = 100 + n % 5000
            for (token = 1; token < input; token++) prompt = prompt "," 100 + (n * 7 + token * 13) % 5000
            printf "{\"custom_id\":\"%d\",\"prompt\":[%s],\"temperature\":0,\"ignore_eos\":true,\"max_tokens\":%d}\n", n, prompt, output - spread + n % (2 * spread + 1)
        }
    }'
}

# run INPUT OPTION...: leaves statistics in FOLDER/stats.json. Without drafts: prompts without meaning are too easily guessed.
run() {
    local input=$1
    shift
    # Words of GLINTHAWK_PREFIX, such as taskset -c 0, come before it.
    if ! ${GLINTHAWK_PREFIX:-} "$GLINTHAWK" run "$input" -o "$FOLDER/out.jsonl" --overwrite --no-drafts --stats "$FOLDER/stats.json" "$@" \
        2> "$FOLDER/log"; then
        cat "$FOLDER/log" >&2
        return 1
    fi
}

# run_steadily INPUT OPTION...: like run, and leaves in RATES how many rows per second Tier 1 turned into tokens, for
# each two seconds of the steady state. That is between a fifth and three fifths of its work, while all seats are taken
# (if there are three prompts for each seat). Counting whole lines would not do: with a long delay, flights come home in
# bunches.
run_steadily() {
    run "$@" --trace "$FOLDER/trace.json"
    RATES=$(python3 - "$FOLDER/trace.json" << 'END'
import json, sys
events = json.load(open(sys.argv[1]))["traceEvents"]
node = next(e["pid"] for e in events if e.get("name") == "process_name" and e["args"]["name"] == "Tier 1")
spans = sorted((e["ts"], e["args"]["rows"], e["name"]) for e in events if e.get("ph") == "X" and e["pid"] == node)
stages = len({name for _, _, name in spans})
total, done, bins = sum(rows for _, rows, _ in spans), 0, {}
for start, rows, _ in spans:
    done += rows
    if total / 5 < done < total * 3 / 5:
        bins[start // 2e6] = bins.get(start // 2e6, 0) + rows
whole = sorted(bins)[1:-1]
print("".join(f" {bins[index] / stages / 2:.0f}" for index in whole))
END
)
}

# stat FIELD: a figure of the run's statistics.
stat() { awk -v field="\"$1\":" '$1 == field { sub(",$", "", $2); print $2; exit }' "$FOLDER/stats.json"; }

# node NAME FIELD: a figure of a node's.
node() {
    awk -v name="\"$1\"," -v field="\"$2\":" '$1 == "\"name\":" { here = $2 == name }
        here && $1 == field { sub(",$", "", $2); print $2; exit }' "$FOLDER/stats.json"
}

# calculate EXPRESSION [FORMAT]
calculate() { awk "BEGIN { printf \"${2:-%g}\", $1 }"; }

# median FIGURE...
median() { printf '%s\n' "$@" | sort -g | awk '{ all[NR] = $1 } END { print NR % 2 ? all[(NR + 1) / 2] : (all[NR / 2] + all[NR / 2 + 1]) / 2 }'; }

# best FIGURE...: the figure that a tenth of them exceed.
best() { printf '%s\n' "$@" | sort -g | awk '{ all[NR] = $1 } END { print all[NR - int(NR / 10)] }'; }

# The machine and its load, for the record.
describe_machine() {
    echo "$(date -u +%Y-%m-%d), $(nproc) cores: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1);" \
        "load before: $(cut -d' ' -f1-3 /proc/loadavg)"
}
