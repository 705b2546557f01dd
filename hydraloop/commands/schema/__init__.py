"""`hydraloop schema`: write the JSON Schema of a project's config, with which editors complete and check its files.

Config files are read, and no code of the project runs. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

from hydraloop import json_answers
from hydraloop.cli.command import explained
from hydraloop.cli.compose import Composer, opened
from hydraloop.cli.own_keys import resembles_option
from hydraloop.errors import UserError, suggestion
from hydraloop.schemas.docs import json_schema

FOLDER = ".hydraloop/schema"
"""In a project: `config.json` for configs and experiments, and a file for the options of each other group."""
_CONFIG = "config"
_PLACES = {"model": "task.model"}
"""Of groups whose options have another place than their name."""
_WITHOUT_CLASS = {"not": {"required": ["_target_"]}}


def run(args: argparse.Namespace) -> int:
    """Write the files, or print one of them. Returns the exit code 0.

    Raises:
        UserError: there is no folder `conf`, a file in it cannot be read, or there is no such group.
    """
    if args.group is None:
        paths = write(args.directory)
        if args.json:
            json_answers.write("schema", {"written": paths})
        else:
            print(f"wrote {args.directory / FOLDER}/: {', '.join(path.name for path in paths)}")
        return 0
    documents = _documents(args.directory)
    if args.group not in documents:
        raise UserError("there is no such group", key="--group", remedy=suggestion(args.group, documents))
    if args.json:
        json_answers.write("schema", {"document": documents[args.group]})
    else:
        print(json.dumps(documents[args.group], indent=1))
    return 0


def write(project: Path) -> list[Path]:
    """Write the files of a project, and return their paths. Errors: as in `run`."""
    folder = project / FOLDER
    documents = _documents(project)
    folder.mkdir(parents=True, exist_ok=True)
    own = [name for name, one in documents.items() if name == _CONFIG or one is not documents[_CONFIG]]
    for name in own:
        (folder / f"{name}.json").write_text(json.dumps(documents[name]) + "\n", encoding="utf-8")
    return [folder / f"{name}.json" for name in own]


def with_modeline(path: str, text: str) -> str:
    """Return the text of a config file with the line that names its schema.

    Args:
        path: in the project, `conf/hooks/mine.yaml`. Another file is returned as it is.
    """
    parts = Path(path).parts
    if parts[0] != "conf" or not path.endswith(".yaml"):
        return text
    package, end, rest = text.partition("\n") if re.match("# *@package ", text) else ("", "", text)
    name = parts[1] if len(parts) > 2 and "_global_" not in package else _CONFIG
    return f"{package}{end}# yaml-language-server: $schema={'../' * (len(parts) - 1)}{FOLDER}/{name}.json\n{rest}"


def _documents(project: Path) -> dict[str, Any]:
    """Return the schema of a config, and those of the files of each group, by name."""
    with opened(project / "conf", _CONFIG) as composer:
        return explained(lambda _: _of_project(composer), (), composer)


def _of_project(composer: Composer) -> dict[str, Any]:
    config, groups = deepcopy(json_schema()), {group: composer.options(group) for group in composer.groups()}
    for name in composer.options(""):
        _add(config, composer.content(name), groups)
    for group, option in [(group, option) for group, options in groups.items() for option in options]:
        if composer.file(f"{group}/{option}") is not None:
            own, package = composer.option(group, option)
            _add(_place(config, package), own, groups)
    config["properties"]["defaults"] = _defaults(groups)
    return {_CONFIG: config, **{group: _of_files(group, config) for group in groups if group != _CONFIG}}


def _place(config: dict[str, Any], package: str) -> dict[str, Any]:
    """Return the schema of a section. It is added if it is missing."""
    found = config
    for part in package.split(".") if package != "_global_" else ():
        if part not in found["properties"]:
            other = found.get("additionalProperties")
            known = dict(other["properties"]) if isinstance(other, dict) else {}
            closed = {"properties": dict.fromkeys(known, True), "additionalProperties": False}
            new = {"type": ["object", "string", "null"], "properties": known, "if": _WITHOUT_CLASS, "then": closed}
            _know(found, part, new)
        found = found["properties"][part]
    return found


def _add(section: dict[str, Any], content: Iterable[object], groups: Iterable[str]) -> None:
    """Add the keys of a file to a section. At the top, a misspelt option is not added."""
    for key in map(str, content):
        is_mistake = "$schema" in section and (key in groups or resembles_option(key))
        if key not in section["properties"] and not is_mistake:
            _know(section, key, {})


def _know(section: dict[str, Any], key: str, schema: dict[str, Any]) -> None:
    section["properties"][key] = schema
    if "then" in section:
        section["then"]["properties"][key] = True


def _defaults(groups: dict[str, list[str]]) -> dict[str, Any]:
    """Return the schema of a defaults list."""
    interpolated = {"type": "string", "pattern": r"\$\{"}
    entries: dict[str, Any] = {}
    for group, options in groups.items():
        forms = [{"enum": [*options, None]}, {"type": "array", "items": {"enum": options}}, interpolated]
        entries[rf"^(optional )?(override )?/?{re.escape(group)}(@.*)?$"] = {"anyOf": forms}
    other = {"^(optional )?(override )?/?hydra/": True}
    item = {"type": ["object", "string"], "patternProperties": {**entries, **other}, "additionalProperties": False}
    return {"type": "array", "items": item}


def _of_files(group: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the files in `conf/<group>/`."""
    top, _, inner = _PLACES.get(group, group).partition(".")
    if top not in config["properties"]:  # files that may set everything, such as those of `experiment`
        return config
    section = config["properties"][top]
    section = deepcopy(section["properties"][inner] if inner else section)
    if isinstance(other := section.get("additionalProperties"), dict):  # hooks and schedules by name
        section = deepcopy(other)
    section.setdefault("properties", {})
    _know(section, "defaults", config["properties"]["defaults"])
    return {"$schema": config["$schema"], "title": f"An option of {group}", **section}
