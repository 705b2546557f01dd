"""What differs between a run and its checkpoint: config, code, packages. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hydraloop.errors import printable
from hydraloop.files.config_yaml import plain

ABSENT = "(absent)"
"""The value of a key that a config does not have."""
_LONGEST = 80
"""Characters of a value that are shown."""
_OF_A_START = ("resume", "resume_strict", "load_from", "sweep", "detach")
_ENDS_OF_A_START = ("engine.max_time", "engine.pause_after")
"""Options that are about one start of a run, not about its training."""
_OF_THIS_START = ("fused", "foreach", "capturable", "differentiable", "every", "closure")
"""Options of an optimizer that are not stored in checkpoints."""
_GROUPING = ("groups", "layer_decay")


class Change(NamedTuple):
    """A key with two different values, or a node that only one of the configs has."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


def differences(old: Any, new: Any, prefix: str = "") -> Iterator[Change]:
    """Yield the differences of two plain containers, in the order of `old`, then what only `new` has."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        if old != new or isinstance(old, bool) != isinstance(new, bool):
            yield Change(prefix, old, new)
        return
    for name in dict.fromkeys([*old, *new]):
        yield from differences(old.get(name, ABSENT), new.get(name, ABSENT), f"{prefix}.{name}" if prefix else name)


def resumed(old: Mapping[str, Any], new: Mapping[str, Any], typed: Collection[str] = ()) -> list[str]:
    """Return a line for each change since a checkpoint was written. For a change without effect, the line says why.

    Args:
        old: `meta` of the checkpoint. That of an engine without a config has no `config`.
        new: the same entries of this run: `config`, `versions`, `git`.
        typed: options of optimizers that were typed for this run, such as `lr`.
    """
    lines = []
    if "config" in old and "config" in new:
        changes = differences(config_of(old), config_of(new))
        lines += [f"{change}{_without_effect(change.key, typed)}" for change in changes if _is_reported(change.key)]
    if old.get("git") and new.get("git"):
        lines += _code(old["git"], new["git"])
    if old.get("versions") and new.get("versions"):
        lines += map(str, differences(old["versions"], new["versions"]))
    return list(map(printable, lines))  # the checkpoint may come from anywhere


def _code(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line if the commits or the uncommitted changes differ, by the entries `git`."""
    before, after = str(old["commit"])[:10], str(new["commit"])[:10]
    if before != after:
        return [f"code: commit {before} -> {after}; see `git diff {before} {after}`"]
    names = [
        f"uncommitted changes {git['patch']}" if git.get("patch") else "no uncommitted changes" for git in (old, new)
    ]
    return [f"code: {names[0]} -> {names[1]}, since commit {before}"] if names[0] != names[1] else []


def config_of(meta: Mapping[str, Any]) -> Any:
    """Return the config in a checkpoint's `meta` as a plain container; empty if it cannot be read."""
    try:
        return plain(OmegaConf.create(str(meta.get("config", ""))))
    except (OmegaConfBaseException, YAMLError, ValueError):
        return {}


def _is_reported(key: str) -> bool:
    return key.partition(".")[0] not in _OF_A_START and key not in _ENDS_OF_A_START


def _without_effect(key: str, typed: Collection[str]) -> str:
    """Return why a change has no effect on a resumed run, after a semicolon; empty if it has one."""
    if key.startswith("init."):
        return "; no effect: the run continues with the weights of the checkpoint"
    if key == "seed":
        return (
            "; affects only the order and the draws of later samples: other random numbers continue from the checkpoint"
        )
    name = key.rpartition(".")[2]
    if key.startswith("optimizer.") and name in _GROUPING:
        return "; no effect: the run continues with the parameter groups of the checkpoint"
    if key.startswith("optimizer.") and name not in _OF_THIS_START and key.removeprefix("optimizer.") not in typed:
        return "; takes effect only if it is typed on the command line"
    return ""


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
