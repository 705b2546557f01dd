"""The command line before Hydra reads it: flags, parsed overrides, and `hooks=a,b` as a list."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import OverrideParseException

import hydraloop
from hydraloop.errors import UserError, suggestion
from hydraloop.files.secrets import MASK, remember_overrides
from hydraloop.schemas.selected_hooks import HOOK_GROUPS

LIST_GROUPS = (*HOOK_GROUPS, "scheduler")
"""Groups from which any number of options is selected."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags. They are those of Hydra that are used here, and ours."""
    made = argparse.ArgumentParser(add_help=False)
    made.error = refuse  # type: ignore[method-assign]
    made.add_argument("overrides", nargs="*")
    made.add_argument("--multirun", "-m", action="store_true")
    made.add_argument("--config-path", "-cp")
    made.add_argument("--config-name", "-cn")
    made.add_argument("--config-dir", "-cd")
    made.add_argument("--cfg", "-c", choices=["job"])
    made.add_argument("--resolve", action="store_true")
    made.add_argument("--dry-run", action="store_true")
    made.add_argument("--json", action="store_true")
    made.add_argument("--pdb", action="store_true")
    made.add_argument("--help", "-h", action="store_true")
    made.add_argument("--version", action="version", version=f"hydraloop {hydraloop.__version__}")
    made.add_argument("--shell-completion", "-sc", action="store_true")
    return made


class Typed(NamedTuple):
    """The overrides of a command line."""

    parsed: list[Override]
    lines: list[str]
    """The overrides of a single run, with `hooks=a,b` written as `hooks=[a,b]`."""
    rewritten: list[str]
    """The lines that differ from what was typed."""
    keys: tuple[str, ...]
    """See `typed_keys`."""


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags and the overrides. Secrets of the overrides are remembered.

    `config_flags` are the flags that say where the config is. `unknown` are flags that do not exist; `flags` names
    those that do.

    Raises:
        SystemExit: after --version.
        UserError: a flag with a wrong value; a secret that is masked.
    """
    made = parser()
    args, unknown = made.parse_known_intermixed_args(argv)  # also takes `key=a -m key=b`
    args.unknown = unknown
    args.flags = re.findall(r"--[\w-]+", made.format_usage())
    for line in args.overrides:
        if MASK in line:  # copied from what hydraloop has printed or written
            key = line.partition("=")[0].lstrip("+")
            raise UserError("its value is a secret, which is masked", key=key, remedy=f"Write its value, not {MASK}.")
    remember_overrides(args.overrides)
    where = {name: getattr(args, name.replace("-", "_")) for name in ("config-path", "config-name", "config-dir")}
    args.config_flags = [f"--{name}={value}" for name, value in where.items() if value is not None]
    return args


def no_json() -> UserError:
    """Return the error for `--json` without `--dry-run`."""
    remedy = "Leave it out, or add --dry-run. A run writes result.json, and a sweep results.json."
    return UserError("only --dry-run, status, results and runs answer in JSON", key="--json", remedy=remedy)


def refuse(message: str) -> NoReturn:
    """Raise an error of argparse, such as `argument --cfg/-c: invalid choice: 'x'`, as the user's mistake."""
    named = re.match(r"argument (\S+): (.*)", message)
    key, problem = named.groups() if named else (None, message)
    choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", problem)
    remedy = suggestion(choice[1], re.findall(r"[\w.-]+", choice[2])) if choice else "--help lists the flags."
    raise UserError(problem, key=key, remedy=remedy)


def check_text(text: str) -> None:
    """Refuse an argument or a path with bytes that this process cannot decode: a config file cannot have them.

    Raises:
        UserError: has the text, in which each of these bytes is written as `\\udce9`.
    """
    if not any("\ud800" <= sign <= "\udfff" for sign in text):
        return
    encoding = sys.getfilesystemencoding()
    remedy = "Use a name in UTF-8." if encoding == "utf-8" else "Let Python read UTF-8: export PYTHONUTF8=1"
    raise UserError(f"{text!r} has bytes that are not {encoding} text", remedy=remedy)


