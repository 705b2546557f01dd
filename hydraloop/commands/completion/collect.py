"""Finds what the command lines of a project can be completed with. Runs no code of the project; imports no torch."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hydraloop.cli import arguments
from hydraloop.cli.compose import Composer, opened
from hydraloop.cli.config_file_limits import leaves
from hydraloop.cli.explain import COMPOSING_ERRORS
from hydraloop.commands import parser
from hydraloop.errors import UserError
from hydraloop.run_files.atomic import write_text
from hydraloop.schemas.root import HYDRA_SETTINGS

_REFUSED = ("--experimental-rerun", "--shell-completion")
_KEPT = 100
"""Files in the cache. Each has some 10 kB."""


def collect(script: str, selecting: Sequence[str]) -> dict[str, Any]:
    """Return flags, commands, groups, keys, patterns of run directories, and the times of the files that say so.

    Args:
        script: calls `hydraloop.main`. Empty: `python -m hydraloop`, with the config of the working directory.
        selecting: arguments that change which keys there are: `hooks=ema`.
    """
    args = arguments.read(selecting)
    given = {"config_path": "conf", "config_name": "config"} | (_main_arguments(Path(script)) if script else {})
    folder = Path(script).parent / given["config_path"]
    folder = folder.parent / (args.config_path or folder.name)
    package = Path(__file__).parents[2]
    files = [package / "__init__.py", *package.glob("schemas/*.py"), *package.glob("commands/*.py")]
    known: dict[str, Any] = {
        "flags": _flags(arguments.parser().format_usage()),
        "commands": {name: _of_command(name) for name in parser.COMMANDS},
        "groups": {},
        "keys": [],
        "runs": _patterns(HYDRA_SETTINGS),
    }
    if folder.is_dir():
        with opened(folder, args.config_name or given["config_name"], args.config_dir) as composer:
            known |= _of_project(composer, args.overrides)
        files += [folder, *folder.rglob("*"), *([Path(script)] if script else [])]
    files += [folder.parent] if not folder.is_dir() else []
    return known | {"times": {str(file.resolve()): file.stat().st_mtime_ns for file in files}}


def save(known: dict[str, Any], cache: Path, key: str) -> None:
    """Keep what `collect` returned in the cache, if the cache can be written, and remove its oldest entries."""
    with suppress(OSError):
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(cache / key, json.dumps(known), flush=False)
        for old in sorted(cache.iterdir(), key=lambda file: file.stat().st_mtime_ns)[:-_KEPT]:
            old.unlink(missing_ok=True)


def _main_arguments(script: Path) -> dict[str, str]:
    """Return the arguments of `hydraloop.main` in a script that are written as texts."""
    calls = [node for node in ast.walk(ast.parse(script.read_bytes())) if isinstance(node, ast.Call)]
    found = [call for call in calls if ast.unparse(call.func) in ("hydraloop.main", "main")]
    keywords = [keyword for call in found for keyword in call.keywords]
    return {str(one.arg): str(one.value.value) for one in keywords if isinstance(one.value, ast.Constant)}


def _of_project(composer: Composer, overrides: Sequence[str]) -> dict[str, Any]:
    known: dict[str, Any] = {"groups": {group: composer.options(group) for group in composer.groups()}}
    for lines in (overrides, ()):  # a sweep over groups has no one config
        with suppress(*COMPOSING_ERRORS, UserError):
            plain: Any = OmegaConf.to_container(composer.compose(arguments.with_hook_lists(lines)[0]), resolve=False)
            hydra = plain.pop("hydra")
            keys = (
                key for top, node in plain.items() for key, _ in leaves(node, top) if "[" not in key and "._" not in key
            )
            return known | {"keys": [f"{key}=" for key in keys], "runs": _patterns(hydra)}
    return known


def _patterns(hydra: Mapping[str, Any]) -> list[str]:
    """Return where runs and sweeps are: `outputs/*/*`."""
    return [re.sub(r"\$\{[^}]*\}", "*", hydra[mode]["dir"]) for mode in ("run", "sweep")]


def _of_command(name: str) -> dict[str, Any]:
    values = {
        key: [one for one in text.split("|") if one.islower()] for key, text in parser.COMMANDS[name].keys.items()
    }
    return {"flags": _flags(parser.of(name).format_help()), "values": values}


def _flags(text: str) -> list[str]:
    return [flag for flag in re.findall(r"(?<![\w-])--[a-z-]+", text) if flag not in _REFUSED]
