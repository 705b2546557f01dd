#!/usr/bin/env bash
# Runs the tests with the lowest supported versions (pyproject.toml): scripts/lowest.sh [pytest arguments].
# Installs them into .venv-lowest the first time: 6 GB, because PyPI's torch is built for CUDA. Needs no GPU.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHON="${PYTHON:-python3.11}" HYDRALOOP_VENV="${HYDRALOOP_VENV:-$root/.venv-lowest}"
export HYDRALOOP_CONSTRAINTS="$root/build/lowest.txt"
export HYDRALOOP_EXTRAS=dev # transformers needs newer versions of rich and safetensors
mkdir -p "$root/build"
"$PYTHON" - "$root/pyproject.toml" > "$HYDRALOOP_CONSTRAINTS" <<'EOF'
import sys, tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
extras = project["optional-dependencies"]
needed = [extras[name] for name in ("tensorboard", "gpus", "search", "diabetes")]
for bound in sum(needed, project["dependencies"]):
    print(bound.replace(">=", "=="))
EOF
exec bash "$root/scripts/test.sh" "$@"
