# shellcheck shell=bash
# Sourced by tests/run.sh and launch/quickstart.sh: changes into the checkout, makes or reuses .venv there, installs
# when requirements.txt or pyproject.toml changed since the last time, and leaves
#   ROOT     the checkout
#   PYTHON   the environment's interpreter
# HET_PLUGIN_PYTHON=/path/to/python chooses the Python. An environment of another version of Python is made anew.
# HET_PLUGIN_ENVIRONMENT=folder takes the place of .venv, and HET_PLUGIN_EXTRAS that of train,test.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/launch/find_python.sh"
cd "$ROOT" || exit
ENVIRONMENT="${HET_PLUGIN_ENVIRONMENT:-.venv}"
EXTRAS="${HET_PLUGIN_EXTRAS:-train,test}"
[[ "$ENVIRONMENT" == /* ]] && PYTHON="$ENVIRONMENT/bin/python" || PYTHON="$ROOT/$ENVIRONMENT/bin/python"

say() { printf '[%s] %s\n' "$(basename "$0")" "$*"; }
die() { say "$*" >&2; exit 1; }

make_environment() {
  local base="${HET_PLUGIN_PYTHON:-}" found=''
  if "$PYTHON" -m pip --version >/dev/null 2>&1; then
    found="$(version_of "$PYTHON" || true)"
  fi
  if [[ -n "$base" ]]; then
    version_of "$base" >/dev/null || die "HET_PLUGIN_PYTHON=$base is no Python 3.11 to 3.13 with venv."
    [[ "$found" == "$(version_of "$base")" ]] && return
  else
    [[ -n "$found" ]] && return
    base="$(find_pythons)"
    base="${base%%$'\n'*}"  # the newest
    [[ -n "$base" ]] || die "found no Python 3.11 to 3.13 with venv." \
      "Install one (Debian, Ubuntu: apt install python3 python3-venv) or set HET_PLUGIN_PYTHON to one."
  fi
  if [[ -n "$found" ]]; then
    say "$ENVIRONMENT is of Python $found: making it anew with $("$base" --version) ($base)"
  else
    say "making $ENVIRONMENT with $("$base" --version) ($base)"
  fi
  "$base" -m venv --clear "$ENVIRONMENT"
}

# What the installation depends on, as one hash: the two files, the interpreter, and the place (an editable install).
wanted_stamp() {
  "$PYTHON" -c '
import hashlib, sys
parts = [sys.version, *sys.argv[1:], *(open(name).read() for name in ("requirements.txt", "pyproject.toml"))]
print(hashlib.sha256("\n".join(parts).encode()).hexdigest())' "$ROOT" "$EXTRAS"
}

# Where PYTHONDONTWRITEBYTECODE is set, every start of Python would compile TensorFlow and the others again. This keeps
# what programs import, while they start. uv's --compile-bytecode takes 45 s, for three times as many modules.
keep_bytecode() {
  [[ -n "${PYTHONDONTWRITEBYTECODE:-}" ]] || return 0
  local modules=jax,flax.linen,optax,orbax.checkpoint,clu.metrics,grain,scipy.stats,sklearn.linear_model
  modules+=,matplotlib.pyplot,gin,tensorflow_text,tensorflow_datasets,seqio,pytest,hypothesis,onnx
  PYTHONDONTWRITEBYTECODE='' nice "$PYTHON" -c "import $modules" >/dev/null 2>&1 &
}

install() {
  local packages=(-e ".[$EXTRAS]" -r requirements.txt)
  "$PYTHON" -m pip install --quiet uv || say 'uv is not to be had here; pip will do, more slowly'
  if "$PYTHON" -m uv --version >/dev/null 2>&1; then
    "$PYTHON" -m uv pip install --quiet --python "$PYTHON" "${packages[@]}" && { keep_bytecode; return; }
    say 'uv could not install these (see above); trying pip'
  fi
  "$PYTHON" -m pip install "${packages[@]}"
}

setup_environment() {
  local stamp_file="$ENVIRONMENT/het_plugin.stamp" stamp
  make_environment
  stamp="$(wanted_stamp)"
  if [[ "$(cat "$stamp_file" 2>/dev/null)" == "$stamp" ]]; then
    say "reusing $ENVIRONMENT ($("$PYTHON" --version))"
    return
  fi
  say "installing into $ENVIRONMENT: about a minute and 2 to 3 GB the first time"
  local started=$SECONDS
  rm -f "$stamp_file"  # an installation that ends half way is none of before
  install
  echo "$stamp" > "$stamp_file"
  say "installed in $((SECONDS - started)) s"
}

setup_environment
