#!/usr/bin/env bash
# demo.sh <build folder> [file]: runs all demonstrations, the C programs and then those that need PyTorch; or only that file.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
only=${2:-}

has() { # <part>...: whether the first part is installed; if not, python_env.sh printed what is skipped
    local status=0
    tools/python_env.sh "$@" || status=$?
    case $status in
    0) return 0 ;;
    3) return 1 ;;
    *) exit "$status" ;;
    esac
}

[ -n "$only" ] || tools/run_programs.sh "$folder/demo"
has torch core || exit 0
OPAQ_LIBRARY=$(absolute "$folder")/libopaq.so
export OPAQ_LIBRARY PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}
for program in ${only:-demo/demo_*.py}; do
    case $program in
    demo/demo_train.py)
        has demo || continue
        set -- --out "$folder/demo"
        ;;
    demo/demo_projections.py) set -- --out "$folder/demo" ;;
    *) set -- ;;
    esac
    title "$(basename "$program")"
    "${PYTHON:-.venv/bin/python}" "$program" "$@"
done
