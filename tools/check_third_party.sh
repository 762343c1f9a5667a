#!/usr/bin/env bash
# Checks that the files in third_party are those of the release, unmodified.
set -euo pipefail
. "$(dirname "$0")/common.sh"
(cd third_party && sha256sum --quiet --check SHA256SUMS)
say "$(wc -l <third_party/SHA256SUMS) files match their checksums"