def parse(overrides: Sequence[str]) -> list[Override]:
    """Return the overrides, parsed by Hydra.

    Raises:
        UserError: one is not an override, or not text; or it is `scheduler={}`, which would have no effect.
    """
    # glob(*) lists the options of a group, which takes a config loader; only an open composer has one.
    loader = GlobalHydra.instance().config_loader() if GlobalHydra.instance().is_initialized() else None
    parser = OverridesParser.create(config_loader=loader)
    parsed: list[Override] = []
    for line in overrides:
        check_text(line)
        try:
            parsed.extend(parser.parse_overrides([line]))
        except OverrideParseException as error:
            problem = f"{line!r} is not key=value"
            remedy = (
                "Write key=value without spaces, +key=value to add, ~key to delete. Quote a value with special "
                "characters twice: 'key=\"a, b\"'."
            )
            if error.__cause__ is not None:  # of a function, such as loguniform(1e-4,1e-1)
                problem = str(error.__cause__).partition("\n")[0]
                remedy = "With -m: interval(1e-4,1e-1), tag(log,interval(1e-4,1e-1)), int(interval(4,24)), choice(a,b)."
            key = re.match(r"[+~]*([\w.@/]+)", line)
            raise UserError(problem, key=key and key[1], remedy=remedy) from error
    for override in parsed:
        group = override.key_or_group
        if group in LIST_GROUPS and not override.is_delete() and override.value() == {}:
            raise UserError(
                "{} selects nothing and removes nothing: Hydra merges it",
                key=group,
                remedy=f"To select none, use {group}=[].",
            )
    return parsed


def typed(overrides: Sequence[str]) -> Typed:
    """Return what the overrides of a command line say, if they are those of a single run. Errors: as of `parse`."""
    lines, rewritten = with_hook_lists(overrides)
    return Typed(parse(overrides), lines, rewritten, typed_keys(lines))


def typed_keys(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the keys of the options that overrides set: `a.b` and `a.c` for `++a={b: 1, c: 2}`, none for `~a`.

    Args:
        overrides: as typed, and valid.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    pairs = (
        (one.key_or_group, None if one.is_sweep_override() else one.value()) for one in parsed if not one.is_delete()
    )
    return tuple(dict.fromkeys(key for group, value in pairs for key, _ in leaves(value, group)))


def leaves(node: object, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each value that `key=node` sets: of `a.b` and `a.c` for `a={b: 1, c: 2}`."""
    if not isinstance(node, dict):
        yield key, node
        return
    for name, value in node.items():
        yield from leaves(value, f"{key}.{name!s}")


def with_hook_lists(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of a single run with `hooks=a,b` as `hooks=[a,b]`, and the rewritten ones of these.

    Only plain names are rewritten: `hooks=choice(a,b)` is a sweep in Hydra, and stays one.
    """
    lines: list[str] = []
    rewritten: list[str] = []
    for override in parse(overrides):
        line = override.input_line or ""
        if override.key_or_group in HOOK_GROUPS and _is_plain_list(override):
            key, _, names = line.partition("=")
            line = f"{key}=[{names}]"
        if line != override.input_line:
            rewritten.append(line)
        lines.append(line)
    return lines, rewritten


def with_hook_options_swept(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a sweep with `hooks.ema.priority=30` as `=choice(30)` if `hooks=` itself is swept.

    Hydra also composes a config for the sweep itself, without the swept keys, so that the hook would be missing there.
    A sweep of one value is left to the jobs.
    """
    parsed = parse(overrides)
    swept = {override.key_or_group for override in parsed if override.is_sweep_override()} & set(HOOK_GROUPS)
    lines: list[str] = []
    for override in parsed:
        group, _, option = override.key_or_group.partition(".")
        line = override.input_line or ""
        plain = not (
            override.is_sweep_override() or override.is_delete() or override.is_add() or override.is_force_add()
        )
        if group in swept and option and plain:
            line = f"{override.key_or_group}=choice({override.get_value_element_as_str()})"
        lines.append(line)
    return lines


def _is_plain_list(override: Override) -> bool:
    values = override.value()
    if not isinstance(values, ChoiceSweep) or not values.simple_form:
        return False
    return all(isinstance(choice, str) for choice in values.list)
