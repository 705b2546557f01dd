"""Check a command line: compose and validate the config of the run, or of each job, before anything is written."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hydra.core.override_parser.types import Override
from omegaconf import MISSING, DictConfig

from hydraloop.cli import arguments, config_file_limits, hydra_targets
from hydraloop.cli.compose import Composer, jobs, swept
from hydraloop.cli.explain import COMPOSING_ERRORS, explain
from hydraloop.errors import UserError
from hydraloop.run.config_yaml import remember_names
from hydraloop.safety.typed_options import keys_of
from hydraloop.schemas.root import Config
from hydraloop.validate import validate

_REQUIRED = [entry.name for entry in dataclasses.fields(Config) if entry.default == MISSING]
"""Config groups that every run needs."""


@dataclass(frozen=True)
class Command:
    """A command line that has passed all checks."""

    overrides: list[str]
    """As Hydra takes them: `hooks=a,b` is a list, or a sweep."""
    cfg: DictConfig
    """Composed and validated, with the node `hydra`. In a sweep: the config of the first job."""
    is_sweep: bool = False
    axes: list[str] = field(default_factory=list)
    """The keys that are swept."""

    @property
    def typed(self) -> list[str]:
        """The keys that the command line sets, without the axes of a sweep that a config file sets."""
        return keys_of(self.overrides)


def check_command(
    args: argparse.Namespace,
    composer: Composer,
    *,
    trains: bool = True,
    check_job: Callable[[DictConfig], None] = lambda cfg: None,
) -> Command:
    """Compose and check the config of the run, or of each job of the sweep.

    Args:
        args: Hydra's flags and the overrides.
        trains: whether training data is needed.
        check_job: called with each config that has passed all other checks.

    Raises:
        UserError: a mistake in the overrides or in the config files.
    """
    typed = list(args.overrides)
    _check_groups(arguments.parse(typed), composer)
    lines, rewritten = arguments.with_hook_lists(typed)
    if not args.multirun and not _mode_is_multirun(lines, composer):
        if rewritten:
            print(f"read as a list: {' '.join(rewritten)}", file=sys.stderr)
        cfg = compose_job(lines, composer, trains=trains)
        check_job(cfg)
        return Command(lines, cfg)
    lines = arguments.with_hook_options_swept(typed)
    return _check_sweep(lines, composer, trains=trains, check_job=check_job)


def compose_job(
    lines: Sequence[str], composer: Composer, typed: Sequence[str] | None = None, *, trains: bool = False
) -> DictConfig:
    """Return the config of one job, with the node `hydra`, composed and checked.

    Args:
        typed: the lines that the user typed. A job of a sweep also has lines of a config file. None: all.
        trains: as of `validate`.

    Raises:
        UserError: a mistake in the overrides, the config files, or the order of hooks.
    """
    _check_groups(arguments.parse(lines), composer)
    cfg = _explained(composer.compose, lines, composer)
    remember_names(cfg)
    check_hydra_node(cfg, lines if typed is None else typed)
    validate(cfg, trains=trains)
    return cfg


def compose_sweep(lines: Sequence[str], composer: Composer) -> DictConfig:
    """Return the config that Hydra composes for the sweep itself, with checked callbacks, sweeper and launcher."""
    cfg = _explained(composer.compose_sweep, lines, composer)
    check_hydra_node(cfg, lines)
    return cfg


def _check_sweep(
    lines: list[str], composer: Composer, *, trains: bool, check_job: Callable[[DictConfig], None]
) -> Command:
    overrides = swept(compose_sweep(lines, composer), arguments.parse(lines))
    axes = [override.key_or_group for override in overrides if arguments.is_sweep(override)]
    first: DictConfig | None = None
    for job in jobs(overrides):
        try:
            cfg = compose_job(job, composer, typed=lines, trains=trains)
            check_job(cfg)
        except UserError as error:
            problem = f"{error.problem}, in the job {' '.join(job)}"
            raise UserError(problem, key=error.key, remedy=error.remedy) from error
        if cfg.resume is not None:
            raise UserError(
                "the jobs of a sweep would continue in one directory",
                key="resume",
                remedy="Leave resume out. To start from weights, use load_from=<checkpoint>.",
            )
        first = first or cfg
    assert first is not None, "a product of axes with values has an element"
    return Command(lines, first, is_sweep=True, axes=axes)


def _check_groups(overrides: Sequence[Override], composer: Composer) -> None:
    """Refuse values that are not options of a config group. Hydra would raise a Python error."""
    for override in overrides:
        group = override.key_or_group
        if arguments.is_sweep(override) or not composer.is_group(group):
            continue
        if not group:
            raise UserError(f"{override.input_line!r} has no key", remedy="Write key=value, or ~key to delete.")
        value = override.value()
        names = value if isinstance(value, list) else [value]
        if isinstance(value, dict) or all(isinstance(name, str) and name for name in names):
            continue
        if override.is_delete() and value is None:
            continue
        remedy = f"Options: {', '.join(composer.options(group))}."
        if group not in _REQUIRED:
            none = f"{group}=[]" if group in arguments.LIST_GROUPS else f"~{group}"
            remedy = f"To select none, use {none}. {remedy}"
        shown = "null" if value is None else "an empty value" if value == "" else repr(value)
        raise UserError(f"{shown} is not an option", key=group, remedy=remedy)


def check_hydra_node(cfg: DictConfig, lines: Sequence[str]) -> None:
    """Refuse what Hydra would call or write for a config, unless it is allowed or `lines` has typed it."""
    keys = keys_of(lines)
    hydra_targets.check_hydra(cfg, keys)
    config_file_limits.check_limits(cfg, keys)


def _explained(compose: Callable[[Sequence[str]], DictConfig], lines: Sequence[str], composer: Composer) -> DictConfig:
    try:
        return compose(lines)
    except COMPOSING_ERRORS as error:
        raise explain(error, arguments.parse(lines), composer) from error


def _mode_is_multirun(lines: Sequence[str], composer: Composer) -> bool:
    """Return whether `hydra.mode` is MULTIRUN, on the command line or in a config file."""
    plain = [override.input_line or "" for override in arguments.parse(lines) if not arguments.is_sweep(override)]
    for attempt in (plain, [line for line in plain if line.startswith("hydra")]):
        try:
            mode = composer.compose(attempt).hydra.mode
        except COMPOSING_ERRORS:
            continue
        return mode is not None and mode.name == "MULTIRUN"
    return False
