#!/usr/bin/env bash
# test_wheel.sh [<build folder>]: builds the wheel into <build folder>/wheel and reads it: the package, both libraries, the
# command and the licences are in it and nothing else of the build; check_elf.sh is content; it imports and the command
# runs. The first run takes one to two minutes, later ones build what changed. Needs pip and scikit-build-core.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$(absolute "${1:-build}")/wheel

status=0
tools/python_env.sh core || status=$?
if [ "$status" = 3 ]; then
    exit 0 # it printed what is skipped
elif [ "$status" != 0 ]; then
    exit "$status"
fi
python=${PYTHON:-$PWD/.venv/bin/python}
rm -rf "$folder/dist" "$folder/unpacked"
mkdir -p "$folder"
backend=$(sed -n 's/^requires = \["\(.*\)"\]$/\1/p' pyproject.toml)
if ! "$python" -m pip download --quiet --disable-pip-version-check --retries 1 --dest "$folder/backend" "$backend" \
    >"$folder/pip.log" 2>&1; then
    grep -i '^error' "$folder/pip.log" | tail -n 3 >&2 || true
    left_out "$backend cannot be downloaded, so the wheel was not tested."
    exit 0
fi

title "the wheel"
if ! "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --config-settings=build-dir="$folder/build" \
    --wheel-dir "$folder/dist" . >"$folder/pip.log" 2>&1; then
    tail -n 40 "$folder/pip.log" >&2
    exit 1
fi
"$python" -m zipfile -e "$folder"/dist/opaq-*.whl "$folder/unpacked"
command=$(echo "$folder"/unpacked/opaq-*.data/scripts/opaq)
chmod +x "$command" # zipfile does not

expected=$(
    find python/opaq -name '*.py' -o -name py.typed | sed 's|^python/||'
    say "opaq/libopaq.so"
    say "opaq/libopaq_torch.so"
    say "data/scripts/opaq"
    for name in METADATA RECORD WHEEL entry_points.txt licenses/LICENSE licenses/third_party/yyjson/LICENSE; do
        say "dist-info/$name"
    done
)
found=$(cd "$folder/unpacked" && find . -type f | sed -E 's|^\./||; s|^opaq-[0-9.]+\.(data\|dist-info)/|\1/|')
if ! difference=$(diff <(sort <<<"$expected") <(sort <<<"$found")); then
    say "the wheel's files, < missing and > unexpected:" "$difference" >&2
    exit 1
fi
for name in LICENSE third_party/yyjson/LICENSE; do
    cmp "$name" "$folder"/unpacked/opaq-*.dist-info/licenses/"$name"
done
tools/check_elf.sh "$folder/unpacked"
version=$(cd "$folder" && PYTHONPATH=unpacked "$python" -c 'import opaq; print(opaq.__version__, opaq.__file__)')
case $version in
*/wheel/unpacked/opaq/__init__.py) ;;
*) say "the wheel's package was not imported: $version" >&2 && exit 1 ;;
esac
"$command" version >/dev/null
say "$(wc -l <<<"$found") files, $(wc -c <"$(echo "$folder"/dist/*.whl)") bytes: the wheel is complete"
