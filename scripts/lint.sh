#!/usr/bin/env bash
# Checks format, lint, types and imports, like CI.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
"$venv/bin/ruff" format --check .
"$venv/bin/ruff" check .
"$venv/bin/mypy"
"$venv/bin/lint-imports" --no-cache
