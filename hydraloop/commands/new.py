"""`hydraloop new`: writes a small project, from an example that hydraloop contains. Imports no torch."""

from __future__ import annotations

import argparse
import re
import shlex
from itertools import count
from pathlib import Path
from textwrap import indent

import yaml

from hydraloop import json_answers
from hydraloop.errors import Remedy, UserError

TEMPLATES = Path(__file__).parents[1] / "templates"
STARTER = "starter"
"""The template without `--from`. Its `train.py` is also that of `--here`."""
_SCRIPT, _CONFIG = "train.py", "conf/config.yaml"
_LEFT_OUT = {"__pycache__", "outputs", "multirun"}
"""Folders of an example in a clone, in which somebody has trained."""
_CONFIG_OF_EXISTING = Path(__file__).with_name("new_here.yaml")
"""For `--here`."""


def templates() -> list[str]:
    """Return the names of the templates, the default one first."""
    found = sorted(path.name for path in TEMPLATES.iterdir() if (path / "train.py").exists())
    return sorted(found, key=lambda name: name != STARTER)


def run(args: argparse.Namespace) -> int:
    """Write the files. Returns the exit code 0.

    Raises:
        UserError: no folder is named, or it has files.
        OSError: a file cannot be written.
    """
    folder: Path = args.directory or Path()
    if not args.here:
        _check_free(args.directory)
    files = _of_existing() if args.here else _of_template(args.template)
    name, key = folder.resolve().name, "experiment_name"
    if re.fullmatch(r"[A-Za-z_][\w.-]*", name) and yaml.safe_load(name) == name:  # not a folder `null` or `true`
        files[_CONFIG] = files[_CONFIG].replace(f"{key}: {args.template}\n", f"{key}: {name}\n")
    written = {path for path, text in files.items() if _write(folder / path, text)}
    if args.json:
        kept = sorted(files.keys() - written)
        json_answers.write("new", {"directory": folder, "written": sorted(written), "kept": kept})
        return 0
    print(f"{name}: wrote {', '.join(sorted(written))}")
    if kept := sorted(files.keys() - written):
        print(f"Not changed, because they exist: {', '.join(kept)}")
    print("\nNext:")
    if folder.resolve() != Path.cwd():
        print(f"  {shlex.join(['cd', str(folder)])}")
    if _SCRIPT in kept:
        print("  hydraloop            # trains with conf/, as a train.py does that calls hydraloop.main()")
    else:
        print(indent(_first_commands(args.template), "  "), end="")
    return 0


def _check_free(folder: Path | None) -> None:
    if folder is None:
        text = "hydraloop new my_project\n  To add train.py and conf/ to the working directory: hydraloop new --here"
        raise UserError("it needs the name of a folder", key="new", remedy=Remedy(text, add=["my_project"]))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        folder = folder.resolve() if folder.name in ("", "..") else folder
        free = next(other for n in count(2) if not (other := folder.with_name(f"{folder.name}_{n}")).exists())
        text = f"Name another one: {shlex.join(['hydraloop', 'new', str(free)])}"
        remedy = Remedy(text, (str(folder), str(free)))
        if folder.is_dir():
            remedy += f"\n  To add train.py and conf/: {shlex.join(['hydraloop', 'new', '--here', str(folder)])}"
        raise UserError(f"{folder} exists, and is not an empty folder", key="new", remedy=remedy)


def _of_existing() -> dict[str, str]:
    """Return the files for a folder that has a model and data."""
    return {_SCRIPT: _read(TEMPLATES / STARTER / _SCRIPT), _CONFIG: _read(_CONFIG_OF_EXISTING)}


def _of_template(name: str) -> dict[str, str]:
    root = TEMPLATES / name
    paths = {path.relative_to(root): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {own.as_posix(): _read(path) for own, path in paths.items() if not _LEFT_OUT.intersection(own.parts)}


def _first_commands(template: str) -> str:
    """Return the first commands in the README of a template."""
    return _read(TEMPLATES / template / "README.md").partition("```bash\n")[2].partition("```")[0]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _write(path: Path, text: str) -> bool:
    """Write a new file. Return False if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True
