"""What hydraloop reads of the command line before Hydra does: `--dry-run`, `hooks=a,b` and `scheduler={}` as lists."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser  # Hydra's flags; only `hydra.main` itself reads them otherwise
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, ValueType
from hydra.errors import OverrideParseException

from hydraloop.errors import UserError
from hydraloop.validate import HOOK_GROUPS

LIST_GROUPS = (*HOOK_GROUPS, "scheduler")
"""Groups of which any number of options is selected, and of which `{}` means none; Hydra would merge it, in vain."""
DRY_RUN = "--dry-run"


def take_dry_run(argv: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments without `--dry-run`, and whether it was among them."""
    return [argument for argument in argv if argument != DRY_RUN], DRY_RUN in argv


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Hydra's own flags and the overrides. Raises SystemExit with argparse's message, as Hydra does."""
    parsed: argparse.Namespace = get_args_parser().parse_intermixed_args(argv)  # also takes `key=a -m key=b`
    return parsed


def is_for_hydra(args: argparse.Namespace) -> bool:
    """Whether a flag asks Hydra to show something that is not a config: --hydra-help, --info, --shell-completion."""
    return bool(args.hydra_help or args.info or args.shell_completion)


def flags(argv: Sequence[str], args: argparse.Namespace, folder: Path) -> list[str]:
    """Return the arguments that are not overrides, in their order.

    Args:
        folder: with the config files. Hydra would look for a relative one next to a file of hydraloop.
    """
    overrides, found = list(args.overrides), []
    for argument in argv:
        if argument in overrides:
            overrides.remove(argument)
        else:
            found.append(argument)
    return found if args.config_path is None else [*found, "--config-path", str(folder.absolute())]


def parse(overrides: Sequence[str]) -> list[Override]:
    """The overrides, parsed by Hydra.

    Raises:
        UserError: one that is no override.
    """
    # glob(*) lists the options of a group, which takes a config loader; only an open composer has one.
    loader = GlobalHydra.instance().config_loader() if GlobalHydra.instance().is_initialized() else None
    parser = OverridesParser.create(config_loader=loader)
    parsed: list[Override] = []
    for line in overrides:
        try:
            parsed.extend(parser.parse_overrides([line]))
        except OverrideParseException as error:
            raise UserError(
                f"{line!r} is not key=value",
                remedy="Write key=value, +key=value to add, ~key to delete; a value with special characters is quoted "
                "twice: 'key=\"a, b\"'.",
            ) from error
    return parsed


def is_sweep(override: Override) -> bool:
    """Whether the override has several values."""
    return bool(override.is_sweep_override())


def with_hook_lists(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides of a single run, `hooks=a,b` rewritten to `hooks=[a,b]`, `scheduler={}` to `scheduler=[]`, and the
    rewritten lines.

    Only plain names: `hooks=choice(a,b)` is a sweep in Hydra's words and stays one.
    """
    lines: list[str] = []
    rewritten: list[str] = []
    for override in parse(overrides):
        line = override.input_line or ""
        if override.key_or_group in HOOK_GROUPS and _is_plain_list(override):
            key, _, names = line.partition("=")
            line = f"{key}=[{names}]"
            rewritten.append(line)
        elif _is_empty_group(override):
            line = f"{line.partition('=')[0]}=[]"
            rewritten.append(line)
        lines.append(line)
    return lines, rewritten


def with_hook_options_swept(overrides: Sequence[str]) -> list[str]:
    """The overrides of a sweep, `hooks.ema.priority=30` rewritten to `=choice(30)` where `hooks=` itself is swept.

    Hydra composes a config for the sweep itself too, without what is swept, and there the hook would be missing. As a
    sweep of one value the override is left to the jobs. `scheduler={}` becomes `scheduler=[]` here too.
    """
    parsed = parse(overrides)
    swept = {override.key_or_group for override in parsed if is_sweep(override)} & set(HOOK_GROUPS)
    lines: list[str] = []
    for override in parsed:
        group, _, option = override.key_or_group.partition(".")
        line = override.input_line or ""
        plain = not (is_sweep(override) or override.is_delete() or override.is_add() or override.is_force_add())
        if group in swept and option and plain:
            line = f"{override.key_or_group}=choice({override.get_value_element_as_str()})"
        elif _is_empty_group(override):
            line = f"{line.partition('=')[0]}=[]"
        lines.append(line)
    return lines


def _is_empty_group(override: Override) -> bool:
    return override.key_or_group in LIST_GROUPS and not is_sweep(override) and override.value() == {}


def _is_plain_list(override: Override) -> bool:
    if override.value_type is not ValueType.SIMPLE_CHOICE_SWEEP or not isinstance(override._value, ChoiceSweep):
        return False
    return all(isinstance(choice, str) for choice in override._value.list)


def refuse_null_groups(overrides: Sequence[Override]) -> None:
    """`hooks=null` would leave nothing that a hook could be added to.

    Raises:
        UserError: with the form that means "no hooks".
    """
    for override in overrides:
        if override.key_or_group not in HOOK_GROUPS or override.is_delete() or is_sweep(override):
            continue
        value = override.value()
        if value in (None, ""):
            raise UserError(
                f"{'null' if value is None else 'nothing'} is no list of hooks",
                key=override.key_or_group,
                remedy=f"For none: {override.key_or_group}=[]",
            )
