#!/usr/bin/env bash
# Runs clang-tidy with .clang-tidy on the library and the programs, or cppcheck if there is no clang-tidy.
set -euo pipefail
. "$(dirname "$0")/common.sh"

database=
for folder in build-clang build-gcc build; do
    if [ -f "$folder/compile_commands.json" ]; then
        database=$folder
        break
    fi
done
if [ -z "$database" ]; then
    tools/build.sh build
    database=build
fi

# Keep one compile command per file: some files are compiled for two libraries, and clang-tidy 14 prints false warnings
# for those.
once=$(mktemp -d)
trap 'rm -rf "$once"' EXIT
python3 - "$database/compile_commands.json" >"$once/compile_commands.json" <<'PYTHON'
import json, sys
from pathlib import Path

print(json.dumps(list({entry["file"]: entry for entry in reversed(json.loads(Path(sys.argv[1]).read_text()))}.values())))
PYTHON

tidy=
for candidate in clang-tidy clang-tidy-14 clang-tidy-15 clang-tidy-16 clang-tidy-17 clang-tidy-18 clang-tidy-19; do
    if command -v "$candidate" >/dev/null; then
        tidy=$candidate
        break
    fi
done
# Without files that need another project's headers.
mapfile -t files < <(find src tests/c demo examples bench fuzz -name '*.c' ! -name 'peer_*.c' 2>/dev/null | sort)
if [ -n "$tidy" ]; then
    # Fuzz targets are not in the database; clang-tidy infers their flags from similar files. Assertions are enabled,
    # because the analyzer uses them.
    printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "$jobs" "$tidy" -p "$once" --quiet --extra-arg=-UNDEBUG \
        --extra-arg=-isystem"$PWD/third_party/yyjson" 2>build-tidy.log || {
        grep -v 'warnings\? generated' build-tidy.log || true
        rm -f build-tidy.log
        exit 1
    }
    rm -f build-tidy.log
    say "clang-tidy: ${#files[@]} files, no warnings"
elif command -v cppcheck >/dev/null; then
    note_skipped "there is no clang-tidy, so cppcheck is used instead."
    cppcheck --quiet --std=c11 --error-exitcode=1 --inline-suppr --enable=warning,portability \
        --suppress=missingIncludeSystem -Iinclude -Isrc -j "$jobs" src
    say "cppcheck: no warnings"
else
    note_skipped "there is neither clang-tidy nor cppcheck, so static analysis was skipped."
fi
