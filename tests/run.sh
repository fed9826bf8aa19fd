#!/usr/bin/env bash
# Makes or reuses .venv, checks the style with ruff, and runs the tests. Arguments go to pytest:
#   bash tests/run.sh                        everything
#   bash tests/run.sh tests/heads -k het_xl  some of it (paths are relative to the checkout)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/setup_env.sh"

style=0
say 'ruff check, ruff format --check'
"$PYTHON" -m ruff check --output-format concise . || style=1
"$PYTHON" -m ruff format --check --quiet . || { say 'not formatted as "ruff format" would'; style=1; }

# Two at a time: most tests compile on one core. -n 0 among the arguments runs them one after the other.
say "pytest -n 2 $*"
"$PYTHON" -m pytest -n 2 --dist worksteal "$@"
exit "$style"
