"""Turn Hydra's and OmegaConf's errors into one message with the key, the problem and the fix."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches

import hydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hydraloop.cli.arguments import is_sweep
from hydraloop.cli.compose import Composer
from hydraloop.cli.composing_errors.case import Case, keys_of
from hydraloop.cli.composing_errors.meanings import OF_FILES, OF_OVERRIDES, OF_SWEEPS
from hydraloop.errors import UserError, suggestion

COMPOSING_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)


def explain(error: Exception, overrides: Sequence[Override], composer: Composer) -> UserError:
    """Return the user's mistake for an error that composing `overrides` has raised."""
    if isinstance(error, MissingConfigException):
        return _missing_option(error, composer)
    text = str(error) or str(error.__cause__ or type(error).__name__)
    override = _named(text, overrides)
    cfg, cause = _without(override, overrides, composer), str(error.__cause__ or text)
    check_defaults(cfg, composer)
    if override is None:  # without a config of the project, the keys of the default one are suggested
        known = cfg or hydra.compose("hydraloop/project")
        case, meanings = Case(text, cause, "", "", None, known, composer), OF_FILES
    else:
        case = Case(text, cause, override.key_or_group, override.input_line or "", override.value(), cfg, composer)
        meanings = (*OF_SWEEPS, *(OF_FILES if is_sweep(override) else OF_OVERRIDES))
    for pattern, meaning in meanings:
        found = re.search(pattern, f"{text}\n{cause}", re.DOTALL)
        if found is None:
            continue
        if isinstance(meaning, tuple):
            key, problem, remedy = (text.format(case=case, found=found) for text in meaning)
            return UserError(problem, key=key, remedy=remedy)
        mistake = meaning(case, found)
        if mistake is not None:
            return mistake
    raise AssertionError("the last pattern matches any text")


def check_defaults(cfg: DictConfig, composer: Composer) -> None:
    """Refuse a config without hydraloop's options: its defaults list does not name them. An empty one passes."""
    if cfg and "detach" not in cfg:
        raise UserError(
            f"the defaults list of {composer.name}.yaml does not have hydraloop's options",
            key="defaults",
            remedy="Write at the top of the file: defaults: [hydraloop/project, _self_]",
        )


def unknown_flag(flag: str, args: argparse.Namespace, composer: Composer) -> UserError:
    """Return the user's mistake for a flag that does not exist, such as `--lr` in `--lr 0.1`."""
    name, _, value = flag.lstrip("-").replace("-", "_").partition("=")
    words = [*args.unknown[1:2], *args.overrides]  # argparse has the value in one of them
    value = value or next((word for word in words if word[:1] not in "+~-" and "=" not in word), "…")
    by_end = {key.rpartition(".")[2]: key for key in reversed(keys_of(_without(None, [], composer)))}
    by_end |= {key: key for key in by_end.values()} | {group: group for group in composer.groups()}
    by_end |= {other[2:].replace("-", "_"): other for other in args.flags}
    close = get_close_matches(name, by_end, n=1, cutoff=0.7)
    remedy = "Options are written without dashes: seed=0. --help lists the flags."
    if close:
        found = by_end[close[0]]
        remedy = f"Write {found}"
    if close and found not in args.flags:
        remedy = f"Write it without dashes: {found}={value}"
    return UserError("there is no such flag", key=flag.partition("=")[0], remedy=remedy)


def _named(text: str, overrides: Sequence[Override]) -> Override | None:
    """Return the override that an error message names by its line, or else by its key."""
    for override in sorted(overrides, key=lambda override: -len(override.input_line or "")):
        if override.input_line and (override.input_line in text or f"'{override.input_line.lstrip('~')}'" in text):
            return override
        if override.is_add() and f"'override {override.key_or_group}: " in text:
            return override
    named = re.search(r"'([^']+)'", text)
    return next((override for override in overrides if named and override.key_or_group == named[1]), None)


def _without(wrong: Override | None, overrides: Sequence[Override], composer: Composer) -> DictConfig:
    rest = [override.input_line or "" for override in overrides if override is not wrong and not is_sweep(override)]
    for lines in ([] if wrong is None else rest, []):
        try:
            return composer.compose(lines)
        except COMPOSING_ERRORS:
            continue
    return OmegaConf.create()


def _missing_option(error: MissingConfigException, composer: Composer) -> UserError:
    """`hooks=emaa`: the group exists, the option does not."""
    missing = str(error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, option = missing.rpartition("/")
    if not group or not option:
        remedy = suggestion(missing, [name for name in composer.options("") if name[0] != "_"])
        return UserError(f"the config {missing!r} does not exist", key="--config-name", remedy=remedy)
    return UserError(f"there is no option {option!r}", key=group, remedy=suggestion(option, composer.options(group)))
