#!/usr/bin/env bash
# Sourced by run.sh, test.sh and lint.sh: creates .venv and installs everything into it, if that has not been done.
# .venv has a hash of pyproject.toml and the constraints; if it still matches, nothing is installed.
#   PYTHON=python3.13       the interpreter; .venv is created again if it has another
#   HYDRALOOP_VENV=folder   instead of .venv
#   HYDRALOOP_CONSTRAINTS=file   the versions to install, instead of constraints.txt
#   HYDRALOOP_EXTRAS=dev    without the packages of the examples, in the slow tests too (scripts/example_packages.sh)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${HYDRALOOP_VENV:-$root/.venv}"
constraints="${HYDRALOOP_CONSTRAINTS:-$root/constraints.txt}"

interpreter() {
    "$1" -c 'import sys; print(sys.version, sys.base_prefix)'
}

if [ ! -x "$venv/bin/python" ] ||
    { [ -n "${PYTHON:-}" ] && [ "$(interpreter "$PYTHON")" != "$(interpreter "$venv/bin/python")" ]; }; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: hydraloop needs Python 3.11 or later; PYTHON=/path/to/python names another" >&2
        exit 2
    }
    clear=""
    if [ -f "$venv/pyvenv.cfg" ]; then # any other folder is not ours to empty
        clear="--clear"
    fi
    "${PYTHON:-python3}" -m venv $clear "$venv"
fi
wanted="$(cat "$root/pyproject.toml" "$constraints" | cksum) $root"
if [ "$(cat "$venv/.hydraloop-installed" 2>/dev/null)" != "$wanted" ]; then
    echo "installing into $venv (once, some minutes)" >&2
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$constraints" --editable "$root[${HYDRALOOP_EXTRAS:-dev}]" >&2
    echo "$wanted" > "$venv/.hydraloop-installed"
fi
