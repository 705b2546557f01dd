#!/usr/bin/env bash
# Sourced by test.sh before the slow tests: installs the packages of the examples, if that has not been done. The usual
# tests do without them: torchmetrics imports transformers wherever it is installed, 1.2 s for each process.
# timm and torchvision go into .venv/vision, because torchmetrics imports torchvision, too, and PyPI's torchvision cannot
# be imported with a CPU build of torch. The test of examples/vision adds the folder to PYTHONPATH and defines the
# operators that are missing (tests/examples/cpu_torchvision).
if [ -z "${HYDRALOOP_EXTRAS:-}" ] && [ "$(cat "$venv/vision/.installed" 2>/dev/null)" != "$wanted" ]; then
    echo "installing the packages of the examples into $venv (once, a minute)" >&2
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$constraints" --editable "$root[examples]" >&2
    rm -rf "$venv/vision"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --constraint "$constraints" --target "$venv/vision" timm torchvision >&2
    echo "$wanted" > "$venv/vision/.installed"
fi
