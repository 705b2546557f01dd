#!/usr/bin/env bash
# Kills controllers, fork servers, jobs and followers of sweeps at random moments, tears files, resumes the sweeps until
# they end, and counts jobs that have ended once, lost results and doubled jobs: scripts/sweep_suite.sh [sweeps] [seed].
# 20 sweeps, the default, two at a time, take 5 to 10 minutes on 2 cores. The exit code is 1 if something is wrong.
# Installs everything into .venv first, once.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
exec "$venv/bin/python" -m tests.faults.sweeps.suite "$@"
