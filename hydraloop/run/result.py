"""`result.json`: how a run ended, in one file that scripts and sweeps read. Without torch."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from hydraloop.run import atomic
from hydraloop.safety.secrets import mask_text

Status = Literal["finished", "failed", "stopped", "interrupted"]

FILENAME = "result.json"
_GIT = ["git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "--no-optional-locks"]
_FOR_GIT = {
    name: os.environ[name]
    for name in ("PATH", "HOME", "XDG_CONFIG_HOME", "SYSTEMROOT", "USERPROFILE")
    if name in os.environ
}
"""Environment of git: nothing that a config sets. The user's own git config counts: it has `safe.directory`."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best validation so far."""

    metric: str
    value: float
    iteration: int
    """Completed iterations at that validation."""
    checkpoint: str
    """Path of the checkpoint file."""


@dataclass(slots=True)
class Result:
    """The contents of `result.json`."""

    status: Status
    error: str | None = None
    """Type and message of what ended the run."""
    reason: str | None = None
    """Who asked to stop, where the status is `stopped`."""
    val_metrics: dict[str, float] = field(default_factory=dict)
    """Of the last validation."""
    test_metrics: dict[str, float] = field(default_factory=dict)
    best: Best | None = None
    progress: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    """Wall-clock time of this process's part of the run."""
    versions: dict[str, str] = field(default_factory=dict)
    git: dict[str, str | bool] = field(default_factory=dict)
    """`commit` of the folder the run was started in, and `dirty`: whether tracked files differed from it."""

    def write(self, run_dir: Path) -> None:
        """Write the file atomically; secrets in the error are masked.

        NaN and infinity, which JSON does not have, become their names as strings.
        """
        shown = replace(self, error=_masked(self.error), reason=_masked(self.reason))
        text = json.dumps(_finite(asdict(shown)), indent=2, allow_nan=False)
        atomic.write_text(run_dir / FILENAME, text + "\n")


def describe(error: BaseException) -> str:
    """Type and message of an error, in one string; a user's mistake is its message alone."""
    text = str(error)
    return text if type(error).__name__ == "UserError" else f"{type(error).__name__}: {text}" if text else repr(error)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result; of torch with its build, `2.13.0+cu130`."""
    found = {"python": platform.python_version()}
    for package in ("hydraloop", "torch", "hydra-core", "omegaconf", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "torch" in sys.modules:  # whose metadata does not always name the build
        found["torch"] = str(sys.modules["torch"].__version__)
    return found


def git_commit(folder: Path) -> str | None:
    """Commit of the repository around `folder`; None outside one or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    return None if commit is None else commit.strip()


def git_diff(folder: Path) -> str | None:
    """Return the changes of tracked files since the commit, as `git apply` takes them; None if git fails.

    Bytes that are not UTF-8 become surrogates. Takes about 10 ms.
    """
    plain = [f"diff.{name}=false" for name in ("noprefix", "mnemonicPrefix", "relative")]
    options = [part for one in plain for part in ("-c", one)]
    flags = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
    return _git(folder, *options, "diff", "HEAD", *flags)


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of git, which runs no other program (monitor, hook, pager); None if it fails or takes more than 5 s."""
    try:
        done = subprocess.run(
            [*_GIT, *arguments],
            cwd=folder,
            env=_FOR_GIT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None


def _masked(text: str | None) -> str | None:
    return None if text is None else mask_text(text)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def command() -> str:
    """How this process was started, for hints: `python train.py`."""
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    return f"python {os.path.relpath(script)}" if script else "python train.py"
