"""Install other frameworks, and another version of Hydra, for the processes of these tests only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = {
    "mmengine": (
        "mmengine==0.10.7",
        "addict==2.4.0",
        "yapf==0.43.0",
        "termcolor==3.3.0",
        "opencv-python-headless==5.0.0.93",
    ),
    "hydra": ("hydra-core==1.4.0rc3", "omegaconf==2.4.1rc1"),
}
"""Packages that each needs in addition to hydraloop's, such as torch, which come from this environment."""
_SECONDS = 300


def installed(framework: str) -> Path:
    """Return the folder with a framework's packages, installed once into `HYDRALOOP_COMPAT_PACKAGES` or this
    environment. Skip the test, with pip's reason, if that fails."""
    above = Path(os.environ.get("HYDRALOOP_COMPAT_PACKAGES", f"{sys.prefix}/compat"))
    wanted = "\n".join((sys.version.split()[0], *PACKAGES[framework]))
    folder = above / framework
    stamp = folder / "installed.txt"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return folder
    try:
        above.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{framework}-", dir=above))
    except OSError as error:
        pytest.skip(f"{framework} cannot be installed: {error}")
    try:
        _install(PACKAGES[framework], new)
        (new / "installed.txt").write_text(wanted, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        new.replace(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return folder


def _install(packages: tuple[str, ...], target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--timeout=15"]
    try:
        done = subprocess.run(
            [*command, "--retries=1", f"--target={target}", *packages],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not install {', '.join(packages)} within {_SECONDS} s")
    if done.returncode != 0:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-300:]]
        pytest.skip(f"pip cannot install {', '.join(packages)}: {reasons[-1]}")


def environment(framework: str) -> dict[str, str]:
    """Return environment variables for a process that imports the framework, hydraloop and the tests."""
    path = os.pathsep.join((str(installed(framework)), str(REPOSITORY)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
