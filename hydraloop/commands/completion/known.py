"""Finds what the command lines of a project can be completed with. `answer.py` runs this file by its path.

Importing Hydra and composing takes almost a second. So this file reads the project's config files itself, and composes
the keys only. hydraloop's own options, flags and commands are in `options.json`, which `scripts/hook_docs.py` writes.
"""

import ast
import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

_PLACES = {"-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir"}


def known(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return flags, commands, config groups with their options, keys, and patterns of run directories.

    Args:
        script: calls `hydraloop.main`. Empty: `python -m hydraloop`, with the config of the working directory.
        arguments: those before the cursor.
    """
    found: dict[str, Any] = json.loads(Path(__file__).with_name("options.json").read_bytes())
    found |= {"groups": {}, "keys": []}
    given = {"config_path": "conf", "config_name": "config"} | (_main_arguments(Path(script)) if script else {})
    words = [word for one in arguments for word in (one.split("=", 1) if one.startswith("--config") else [one])]
    typed = {_PLACES.get(flag, flag): value for flag, value in pairwise(words)}
    configs = Path(script).parent / given["config_path"]
    folder = configs.parent / typed.get("--config-path", configs.name)
    if folder.is_dir():
        extra = [Path(typed["--config-dir"])] if "--config-dir" in typed else []
        project = _Project([folder, *extra], found["options"])
        found["groups"] = project.groups()
        with suppress(Exception):  # a file has a mistake, which the command itself reports
            config = project.composed(typed.get("--config-name", given["config_name"]), arguments)
            found["keys"] = [f"{key}=" for key in _leaves(config) if not key.startswith("hydra.")]
            found["runs"] = [re.sub(r"\$\{[^}]*\}", "*", config["hydra"][mode]["dir"]) for mode in ("run", "sweep")]
    return found


def _main_arguments(script: Path) -> dict[str, str]:
    """Return the arguments of `hydraloop.main` in a script that are written as texts."""
    calls = [node for node in ast.walk(ast.parse(script.read_bytes())) if isinstance(node, ast.Call)]
    found = [call for call in calls if ast.unparse(call.func) in ("hydraloop.main", "main")]
    keywords = [keyword for call in found for keyword in call.keywords]
    return {str(one.arg): str(one.value.value) for one in keywords if isinstance(one.value, ast.Constant)}


def _leaves(node: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the keys of the values in nested mappings, without `_target_` and the like."""
    for name, value in node.items():
        if isinstance(value, dict):
            yield from (f"{name}.{key}" for key in _leaves(value))
        elif not str(name).startswith("_"):
            yield str(name)


def _merge(into: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    for name, value in content.items():
        if isinstance(value, dict):
            into[name] = below = into[name] if isinstance(into.get(name), dict) else {}
            _merge(below, value)
        else:
            into[name] = value


class _Project:
    """The config files of a project, and hydraloop's own options.

    Args:
        folders: with config files. A file in the first folder replaces one in the next.
        built_in: {path, such as `optimizer/adam`: [its package or None, its content]}.
    """

    def __init__(self, folders: Sequence[Path], built_in: Mapping[str, tuple[str | None, dict[Any, Any]]]) -> None:
        self._folders, self._built_in = folders, built_in
        self._chosen: dict[str, Any] = {}
        """{group, such as `/optimizer` or `/optimizer@first`: the options that an override selects}"""

    def groups(self) -> dict[str, list[str]]:
        """Return the names of the options of each group."""
        files = [file.relative_to(folder) for folder in self._folders for file in folder.glob("*/*.yaml")]
        groups: dict[str, list[str]] = {}
        for path in sorted({*self._built_in, *(str(file.with_suffix("")) for file in files)}):
            group, slash, name = path.partition("/")
            if slash and group not in ("hydra", "hydraloop"):
                groups.setdefault(group, []).append(name)
        return groups

    def composed(self, name: str, arguments: Sequence[str]) -> dict[Any, Any]:
        """Return the primary config `name` with the overrides in `arguments`, which select options or add keys.

        A sweep over a group has the keys of all its options. Values are as in the files; those of hydraloop's own
        options are null.
        """
        groups = self.groups()
        defaults: list[Any] = [name]
        added = []
        for argument in arguments:
            key, _, value = argument.partition("=")
            group, options = f"/{key.lstrip('+~')}", re.findall(r"[^\[\],]+", value)
            if "{" in value:  # a mapping selects nothing
                continue
            if group[1:].partition("@")[0] not in groups:
                added += [(key.lstrip("+"), None)] if key.startswith("+") else []
            elif key.startswith("+"):
                defaults.append({group: options})
            else:
                self._chosen[group] = options
        config: dict[Any, Any] = {}
        for place, content in [*reversed(self._parts("/", {"defaults": defaults}, "")), *added]:
            for part in reversed(place.split(".") if place else []):
                content = {part: content}
            _merge(config, content)
        return config

    def _parts(self, base: str, content: dict[Any, Any], package: str) -> list[tuple[str, dict[Any, Any]]]:
        """Return (package, content) of a config and of the configs that its defaults list names; the last comes first.

        Args:
            base: the folder of the config, to which the groups in its defaults list are relative.
        """
        content = dict(content)
        defaults = content.pop("defaults", [])
        parts: list[tuple[str, dict[Any, Any]]] = []
        for entry in reversed(defaults if "_self_" in defaults else [*defaults, "_self_"]):
            if entry == "_self_":
                parts.append((package, content))
                continue
            ((key, options),) = entry.items() if isinstance(entry, dict) else [("", entry)]
            group, at, own = key.rpartition(" ")[2].partition("@")
            chosen = posixpath.join(base, group) + at + own
            if key.startswith("override "):
                self._chosen.setdefault(chosen, options)
                continue
            options = self._chosen.get(chosen, options)
            for option in reversed(options if isinstance(options, list) else [options]):
                written = posixpath.join(group, str(option))
                path = posixpath.join(base, written)
                header, below = self._read(path[1:])
                group_package = posixpath.dirname(written).strip("/").replace("/", ".")
                place = f"{package}.{own or header or group_package}".rpartition("_global_")[2].strip(".")
                parts += self._parts(posixpath.dirname(path), below, place)
        return parts

    def _read(self, path: str) -> tuple[str | None, dict[Any, Any]]:
        """Return the package that an option names, which does not depend on other packages, and its content."""
        for folder in self._folders:
            if (file := folder / f"{path}.yaml").is_file():
                text = file.read_text(encoding="utf-8-sig")
                header = re.search(r"^# *@package +(\S+)", text, re.MULTILINE)
                return header and f"_global_.{header[1]}", yaml.safe_load(text) or {}
        return self._built_in.get(path, (None, {}))
