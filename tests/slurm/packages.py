"""Debian's packages of Slurm, unpacked into a cache folder. Nothing is installed."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

_PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libhwloc15", "libmunge2", "liblua5.1-0"),
    *("libjson-c5", "libdbus-1-3", "libnuma1", "libpam0g", "libyaml-0-2", "liblz4-1", "libreadline8"),
    *("libhttp-parser2.9", "libjwt0", "librrd8", "libfreeipmi17", "libpmix2"),
)


def unpacked(name: str = "slurm", further: Sequence[str] = ()) -> Path:
    """Return the folder with Debian's packages of Slurm.

    Args:
        name: of the folder in the cache.
        further: packages in addition to those of a cluster.
    """
    needed = ("apt-get", "dpkg", "setpriv", "unshare")
    missing = [command for command in needed if shutil.which(command) is None]
    if missing:
        pytest.skip(f"Slurm needs {', '.join(missing)}")
    if subprocess.run(["unshare", "--uts", "--pid", "--mount-proc", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("Slurm's nodes need unshare, which is not permitted here")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hydraloop-tests")
    cache.mkdir(parents=True, exist_ok=True)
    root = cache / name
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            new = cache / f"{name}.new"
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            _download(new, (*_PACKAGES, *further))
            for file in new.glob("*.deb"):
                subprocess.run(["dpkg", "-x", file, new], check=True)
                file.unlink()
            new.rename(root)
    return root


def _download(folder: Path, packages: Sequence[str]) -> None:
    words = ["apt-get", "-qq", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"]
    for _ in range(2):
        done = subprocess.run([*words, "download", *packages], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        subprocess.run([*words, "update"], capture_output=True, check=False)  # of the lists of packages
    pytest.skip(f"the packages of Slurm cannot be downloaded: {done.stderr.strip()}")
