"""Configs as plain values and as YAML, with secrets masked in files. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from hydraloop.errors import UserError
from hydraloop.files.atomic import read_bytes
from hydraloop.files.secrets import masked, remember

try:
    from yaml import CDumper as Dumper  # four times faster
    from yaml import CSafeLoader as Loader
except ImportError:  # PyYAML was built without libyaml
    from yaml import Dumper  # type: ignore[assignment]
    from yaml import SafeLoader as Loader  # type: ignore[assignment]

_MOST_BYTES, _DEEPEST = 1_000_000, 100
"""Size and depth of a config that is read, at most. The config of a large run has 30,000 bytes and 10 levels."""


def loaded(source: Path | str, name: object) -> DictConfig:
    """Return the config in a file or a text of YAML.

    Args:
        name: of the file or the text, for the error.

    Raises:
        UserError: it is no YAML of a run: another kind of file, too long, too deep, with aliases or tags of objects,
            or not a mapping. Paths are allowed.
    """
    try:
        text = read_bytes(source, _MOST_BYTES).decode("utf-8") if isinstance(source, Path) else source
        _check_yaml(text)
        config = OmegaConf.create(text)
        if not isinstance(config, DictConfig):
            raise ValueError("it is not a mapping")
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = f"{name} cannot be read: {' '.join(str(error).split())}"
        raise UserError(problem, remedy="Restore the file, or name another run.") from error
    return config


def parsed_yaml(text: str) -> Any:
    """Return a text of YAML as Python objects.

    Raises:
        ValueError: it has an alias, or is nested too deeply.
        yaml.YAMLError: it is not YAML.
    """
    _check_yaml(text)
    return yaml.load(text, Loader)


def _check_yaml(text: str) -> None:
    """Refuse what makes a short text a large or a deep config. No run writes it."""
    depth = 0
    for event in yaml.parse(text, Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError(f"it is deeper than {_DEEPEST} levels")


def plain(value: Any) -> Any:
    """Return a value for JSON: configs resolved, tensors and tuples as lists, NaN and infinity as strings."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def resolved(cfg: DictConfig) -> Any:
    """Return a config as plain dicts, lists, numbers and strings, with every interpolation resolved.

    Raises:
        UserError: an interpolation does not resolve; names its key.
    """
    try:
        return OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    except InterpolationResolutionError as error:
        raise UserError(
            f"an interpolation does not resolve: {str(error).splitlines()[0]}",
            key=error.full_key or None,
            remedy="Write a value. Interpolations of the job, ${hydra:…}, resolve only in runs of the command line.",
        ) from error


def masked_yaml(cfg: DictConfig, *, resolve: bool) -> str:
    """Return a config as YAML, with secrets masked.

    Args:
        resolve: write values instead of interpolations.

    Raises:
        UserError: an interpolation does not resolve.
    """
    return dumped(masked(resolved(cfg) if resolve else OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)))


def remember_config(cfg: DictConfig) -> None:
    """Register the secrets of a config, so that they are masked everywhere. The config need not resolve."""
    try:
        remember(OmegaConf.to_container(cfg, resolve=True))
    except OmegaConfBaseException:  # reported where the value is used
        remember(OmegaConf.to_container(cfg, resolve=False))


def dumped(container: Any) -> str:
    """Return a plain container as YAML that OmegaConf reads back unchanged. A string like `1e-3` is quoted."""
    text: str = yaml.dump(container, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text


class _Dumper(Dumper):
    pass


_Dumper.add_implicit_resolver(  # OmegaConf, but not YAML, would read these strings as numbers
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\.?[0-9][0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
_Dumper.add_representer(tuple, _Dumper.represent_list)  # OmegaConf 2.4 returns some
_Dumper.add_multi_representer(  # Python 3.13 has another name for the class, which OmegaConf 2.3 does not read
    PurePath,
    lambda dumper, path: dumper.represent_sequence("tag:yaml.org,2002:python/object/apply:pathlib.Path", [str(path)]),
)


def flattened(node: Any, prefix: str = "") -> dict[str, str | int | float | bool | None]:
    """Flatten a config to dotted names: `{"a": {"b": [1]}}` becomes `{"a.b.0": 1}`; empty containers, `{}` and `[]`.

    NaN and infinity become text, because JSON does not have them.
    """
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else None
    if items is None:
        value = plain(node)
        return {prefix: value if value is None or isinstance(value, str | int | float | bool) else str(value)}
    found: dict[str, str | int | float | bool | None] = {}
    for name, item in items:
        found |= flattened(item, f"{prefix}.{name}" if prefix else str(name))
    return found or {prefix: "{}" if isinstance(node, Mapping) else "[]"}
