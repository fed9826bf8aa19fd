#!/usr/bin/env bash
# Trains the deterministic, HET, HET-H and HET-XL heads on rendered characters with noisy labels and prints one table.
# Arguments go to `python -m het_plugin.quickstart` (--help lists them). Results: runs/quickstart.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

say 'training DET, DET with learned tau, HET, HET-H and HET-XL for the same steps: about five minutes on two CPU cores'
"$PYTHON" -m het_plugin.quickstart "$@"
