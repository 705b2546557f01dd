"""From the config to the options of the engine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.engine.run import Settings
from hydraloop.files.config_yaml import masked_metadata
from hydraloop.launch.parts import Parts
from hydraloop.optim.optimizers import optimizer_overrides
from hydraloop.schemas.optimizer import nodes


def settings_from_config(
    cfg: DictConfig, resume: Path | None, parts: Parts, typed: Iterable[str], *, channels_last: bool
) -> Settings:
    """Return the options of the engine, with those of other groups that the engine needs.

    Args:
        cfg: validated.
        resume: the checkpoint where the run continues.
        parts: finished objects, used instead of those that the config describes.
        typed: keys that were typed. Their values replace those of the checkpoint.
        channels_last: whether images are stored channels last on the device.
    """
    engine: Any = OmegaConf.to_container(cfg.engine, resolve=True)
    return Settings(
        **{**engine, "channels_last": channels_last},
        resume=resume,
        resume_strict=cfg.resume_strict,
        optimizer_overrides=optimizer_overrides(cfg, typed) if resume is not None else frozenset(),
        every={name: node.get("every", 1) for name, node in nodes(cfg.optimizer).items()},
        closures={name: node.get("closure") for name, node in nodes(cfg.optimizer).items()},
        load_from=None if cfg.load_from is None else Path(cfg.load_from),
        weights=cfg.weights,
        metadata={**masked_metadata(cfg), **parts.meta},
    )
