#!/usr/bin/env bash
# Format, lint, types and the direction of imports: everything CI checks besides the tests.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
"$venv/bin/ruff" format --check .
"$venv/bin/ruff" check .
"$venv/bin/mypy"
"$venv/bin/lint-imports" --no-cache
