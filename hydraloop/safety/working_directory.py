"""Decides whether `python -m hydraloop <command> <run>` trusts the Python files of the working directory."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydraloop.safety.allowlist import ALLOWLIST, Advice
from hydraloop.safety.projects import owns

UNTRUSTED = "HYDRALOOP_UNTRUSTED_DIRECTORY"
"""Variable of a process, and of those that it starts, whose working directory is not trusted. Git would run programs
that a repository there names."""
_HERE = "."
"""With `--trusted`: the working directory."""
_PROJECT = "the folder of the project that trained the run"


def trust(argv: Sequence[str], run: Path, typed: Iterable[str]) -> bool:
    """Trust the packages that were typed, and the working directory if it was typed or is the project of the run.

    Args:
        argv: the command line, from the name of the command on.
        run: the run directory.
        typed: values of `--trusted`, `timm,peft`; `.` is the working directory.

    Returns:
        Whether the working directory is trusted.
    """
    packages, here = {package for given in typed for package in given.split(",")}, Path.cwd()
    missing = f"Run the command in {_PROJECT}, or install the package."
    is_trusted = _HERE in packages or owns(here, run)
    if is_trusted:
        ALLOWLIST.trust_folder(here)
        sys.path.insert(0, str(here))  # `__main__` has removed it
    else:
        os.environ[UNTRUSTED] = "1"
        if argv[0] == "resume":
            problem = "the code is not recorded, because git is not asked in a directory that is not trusted"
            print(f"warning: {problem}", file=sys.stderr)
        trusting = _with_trusted(argv, [*packages, _HERE])
        missing = (
            f"{missing} You have trained no such run here on this account, so Python files in the working directory "
            f"are not trusted. If you trust them: `{trusting}`."
        )
    kept = packages & {_HERE}
    ALLOWLIST.trust(packages - kept)
    ALLOWLIST.advice = Advice(lambda names: f"run `{_with_trusted(argv, [*kept, *names])}`.", _PROJECT, missing)
    return is_trusted


def _with_trusted(argv: Sequence[str], packages: Iterable[str]) -> str:
    """Return the command line that trusts these packages."""
    kept = [
        text
        for before, text in zip(["", *argv], argv, strict=False)
        if before != "--trusted" and (text == "--trusted-links" or not text.startswith("--trusted"))
    ]
    return shlex.join(["python", "-m", "hydraloop", *kept, "--trusted", ",".join(sorted(packages))])
