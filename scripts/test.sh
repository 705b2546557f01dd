#!/usr/bin/env bash
# Runs the tests: scripts/test.sh [pytest arguments]; -m slow runs the long ones, scripts/nightly.sh the longest.
# The whole suite runs in three processes, because many tests wait for others (-n 8: in eight, -n 0: in one, as --pdb
# needs); with a path among the arguments in one, which starts sooner. A file's tests stay in one process, because they
# share fixtures. tests/conftest.py puts the longest files first, so that all processes end at about the same time.
# Installs everything into .venv first, once. Needs Python 3.11, 3.12 or 3.13, and pip; PYTHON=python3.13 chooses one.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
export RES_OPTIONS=timeout:1  # torch looks up the name of each rank's address; a lost answer costs 1 second, not 5
unset PYTHONDONTWRITEBYTECODE # else each process that a test starts compiles all of hydraloop
whole=true
for argument in "$@"; do
    if [ -e "${argument%%::*}" ]; then
        whole=false
    fi
done
if $whole; then
    set -- -n 3 --dist loadfile --no-loadscope-reorder "$@"
fi
case " $* " in
    *nightly* | *tracker_pages*) bash scripts/browser.sh ;; # other tests need no browser
esac
case " $* " in
    *slow* | *tests/examples*) source scripts/example_packages.sh ;; # no other tests need transformers or timm
esac
exec "$venv/bin/python" -m pytest "$@"
