"""One job's config, composed with every mistake explained."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from hydraloop.cli import arguments, checks, hydra_targets, limits
from hydraloop.cli import explain as mistakes
from hydraloop.cli.compose import Composer
from hydraloop.safety.typed_options import keys_of
from hydraloop.validate import validate


def compose(
    lines: Sequence[str], composer: Composer, typed: Sequence[str] | None = None, *, trains: bool = False
) -> DictConfig:
    """The config of the overrides, with the node `hydra`.

    Args:
        typed: those of the lines that the user typed; a job of a sweep also has some of a config file. None: all.
        trains: as of `validate`.

    Raises:
        UserError: anything wrong with the overrides, the config files, or the order of hooks.
    """
    parsed = arguments.parse(lines)
    arguments.refuse_null_groups(parsed)
    checks.check_groups(parsed, composer)
    checks.check_overrides(parsed)
    cfg = composed(lines, composer)
    keys = keys_of(lines if typed is None else typed)
    hydra_targets.check_hydra(cfg, keys)
    limits.check_limits(cfg, keys)
    validate(cfg, trains=trains)
    return cfg


def composed(lines: Sequence[str], composer: Composer) -> DictConfig:
    """The config of the overrides, unchecked.

    Raises:
        UserError: Hydra cannot compose it.
    """
    try:
        return composer.compose(lines)
    except mistakes.COMPOSING_ERRORS as error:
        raise mistakes.explain(error, arguments.parse(lines), composer) from error


def compose_sweep(lines: Sequence[str], composer: Composer) -> DictConfig:
    """What Hydra composes for the sweep itself, whose callbacks, sweeper and launcher it makes; checked.

    Raises:
        UserError: Hydra cannot compose it, or one of them is not allowed.
    """
    try:
        cfg = composer.compose_sweep(lines)
    except mistakes.COMPOSING_ERRORS as error:
        raise mistakes.explain(error, arguments.parse(lines), composer) from error
    keys = keys_of(lines)
    hydra_targets.check_hydra(cfg, keys)
    limits.check_limits(cfg, keys)
    return cfg
