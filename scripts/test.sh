#!/usr/bin/env bash
# Runs the tests: scripts/test.sh [pytest arguments]; -m slow runs the long ones.
# Installs everything into .venv first, once. Needs Python 3.11 and pip.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
exec "$venv/bin/python" -m pytest "$@"
