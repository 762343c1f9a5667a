#!/usr/bin/env bash
# run_programs.sh <folder> [arguments]: runs every program that was built into the folder, one after another.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
shift
count=0
for program in "$folder"/*; do
    if [ -f "$program" ] && [ -x "$program" ]; then
        title "$(basename "$program")"
        "$program" "$@"
        count=$((count + 1))
    fi
done
if [ "$count" = 0 ]; then
    say "error: there are no programs in $folder." >&2
    exit 1
fi
