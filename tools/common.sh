# common.sh: what the scripts in tools/ share. Sourced, never run. Goes to the root of the repository.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

jobs=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

say() { printf '%s\n' "$*"; }

# left_out <sentence>: something is not there, so a step is left out. With CI=true that is a failure.
left_out() {
    if [ "${CI:-}" = true ]; then
        say "error: $* (CI=true, so this is a failure)" >&2
        exit 1
    fi
    say "note: $*" >&2
}

# title <text>: the head of a step.
title() { printf '\n== %s\n' "$*"; }

# absolute <path>: from the root of the repository, unless it is absolute already.
absolute() {
    case $1 in
    /*) say "$1" ;;
    *) say "$PWD/$1" ;;
    esac
}
