#!/usr/bin/env bash
# Whether third_party holds what was released, unedited.
set -euo pipefail
. "$(dirname "$0")/common.sh"
(cd third_party && sha256sum --quiet --check SHA256SUMS)
say "$(wc -l <third_party/SHA256SUMS) files as they were released"
