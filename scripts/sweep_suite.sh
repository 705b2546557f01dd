#!/usr/bin/env bash
# Kills controllers, fork servers, jobs and senders of sweeps with MLflow at random moments, resumes the sweeps until they
# end, and compares them with sweeps that were not killed: scripts/sweep_suite.sh [kills] [seed].
# 60 kills, the default, take 10 minutes on 2 cores. The exit code is 1 if something is wrong.
# Installs everything into .venv first, once.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
exec "$venv/bin/python" -m tests.faults.sweeps.suite "$@"
