#!/usr/bin/env bash
# Sourced by run.sh and test.sh: makes .venv with everything installed, or finds it made already.
# What is installed is remembered as a hash of the files that say so; a second call compares it and goes on at once.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${HYDRALOOP_VENV:-$root/.venv}"
python="${PYTHON:-python3}"

wanted="$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum) $root"
if [ ! -x "$venv/bin/python" ] || [ "$(cat "$venv/.hydraloop-installed" 2>/dev/null)" != "$wanted" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: hydraloop needs Python 3.11 or later; PYTHON=/path/to/python names another" >&2
        exit 2
    }
    echo "installing into $venv (once, some minutes)" >&2
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$root/constraints.txt" --editable "$root[dev]" >&2
    echo "$wanted" > "$venv/.hydraloop-installed"
fi
