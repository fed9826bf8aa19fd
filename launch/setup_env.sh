# shellcheck shell=bash
# Sourced by tests/run.sh and launch/quickstart.sh: changes into the checkout, makes or reuses .venv there, installs
# when requirements.txt or pyproject.toml changed since the last time, and leaves
#   ROOT     the checkout
#   PYTHON   the environment's interpreter
# HET_PLUGIN_PYTHON=/path/to/python chooses the interpreter that a new .venv is made from.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="$ROOT/.venv/bin/python"
cd "$ROOT" || exit

say() { printf '[%s] %s\n' "$(basename "$0")" "$*"; }
die() { say "$*" >&2; exit 1; }

# True when the interpreter $1 runs, can make environments, and is Python 3.11 or newer.
suitable_python() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${HET_PLUGIN_PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
    if suitable_python "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "found no Python 3.11 to 3.13 with venv (looked at: ${HET_PLUGIN_PYTHON:-python3.11 python3.12 python3.13 python3 python})." \
    "Install one (Debian, Ubuntu: apt install python3 python3-venv) or set HET_PLUGIN_PYTHON to one."
}

make_environment() {
  local base
  if "$PYTHON" -m pip --version >/dev/null 2>&1; then
    return
  fi
  base="$(find_python)"
  say "making .venv with $("$base" --version) ($base)"
  "$base" -m venv .venv
}

# What the installation depends on, as one hash: the two files, the interpreter, and the place (an editable install).
wanted_stamp() {
  "$PYTHON" -c '
import hashlib, sys
parts = [sys.version, *sys.argv[1:], *(open(name).read() for name in ("requirements.txt", "pyproject.toml"))]
print(hashlib.sha256("\n".join(parts).encode()).hexdigest())' "$ROOT"
}

install() {
  # The pins have wheels for Python 3.11 to 3.13; newer Pythons take what pyproject.toml's ranges allow.
  local packages=(-e '.[train,test]')
  if "$PYTHON" -c 'import sys; sys.exit(sys.version_info >= (3, 14))'; then
    packages+=(-r requirements.txt)
  fi
  "$PYTHON" -m pip install --quiet uv || say 'uv is not to be had here; pip will do, more slowly'
  if "$PYTHON" -m uv --version >/dev/null 2>&1; then
    # As pip does. Without, and where PYTHONDONTWRITEBYTECODE is set, every start of Python would compile all of TensorFlow.
    "$PYTHON" -m uv pip install --quiet --compile-bytecode --python "$PYTHON" "${packages[@]}" && return
    say 'uv could not install these (see above); trying pip'
  fi
  "$PYTHON" -m pip install "${packages[@]}"
}

setup_environment() {
  local stamp_file=.venv/het_plugin.stamp stamp
  make_environment
  stamp="$(wanted_stamp)"
  if [[ "$(cat "$stamp_file" 2>/dev/null)" == "$stamp" ]]; then
    say "reusing .venv ($("$PYTHON" --version))"
    return
  fi
  say 'installing into .venv: about a minute and 2 to 3 GB the first time'
  local started=$SECONDS
  install
  echo "$stamp" > "$stamp_file"
  say "installed in $((SECONDS - started)) s"
}

setup_environment
