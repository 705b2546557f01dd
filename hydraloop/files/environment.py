"""How a run was started: versions of packages, git commit, command. Imports no torch."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_GIT = ["git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "--no-optional-locks"]
_GIT_ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "HOME", "XDG_CONFIG_HOME") if name in os.environ}
"""Without variables from a config. The user's git config is read, because it has `safe.directory`."""
SWEEP_JOB = "HYDRALOOP_SWEEP_JOB"
"""Variable with the path of a request: this process runs that job of a sweep."""
SWEEP_OWNER = "HYDRALOOP_SWEEP_OWNER"
"""Variable with the id of the process that has started that job, and with which it ends."""
SUBMITTED = "HYDRALOOP_SUBMITTED_COMMAND"
"""Variable with the path of a file that has the overrides of this process, which is a job of Slurm."""

_command: list[str] | None = None


def is_received() -> bool:
    """Return whether hydraloop has started this process for a given work, which a variable names."""
    return any(name in os.environ for name in (SWEEP_JOB, SUBMITTED))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that influence a result; torch's names its build."""
    found = dict(_installed())
    if "torch" in sys.modules:  # its metadata does not always name the build
        found["torch"] = str(sys.modules["torch"].__version__)
    return found


@functools.cache
def _installed() -> dict[str, str]:
    from importlib import metadata  # 10 ms, which --help and --dry-run do without

    found = {"python": platform.python_version()}
    for package in ("hydraloop", "torch", "hydra-core", "omegaconf", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit(folder: Path) -> str | None:
    """Return the commit of the repository around a folder; None outside a repository or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    return None if commit is None else commit.strip()


def git_diff(folder: Path) -> str | None:
    """Return the changes of tracked files since the commit, for `git apply`; None if git fails. Takes about 10 ms.

    Bytes that are not UTF-8 become surrogates.
    """
    defaults = [f"diff.{name}=false" for name in ("noprefix", "mnemonicPrefix", "relative")]
    options = [part for one in defaults for part in ("-c", one)]
    flags = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
    return _git(folder, *options, "diff", "HEAD", *flags)


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git; None if it fails or takes more than 5 s.

    Git starts no other program, except the filters that the repository's config names.
    """
    try:
        done = subprocess.run(
            [*_GIT, *arguments],
            cwd=folder,
            env=_GIT_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None


def script() -> list[str]:
    """Return how this process was started, without arguments: `python train.py`."""
    main = sys.modules["__main__"]
    if "hydraloop.__main__" in sys.modules:  # imported by the command `hydraloop`
        return ["python", "-m", "hydraloop"]
    if main.__spec__ is not None and main.__spec__.name != "__main__":  # that of a folder
        return ["python", "-m", main.__spec__.name.removesuffix(".__main__")]
    file = getattr(main, "__file__", None)
    return ["python", os.path.relpath(file) if file else "train.py"]


def command() -> list[str]:
    """Return the command that started the run, without overrides, for hints: `python train.py --config-name=x`."""
    return list(_command or script())


def of_project(name: str, path: Path) -> list[str]:
    """Return a command that runs the code of the project: `python train.py resume outputs/<run>`."""
    words = list(_command or ("python", "train.py"))  # a script that calls `build` reads no arguments
    words = words[: words.index("resume")] if "resume" in words else words
    return [*(word for word in words if not word.startswith("--config-")), name, shown(path)]


def without_project(name: str, path: Path) -> str:
    """Return a command that runs no code of a project: `hydraloop status outputs/<run>`."""
    return shlex.join(["hydraloop", name, shown(path)])


def set_command(words: Sequence[str]) -> None:
    """Set what `command` returns, to add flags, or in a rank that another process has started."""
    global _command
    _command = list(words)


def shown(path: Path) -> str:
    """Return a path for people: relative to the working directory if it is inside, otherwise absolute."""
    path = path.absolute()
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
