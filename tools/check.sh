#!/usr/bin/env bash
# `make check`: runs every check script, prints those that failed, and fails if any did.
set -euo pipefail
. "$(dirname "$0")/common.sh"

# The pinned tools. Checks whose tools are missing are skipped with a note.
tools/python_env.sh dev core || [ $? = 3 ]

failed=()
run() { # <title> <command>...
    local name=$1
    shift
    title "$name"
    if ! "$@"; then
        failed+=("$name")
    fi
}
run "formatting" tools/check_format.sh
run "text" python3 tools/check_text.py
run "commit subjects" python3 tools/check_subjects.py
run "third party" tools/check_third_party.sh
run "include direction" python3 tools/check_includes.py
run "warnings" tools/check_warnings.sh
run "public headers alone" tools/check_headers.sh
run "static analysis" tools/check_analysis.sh
run "exported symbols" tools/check_symbols.sh
run "CUDA" tools/check_cuda.sh
run "Python" tools/check_python.sh
run "documentation" tools/docs.sh

if [ ${#failed[@]} != 0 ]; then
    printf '\nchecks that failed:\n' >&2
    printf '  %s\n' "${failed[@]}" >&2
    exit 1
fi
printf '\nall checks passed\n'
