#!/usr/bin/env bash
# Builds the wheel of the last commit into dist/: scripts/build.sh [folder]. Changes that are not committed are left out.
# Two clones of a commit build equal bytes with the same setuptools (constraints.txt): times are those of the commit, and
# file modes do not depend on the umask. Installs everything into .venv first, if there is none.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${HYDRALOOP_VENV:-$root/.venv}"
if [ ! -x "$venv/bin/python" ]; then
    source "$root/scripts/setup.sh"
fi
mkdir -p "${1:-$root/dist}"
target="$(cd "${1:-$root/dist}" && pwd)"
source="$(mktemp -d)"
trap 'rm -rf "$source"' EXIT
umask 022
git -C "$root" -c tar.umask=0022 archive HEAD | tar -x -C "$source"
SOURCE_DATE_EPOCH="$(git -C "$root" log -1 --format=%ct)"
export SOURCE_DATE_EPOCH
"$venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --wheel-dir "$target" "$source"
ls "$target"/hydraloop-*.whl
