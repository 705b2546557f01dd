"""A config as text, every interpolation in it resolved. Without torch."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from hydraloop.errors import UserError


def resolved_yaml(cfg: DictConfig) -> str:
    """The config as YAML.

    Raises:
        UserError: an interpolation does not resolve; names its key.
    """
    try:
        return OmegaConf.to_yaml(cfg, resolve=True)
    except InterpolationResolutionError as error:
        raise UserError(
            f"an interpolation does not resolve: {str(error).splitlines()[0]}",
            key=error.full_key or None,
            remedy="Write a value; what Hydra says of a job, ${hydra:…}, only runs of the command line have.",
        ) from error
