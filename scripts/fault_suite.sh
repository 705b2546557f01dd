#!/usr/bin/env bash
# Kills runs at random moments, continues them until they end, and compares each with a run that was not interrupted, to
# the last bit: scripts/fault_suite.sh [runs] [seed]. 200 runs, the default, take up to an hour on 2 cores. Prints two
# tables; the exit code is 1 if a run differs. Installs everything into .venv first, once.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
exec "$venv/bin/python" -m tests.faults.suite "$@"
