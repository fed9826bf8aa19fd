#!/usr/bin/env bash
# Makes or reuses .venv, checks the style with ruff and the annotations with ty, and runs the tests. Other arguments go
# to pytest:
#   bash tests/run.sh                        what a change needs: at most ten minutes on two cores
#   bash tests/run.sh --all                  everything, also the tests marked slow
#   bash tests/run.sh tests/heads -k het_xl  some of it (paths are relative to the checkout)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/setup_env.sh"

which=(-m 'not slow')
arguments=()
for argument in "$@"; do
  case "$argument" in
    --all) which=() ;;
    *) arguments+=("$argument") ;;
  esac
done

style=0
say 'ruff check, ruff format --check'
"$PYTHON" -m ruff check --output-format concise . || style=1
"$PYTHON" -m ruff format --check --quiet . || { say 'not formatted as "ruff format" would'; style=1; }
say 'ty check'
"$PYTHON" -m ty check --python "$PYTHON" --output-format concise || { say 'annotations do not fit (ty check)'; style=1; }

# Two at a time: most tests compile on one core. -n 0 among the arguments runs them one after the other.
say "pytest -n 2 ${which[*]} ${arguments[*]}"
"$PYTHON" -m pytest -n 2 --dist worksteal --durations=10 "${which[@]}" "${arguments[@]}"
if [[ "$style" != 0 ]]; then say 'ruff or ty, before the tests, found what does not fit'; fi
exit "$style"
