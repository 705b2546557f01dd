#!/usr/bin/env bash
# Installs the language server that checks YAML in VS Code into .venv/language-server, if npm is there. Called by test.sh
# before the slow tests. Takes half a minute the first time and never fails: without it, its test is skipped.
folder="${1:?the virtual environment}/language-server"
if [ -d "$folder/node_modules/yaml-language-server" ] || ! command -v npm >/dev/null; then
    exit 0
fi
echo "installing yaml-language-server into $folder" >&2
mkdir -p "$folder"
timeout 300 npm install --prefix "$folder" --no-fund --no-audit --silent yaml-language-server@2.0.0 >/dev/null 2>&1 ||
    echo "yaml-language-server cannot be installed: its test is skipped" >&2
exit 0
