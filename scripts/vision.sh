#!/usr/bin/env bash
# Sourced by test.sh before the slow tests: installs timm and torchvision into .venv/vision, if that has not been done.
# They are not in .venv, because torchmetrics imports torchvision wherever it is installed, and PyPI's torchvision cannot
# be imported with a CPU build of torch. The test of examples/vision adds the folder to PYTHONPATH and defines the
# operators that are missing (tests/examples/cpu_torchvision).
if [ -z "${HYDRALOOP_EXTRAS:-}" ] && [ "$(cat "$venv/vision/.installed" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$venv/vision"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --constraint "$constraints" --target "$venv/vision" timm torchvision >&2
    echo "$wanted" > "$venv/vision/.installed"
fi
