#!/usr/bin/env bash
# python_env.sh <part>...: makes .venv if need be and installs requirements/<part>.txt for each part. A part that
# is up to date costs nothing: a stamp holds the hash of its file and the interpreter's version.
#
# A part that cannot be installed is left out with a sentence; with CI=true that is a failure. With PYTHON set
# nothing is made or installed: that interpreter is asked what it can import. Exit 3 says that the first part
# named is not there, so that the caller can leave out what depends on it.
set -euo pipefail
. "$(dirname "$0")/common.sh"

what_needs() { # <part>: what is left out without it, for the sentence
    case $1 in
    core) say "the Python tests and golden files are" ;;
    torch) say "everything that needs PyTorch is" ;;
    peers) say "the comparisons with torchao, compressed-tensors and nvidia-modelopt are" ;;
    peft) say "LoRA adapters and accelerate are" ;;
    demo) say "the training demonstration is" ;;
    *) say "what needs requirements/$1.txt is" ;;
    esac
}

modules_of() { # <part>: what a given interpreter must be able to import
    case $1 in
    core) say "numpy ml_dtypes pytest" ;;
    torch) say "torch" ;;
    peers) say "torchao compressed_tensors modelopt" ;;
    peft) say "peft accelerate" ;;
    demo) say "matplotlib tqdm" ;;
    dev) say "mypy" ;;
    esac
}

lacking() { # <part>: the modules of it that $PYTHON does not have
    # shellcheck disable=SC2046  # the names are words
    "$PYTHON" -c 'import importlib.util as u, sys
print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])' $(modules_of "$1")
}

stamp_of() { # <part>
    { "$python" -V && cat "requirements/$1.txt"; } | cksum | tr ' ' -
}

install() { # <part>
    local stamp
    stamp=".venv/stamp-$1-$(stamp_of "$1")"
    if [ -f "$stamp" ]; then
        return 0
    fi
    say "installing requirements/$1.txt into .venv" >&2
    if ! "$python" -m pip install --quiet --disable-pip-version-check --retries 1 --requirement \
        "requirements/$1.txt" >.venv/pip.log 2>&1; then
        grep -i '^error' .venv/pip.log | tail -n 3 >&2 || true
        return 1
    fi
    rm -f .venv/stamp-"$1"-*
    touch "$stamp"
}

first=$1
status=0
if [ -n "${PYTHON:-}" ]; then
    if ! command -v "$PYTHON" >/dev/null; then
        say "error: PYTHON=$PYTHON is not a program." >&2
        exit 1
    fi
    for part in "$@"; do
        names=$(lacking "$part")
        if [ -n "$names" ]; then
            left_out "$PYTHON has no $names, so $(what_needs "$part") left out."
            [ "$part" != "$first" ] || status=3
        fi
    done
    exit $status
fi

python=.venv/bin/python
if ! "$python" -m pip --version >/dev/null 2>&1; then
    if ! python3 -m venv --clear .venv >/dev/null 2>&1 || [ ! -x "$python" ]; then
        rm -rf .venv
        left_out "python3 -m venv does not work here (is python3-venv installed?), so what needs Python is left out."
        exit 3
    fi
fi
for part in "$@"; do
    if ! install "$part"; then
        left_out "requirements/$part.txt could not be installed, so $(what_needs "$part") left out."
        [ "$part" != "$first" ] || status=3
    fi
done
exit $status
