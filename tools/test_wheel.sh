#!/usr/bin/env bash
# test_wheel.sh [<build folder>]: builds the wheel (build_wheel.sh), reads it and installs it.
#   - Its tag is py3-none-<platform>. The package, the libraries, the command, its manual page, its completions and the
#     licences are in it, and nothing else; check_elf.sh accepts it. libopaq_cuda.so is in it if check_cuda.sh finds an nvcc.
#   - In a new environment outside of the tree, with a PATH of only that environment (no compiler), and with the
#     repository hidden where `unshare` may do that: pip accepts the wheel, the command runs, opaq is imported without other
#     packages, quantizes with NumPy and runs a layer with PyTorch, where these are installed.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$(absolute "${1:-build}")/wheel
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

tools/python_env.sh core || [ $? = 3 ]
title "the wheel"
prepare tools/build_wheel.sh "${1:-build}"
python=${PYTHON:-$PWD/.venv/bin/python}
wheel=$(echo "$folder"/dist/opaq-*.whl)
cuda=
if grep -qE '^OPAQ_CUDA_BUILT:INTERNAL=(ON|portable)$' "$folder/build/CMakeCache.txt"; then
    cuda=opaq/libopaq_cuda.so
elif [ "${OPAQ_CUDA:-AUTO}" = AUTO ] && { command -v nvcc || [ -x /usr/local/cuda/bin/nvcc ]; } >/dev/null; then
    note_skipped "there is an nvcc, but it was not used, so the wheel has no CUDA back end; make says why."
fi

# ---- contents

version=$(sed -n 's/^#define OPAQ_VERSION_[MP][A-Z]* \([0-9]*\)$/\1/p' include/opaq/version.h | paste -sd .)
case ${wheel##*/} in
opaq-"$version"-py3-none-manylinux_*.whl | opaq-"$version"-py3-none-macosx_*.whl) ;;
opaq-"$version"-py3-none-linux_*.whl) note_skipped "there is no auditwheel, so the wheel has no manylinux tag." ;;
*) say "the wheel is ${wheel##*/}, expected opaq-$version-py3-none-<platform>.whl" >&2 && exit 1 ;;
esac
"$python" -m zipfile -e "$wheel" "$work/unpacked"
expected=$(
    find python/opaq -name '*.py' -o -name py.typed | sed 's|^python/||'
    for name in opaq/libopaq.so opaq/libopaq_torch.so $cuda data/scripts/opaq data/data/share/man/man1/opaq.1 \
        data/data/share/bash-completion/completions/opaq data/data/share/zsh/site-functions/_opaq \
        data/data/share/fish/vendor_completions.d/opaq.fish dist-info/METADATA dist-info/RECORD dist-info/WHEEL \
        dist-info/entry_points.txt dist-info/licenses/LICENSE dist-info/licenses/third_party/yyjson/LICENSE \
        dist-info/licenses/third_party/cuda/NOTICE; do
        say "$name"
    done
)
found=$(cd "$work/unpacked" && find . -type f | sed -E 's|^\./||; s|^opaq-[0-9.]+\.(data\|dist-info)/|\1/|' |
    grep -v '^dist-info/sboms/' || true) # auditwheel's own list of what it added
if ! difference=$(diff <(sort <<<"$expected") <(sort <<<"$found")); then
    say "the wheel's files, < missing and > unexpected:" "$difference" >&2
    exit 1
fi
for name in LICENSE third_party/yyjson/LICENSE third_party/cuda/NOTICE; do
    cmp "$name" "$work"/unpacked/opaq-*.dist-info/licenses/"$name"
done
for name in numpy torch transformers; do
    if ! grep -qx "Provides-Extra: $name" "$work"/unpacked/opaq-*.dist-info/METADATA; then
        say "the wheel has no extra $name" >&2
        exit 1
    fi
done
chmod +x "$work"/unpacked/opaq-*.data/scripts/opaq # zipfile does not keep permissions
tools/check_elf.sh "$work/unpacked"
say "$(wc -l <<<"$found") files: the wheel is complete"

# ---- in a bare environment

title "the wheel in a separate environment"
"$python" -m venv "$work/env"
cp "$wheel" "$work"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir "$work/packages" "$work/home"
cat >"$work/bare.sh" <<'SCRIPT'
# Arguments: <folder> <version> <repository>; runs with an empty environment.
set -eu
cd "$1/home"
for name in cc gcc clang cmake make; do
    if command -v "$name" >/dev/null; then
        echo "there is a $name on PATH: $PATH" >&2
        exit 1
    fi
done
python -m pip install --quiet --no-index --no-deps --disable-pip-version-check "$1"/opaq-*.whl
opaq --version | { read -r line && test "$line" = "opaq $2"; }
test -s "$1/env/share/man/man1/opaq.1" -a -s "$1/env/share/zsh/site-functions/_opaq"
python - "$1" "$2" <<'END'
import contextlib, io, sys
import opaq
assert opaq.__version__ == sys.argv[2] and opaq.__file__.startswith(f"{sys.argv[1]}/env/"), opaq.__file__
with contextlib.redirect_stdout(io.StringIO()): # it prints what it returns
    assert opaq.library_info()["backends"][0] == "cpu"
assert opaq.proto((4, 32), "bfloat16", opaq.Quantizer("nvfp4"))[0].shape == (4, 16)
assert not {"numpy", "torch"} & set(sys.modules)
assert set(opaq.__all__) <= set(dir(opaq))
END
echo "imported without NumPy and without PyTorch"
export PYTHONPATH="$1/packages"
if python -c 'import numpy' 2>/dev/null; then
    python - <<'END'
import numpy, opaq
x = numpy.linspace(-3, 3, 256, dtype=numpy.float32).reshape(4, 64)
y = opaq.dequantize(opaq.quantize(x, opaq.Quantizer("nvfp4")))
print("NumPy: largest error of nvfp4", abs(y - x).max())
assert 0 < abs(y - x).max() < 0.6
END
else
    echo "note: there is no NumPy, so arrays were not quantized."
fi
if python -c 'import torch' 2>/dev/null; then
    python - <<'END'
import torch, opaq
layer = opaq.Linear(64, 32)
with opaq.autocast(recipe=opaq.recipe.MXFP8BlockScaling()):
    y = layer(torch.randn(8, 64))
y.sum().backward()
print("PyTorch:", torch.ops.opaq.quantize(torch.ones(2, 32), "mxfp8")[0].dtype, tuple(y.shape))
END
else
    echo "note: there is no PyTorch, so no layer was run."
fi
SCRIPT
bare=(env -i PATH="$work/env/bin" HOME="$work/home" "$(command -v bash)" "$work/bare.sh" "$work" "$version")
if unshare --user --map-root-user --mount true 2>/dev/null; then
    # shellcheck disable=SC2016  # the inner shell expands it
    unshare --user --map-root-user --mount bash -c 'set -eu
        mount --bind "$1" "$2/packages"
        mount -t tmpfs none "$3"
        shift 3
        exec "$@"' - "$packages" "$work" "$PWD" "${bare[@]}"
    say "the wheel works with the repository hidden"
else
    say "note: unshare cannot hide the repository here; it is not on any path."
    rmdir "$work/packages"
    ln -s "$packages" "$work/packages"
    "${bare[@]}"
fi
