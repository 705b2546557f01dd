"""`hydraloop new`: writes a small project, from an example that hydraloop contains. Imports no torch."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from textwrap import indent

import yaml

from hydraloop.errors import UserError, suggestion

TEMPLATES = Path(__file__).parents[1] / "templates"
STARTER = "starter"
"""The template without `--from`."""
_CONFIG = "conf/config.yaml"
_LEFT_OUT = {"__pycache__", "outputs", "multirun"}
"""Folders of an example in a clone, in which somebody has trained."""


def templates() -> list[str]:
    """Return the names of the templates, the default one first."""
    found = sorted(path.name for path in TEMPLATES.iterdir() if (path / "train.py").exists())
    return sorted(found, key=lambda name: name != STARTER)


def run(args: argparse.Namespace) -> int:
    """Write the files. Returns the exit code 0.

    Raises:
        UserError: the folder has files, or there is no such example.
        OSError: a file cannot be written.
    """
    folder: Path = args.directory
    _check_free(folder)
    template = vars(args)["from"] or STARTER
    if template not in templates():
        raise UserError(f"there is no example {template!r}", key="--from", remedy=suggestion(template, templates()))
    files = _files_of(template)
    name, key = folder.resolve().name, "experiment_name"
    if re.fullmatch(r"[A-Za-z_][\w.-]*", name) and yaml.safe_load(name) == name:  # not a folder `null` or `true`
        files[_CONFIG] = files[_CONFIG].replace(f"{key}: {template}\n", f"{key}: {name}\n")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    print(f"{name}: wrote {', '.join(sorted(files))}")
    print("\nNext:")
    if folder.resolve() != Path.cwd():
        print(f"  {shlex.join(['cd', str(folder)])}")
    print(indent(_first_commands(template), "  "), end="")
    return 0


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists, and is not an empty folder", key="new", remedy="Name another folder.")


def _files_of(name: str) -> dict[str, str]:
    root = TEMPLATES / name
    paths = {path.relative_to(root): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {own.as_posix(): _read(path) for own, path in paths.items() if not _LEFT_OUT.intersection(own.parts)}


def _first_commands(template: str) -> str:
    """Return the first commands in the README of a template."""
    return _read(TEMPLATES / template / "README.md").partition("```bash\n")[2].partition("```")[0]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
