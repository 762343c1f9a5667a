#!/usr/bin/env bash
# python_env.sh [<part>...]: creates .venv if necessary, lets it import the package in python/, and installs
# requirements/<part>.txt for each part. A part that is up to date is not installed again: the name of a stamp file has
# the hash of its requirements and the interpreter's version.
#
# A part that cannot be installed is skipped with a note; with CI=true that is an error. With PYTHON set nothing is created
# or installed: the script only checks what that interpreter can import. Exit 3: the first part is missing, so the caller
# has to skip what depends on it. Exit 130 after Ctrl-C, with one sentence unless OPAQ_INTERRUPT_SILENT is set.
set -euo pipefail
. "$(dirname "$0")/common.sh"
trap '[ -n "${OPAQ_INTERRUPT_SILENT:-}" ] || say "Interrupted; run the command again to continue." >&2; exit 130' INT

what_needs() { # <part>: what is skipped without it, as subject and verb of a note
    case $1 in
    core) say "the Python tests and golden files are" ;;
    torch) say "everything that needs PyTorch is" ;;
    peers) say "what uses transformers and the comparisons with torchao, compressed-tensors and nvidia-modelopt are" ;;
    peft) say "LoRA adapters and accelerate are" ;;
    demo) say "the demonstration's pictures and progress bars are" ;;
    docs) say "the site of the documentation is" ;;
    wheel) say "the manylinux tag of the wheel is" ;;
    *) say "everything that needs requirements/$1.txt is" ;;
    esac
}

modules_of() { # <part>: the modules that PYTHON must be able to import
    case $1 in
    core) say "numpy ml_dtypes pytest" ;;
    torch) say "torch" ;;
    peers) say "torchao compressed_tensors modelopt" ;;
    peft) say "peft accelerate" ;;
    demo) say "matplotlib tqdm" ;;
    docs) say "mkdocs pygments" ;;
    dev) say "mypy" ;;
    wheel) say "auditwheel" ;;
    esac
}

lacking() { # <part>: the modules of it that $PYTHON does not have
    # shellcheck disable=SC2046  # a list of names
    "$PYTHON" -c 'import importlib.util as u, sys
print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])' $(modules_of "$1")
}

stamp_of() { # <part>
    { "$python" -V && cat "requirements/$1.txt"; } | cksum | tr ' ' -
}

install() { # <part> <its number> <number of parts>
    local stamp
    stamp=".venv/stamp-$1-$(stamp_of "$1")"
    if [ -f "$stamp" ]; then
        return 0
    fi
    say "installing requirements/$1.txt into .venv (part $2 of $3)" >&2
    if ! "$python" -m pip install --quiet --disable-pip-version-check --retries 1 --requirement \
        "requirements/$1.txt" >.venv/pip.log 2>&1; then
        grep -i '^error' .venv/pip.log | tail -n 3 >&2 || true
        return 1
    fi
    rm -f .venv/stamp-"$1"-*
    touch "$stamp"
}

# So that .venv imports the package of this tree, with the library of build/. A package that pip installs comes first.
link_package() {
    local site
    for site in .venv/lib/python3*/site-packages; do
        if [ -d "$site" ] && [ "$(cat "$site/opaq.pth" 2>/dev/null)" != "$PWD/python" ]; then
            say "$PWD/python" >"$site/opaq.pth"
        fi
    done
}

first=${1:-}
status=0
if [ -n "${PYTHON:-}" ]; then
    if ! command -v "$PYTHON" >/dev/null; then
        say "error: PYTHON=$PYTHON is not a program." >&2
        exit 1
    fi
    for part in "$@"; do
        names=$(lacking "$part")
        if [ -n "$names" ]; then
            note_skipped "$PYTHON has no $names, so $(what_needs "$part") skipped."
            [ "$part" != "$first" ] || status=3
        fi
    done
    exit $status
fi

python=.venv/bin/python
if ! "$python" -c 'import pip' >/dev/null 2>&1; then
    if ! python3 -m venv --clear .venv >/dev/null 2>&1 || [ ! -x "$python" ]; then
        rm -rf .venv
        note_skipped "python3 -m venv does not work here (is python3-venv installed?), so everything that needs Python is skipped."
        exit 3
    fi
fi
link_package
number=0
for part in "$@"; do
    number=$((number + 1))
    if ! install "$part" "$number" $#; then
        note_skipped "requirements/$part.txt could not be installed, so $(what_needs "$part") skipped."
        [ "$part" != "$first" ] || status=3
    fi
done
exit $status
