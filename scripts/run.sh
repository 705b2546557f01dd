#!/usr/bin/env bash
# Trains a model: scripts/run.sh [overrides], for example scripts/run.sh 'hooks=[ema,profiler]'
# Installs everything into .venv the first time. Needs Python 3.11, 3.12 or 3.13, and pip; PYTHON=python3.13 chooses one.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$venv/bin/python" "$root/train.py" "$@"
