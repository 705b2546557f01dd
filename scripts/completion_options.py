"""The text of `hydraloop/commands/completion/options.json`: what the Tab key completes without a project.

`scripts/hook_docs.py` writes it. Does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import hydraloop  # noqa: F401  # stores the options
from hydraloop.cli.arguments import parser as parser_of_runs
from hydraloop.commands.parser import COMMANDS
from hydraloop.commands.parser import of as parser_of
from hydraloop.schemas.root import HYDRA_SETTINGS


def text() -> str:
    """Return the JSON: flags, commands and options of hydraloop.

    An option is [its package, its content]. Its values are null, because only keys are completed.
    """
    found = {
        "flags": _flags(parser_of_runs().format_usage()),
        "commands": {name: _command(name) for name in COMMANDS},
        "runs": [re.sub(r"\$\{[^}]*\}", "*", HYDRA_SETTINGS[mode]["dir"]) for mode in ("run", "sweep")],
        "options": dict(_stored_options(ConfigStore.instance().repo, "")),
    }
    return json.dumps(found, indent=1) + "\n"


def _command(name: str) -> dict[str, Any]:
    values = {key: [one for one in text.split("|") if one.islower()] for key, text in COMMANDS[name].keys.items()}
    return {"flags": _flags(parser_of(name).format_help()), "values": values}


def _flags(text: str) -> list[str]:
    refused = ("--experimental-rerun", "--shell-completion")
    return [flag for flag in re.findall(r"(?<![\w-])--[a-z-]+", text) if flag not in refused]


def _stored_options(entries: dict[str, Any], folder: str) -> Iterator[tuple[str, Any]]:
    for name, entry in sorted(entries.items()):
        if name in ("hydra", "_dummy_empty_config_.yaml"):  # Hydra's own
            continue
        if isinstance(entry, dict):
            yield from _stored_options(entry, f"{folder}{name}/")
        else:
            plain = OmegaConf.to_container(deepcopy(entry.node), resolve=False)
            is_file = isinstance(plain, dict) and "defaults" in plain
            yield (
                folder + name.removesuffix(".yaml"),
                (f"_global_.{entry.package}" if entry.package else None, plain if is_file else _keys(plain)),
            )


def _keys(node: Any) -> Any:
    if not isinstance(node, dict):
        return None
    return {name: _keys(value) for name, value in node.items() if not name.startswith("_")}
