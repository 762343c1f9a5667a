#!/usr/bin/env bash
# run_benches.sh <folder> [arguments]: runs every benchmark that was built into the folder; each prints its table and
# writes its figures beside itself as <folder>/<name>.json.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
shift
count=0
for program in "$folder"/bench_*; do
    if [ -f "$program" ] && [ -x "$program" ]; then
        title "$(basename "$program")"
        "$program" --json "$program.json" "$@"
        count=$((count + 1))
    fi
done
if [ "$count" = 0 ]; then
    say "error: there are no benchmarks in $folder." >&2
    exit 1
fi
