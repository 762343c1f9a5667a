# common.sh: functions of the scripts in tools/, which source it. Changes to the root of the repository.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

jobs=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

say() { printf '%s\n' "$*"; }

# note_skipped <sentence>: prints why a step is skipped. With CI=true it exits with an error instead.
note_skipped() {
    if [ "${CI:-}" = true ]; then
        say "error: $* (with CI=true nothing may be skipped)" >&2
        exit 1
    fi
    say "note: $*" >&2
}

# title <text>: prints the heading of a step.
title() { printf '\n== %s\n' "$*"; }

# absolute <path>: prints the path as an absolute one; relative paths start at the root of the repository.
absolute() {
    case $1 in
    /*) say "$1" ;;
    *) say "$PWD/$1" ;;
    esac
}

# prepare <command>...: runs what the rest of the script needs. Exits with its status if it fails, and successfully if that
# is 3, for which it printed what is skipped.
prepare() {
    local status=0
    "$@" || status=$?
    if [ "$status" = 3 ]; then
        exit 0
    elif [ "$status" != 0 ]; then
        exit "$status"
    fi
}
