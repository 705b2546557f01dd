"""A config with every interpolation in it resolved. Without torch."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from hydraloop.errors import UserError


def resolved(cfg: DictConfig) -> Any:
    """The config as plain dicts, lists, numbers and strings.

    Raises:
        UserError: an interpolation does not resolve; names its key.
    """
    try:
        return OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    except InterpolationResolutionError as error:
        raise UserError(
            f"an interpolation does not resolve: {str(error).splitlines()[0]}",
            key=error.full_key or None,
            remedy="Write a value; what Hydra says of a job, ${hydra:…}, only runs of the command line have.",
        ) from error


def resolved_yaml(cfg: DictConfig) -> str:
    """The config as YAML, secrets in plain sight: for other processes of the run, not for its files.

    Raises:
        UserError: as `resolved` does.
    """
    return dumped(resolved(cfg))


def dumped(plain: Any) -> str:
    """A plain container as YAML that OmegaConf reads back unchanged; a string like `1e-3` is in quotes."""
    text: str = yaml.dump(plain, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text


class _Dumper(yaml.Dumper):
    """Writes what OmegaConf reads back unchanged."""


_Dumper.add_implicit_resolver(  # strings that OmegaConf, but not YAML, would read as numbers are in quotes
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\.?[0-9][0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
_Dumper.add_representer(tuple, _Dumper.represent_list)  # OmegaConf 2.4 returns some
_Dumper.add_multi_representer(  # Python 3.13 has another name for the class, which OmegaConf 2.3 does not read
    PurePath,
    lambda dumper, path: dumper.represent_sequence("tag:yaml.org,2002:python/object/apply:pathlib.Path", [str(path)]),
)
