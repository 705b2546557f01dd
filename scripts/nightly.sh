#!/usr/bin/env bash
# Runs what takes too long for CI: scripts/nightly.sh. First the tests marked `nightly`: MMEngine and Lightning, the
# trackers' pages in a browser, a long training, and further values of what the slow tests check. Then 10,000 random
# command lines, planted mistakes, and the usual tests with the lowest versions that pyproject.toml allows.
# At the end it lists the nightly tests that ran or were skipped, and why.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
report="$(mktemp)"
trap 'rm -f "$report"' EXIT
failed=0
bash scripts/test.sh -m nightly -rpsfE | tee "$report" || failed=1
"${HYDRALOOP_VENV:-.venv}/bin/python" -m tests.faults.command_lines || failed=1
"${HYDRALOOP_VENV:-.venv}/bin/python" -m tests.faults.planted || failed=1
bash scripts/lowest.sh && lowest="passed" || { lowest="FAILED" failed=1; }
echo
sed -n '/short test summary info/,$p' "$report"
echo "the usual tests with the lowest versions: $lowest"
exit "$failed"
