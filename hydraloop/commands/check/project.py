"""Composes the config of the project in the working directory, as `python train.py` composes it. Imports no torch."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydraloop.cli import arguments, command
from hydraloop.cli.compose import opened
from hydraloop.commands.parser import PLACE
from hydraloop.errors import UserError
from hydraloop.plan import Draft
from hydraloop.run_files import environment
from hydraloop.safety.allowlist import ALLOWLIST, IN_MAIN
from hydraloop.safety.secrets import remember_overrides

SCRIPT = "train.py"
_CALL = re.compile(r"\bhydraloop\b(?s:.*)\bmain\(")


class _CalledError(BaseException):
    """The script has called `hydraloop.main`. `except Exception` in the script does not catch it."""


@contextmanager
def composed(args: argparse.Namespace) -> Iterator[Draft]:
    """Compose and check the config. In the body, the composer is open, and what the project trusts is trusted.

    Args:
        args: the overrides, and Hydra's flags for the place of the config.

    Yields:
        The config.

    Raises:
        UserError: a mistake in the overrides or the config; or the working directory has neither a script that calls
            `hydraloop.main` nor a folder `conf`.
        Exception: of the script.
    """
    folder = Path.cwd()
    has_script = (folder / SCRIPT).is_file() and _CALL.search((folder / SCRIPT).read_text(encoding="utf-8"))
    if not (has_script or (folder / "conf").is_dir()):
        remedy = "Run the command in the folder with train.py, or with conf/config.yaml."
        raise UserError("there is no project in the working directory", remedy=remedy)
    remember_overrides(args.overrides)
    sys.path.insert(0, str(folder))  # `__main__` has removed it
    called = _call_of_main(folder / SCRIPT) if has_script else {}
    project = Path(called.get("folder") or folder)
    ALLOWLIST.trust_folder(project)
    ALLOWLIST.trust(called.get("trusted", ()))
    ALLOWLIST.hydra_sections, ALLOWLIST.advice = called.get("hydra_sections", False), IN_MAIN
    environment.set_command(["python", SCRIPT] if has_script else ["python", "-m", "hydraloop"])
    flags = [f"--{name}={value}" for name in PLACE if (value := getattr(args, name.replace("-", "_"))) is not None]
    read = arguments.read([*flags, *args.overrides])
    configs, name = project / called.get("config_path", "conf"), called.get("config_name", "config")
    configs = configs if read.config_path is None else configs.parent / read.config_path
    with opened(configs, read.config_name or name, read.config_dir) as composer:
        draft = command.read(read, composer)
        if draft is None:
            raise UserError("a sweep has several configs", remedy="Leave -m out, and give one value to each option.")
        yield draft


def _call_of_main(script: Path) -> dict[str, Any]:
    """Run the script until it calls `hydraloop.main`. Return the arguments of the call."""
    found: dict[str, Any] = {}
    package: Any = sys.modules["hydraloop"]

    def main(**options: Any) -> None:
        found.update(options)
        raise _CalledError

    argv = sys.argv
    sys.argv = [str(script), "--help"]  # all that the script does if it gets `main` from another module
    package.main = main
    try:
        runpy.run_path(str(script), run_name="__main__")
    except _CalledError:
        return found
    finally:
        sys.argv = argv
        del package.main  # the lazy one is in its place again
    raise UserError(f"{SCRIPT} has not called hydraloop.main()", remedy="Call it as `hydraloop new` writes it.")
