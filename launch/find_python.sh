# shellcheck shell=bash
# Sourced by setup_env.sh and .ci/run: which interpreters there are.

VERSIONS=(3.13 3.12 3.11)  # for which requirements.txt has packages, the newest first

# The version of interpreter $1, such as 3.13, if it runs, can make environments, and is one of VERSIONS.
version_of() {
  local version
  version="$("$1" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || return
  [[ " ${VERSIONS[*]} " == *" $version "* ]] && echo "$version"
}

# Interpreters of VERSIONS on the path or of pyenv, one a line, one a version, the newest first.
find_pythons() {
  local version candidate
  for version in "${VERSIONS[@]}"; do
    for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python python3 python; do
      if [[ "$(version_of "$candidate")" == "$version" ]]; then
        echo "$candidate"
        break
      fi
    done
  done
}
