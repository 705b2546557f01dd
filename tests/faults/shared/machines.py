"""Two views of one folder with caches, as two machines see a network file system, and processes on two machines.

`bindfs` (FUSE) shows a view of a folder. For 15 s, the kernel shows each view the sizes, times and missing files that
it has seen before, also after another view has changed them. NFS is kinder: it asks the server when a file is opened.

A second machine is a namespace with other process ids and another name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import until

TIMEOUT = 15
"""Seconds for which a view may be wrong."""
_PACKAGES = ("bindfs", "libfuse2", "fuse")
_UNPACKED = Path(tempfile.gettempdir()) / f"hydraloop-debian-{os.getuid()}-bindfs"
_CACHES = ",".join(f"{name}_timeout={TIMEOUT}" for name in ("attr", "entry", "negative"))


@dataclass(frozen=True)
class Machine:
    """Where a process runs, and what it sees."""

    view: Path
    """The folder, as this machine sees it."""
    command: tuple[str, ...] = ()
    """Begins the command lines of its processes."""


def _unpacked() -> Path:
    """Return the folder with the unpacked packages of Debian; skip the test if they cannot be had."""
    if not _UNPACKED.exists():
        with tempfile.TemporaryDirectory() as folder:
            get = ["apt-get", "download", *_PACKAGES]
            got = shutil.which("apt-get") and subprocess.run(get, cwd=folder, capture_output=True, check=False)
            if not got or got.returncode:
                pytest.skip("the packages of bindfs cannot be had")
            for package in Path(folder).glob("*.deb"):
                subprocess.run(["dpkg", "-x", package, f"{folder}/root"], check=True)
            shutil.move(f"{folder}/root", _UNPACKED)
    return _UNPACKED


@contextlib.contextmanager
def machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """In the body, two machines see `folder/real` as `folder/first` and `folder/second`, with each other's flocks."""
    root = _unpacked()
    libraries = ":".join({str(path.parent) for path in root.rglob("*.so.*")})
    environment = os.environ | {"LD_LIBRARY_PATH": libraries, "PATH": f"{root}/bin:{os.environ['PATH']}"}
    options = ["--enable-lock-forwarding", "--multithreaded"]
    views = [folder / "first", folder / "second"]
    (folder / "real").mkdir()
    with contextlib.ExitStack() as mounted:
        for view in views:
            view.mkdir()
            mount = [root / "usr/bin/bindfs", "-f", "-o", _CACHES, *options, folder / "real", view]
            process = subprocess.Popen(mount, env=environment, stderr=subprocess.DEVNULL)
            mounted.callback(process.wait, 30)
            mounted.callback(process.terminate)
            mounted.callback(subprocess.run, ["umount", "-l", view], check=False)
            until(lambda view=view, process=process: view.is_mount() or process.poll() is not None, "it is mounted")
            if process.poll() is not None:
                pytest.skip("bindfs cannot mount here")
        apart = ("unshare", "--pid", "--uts", "--mount", "--fork", "--mount-proc", "--kill-child")
        named = ("sh", "-c", 'hostname second; exec "$@"', "sh")
        yield Machine(views[0]), Machine(views[1], (*apart, *named))
