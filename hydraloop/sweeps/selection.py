"""Which jobs a sweep has: the product of its axes, zipped axes, and a file with a job in each line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Override

from hydraloop.cli import arguments
from hydraloop.errors import Remedy, UserError, leave_out, missing_path, suggestion
from hydraloop.sweeps.axes import Axes, Axis
from hydraloop.sweeps.search.space import Space, is_number, space_of

_LIST = "Let a search choose: sweep.trials=50. Or list its values: a,b,c or range(1,10,3)."


def select(typed: Sequence[Override], in_files: Sequence[Override], options: Mapping[str, Any]) -> Axes | Space:
    """Return the axes of a sweep; with `sweep.trials`, the space of a search.

    Args:
        typed: all overrides, with those of the sweep itself, which its jobs do not get.
        in_files: those in `hydra.sweeper.params`. Typed ones have precedence.
        options: `sweep.*`.

    Raises:
        UserError: there are no such jobs.
    """
    for override in typed:
        if is_of_sweep(override) and arguments.is_sweep(override):
            key = override.key_or_group
            first = [f"{key}={next(override.sweep_string_iterator())}"] if override.is_discrete_sweep() else []
            remedy = Remedy(f"Give it one value, without a comma: {key}=…", add=first)
            raise UserError("it holds for the whole sweep", key=key, remedy=remedy)
    lines = [override for override in typed if not is_of_sweep(override)]
    for given in (lines, in_files):
        _check_given_once(given)
    lines = [*_allowed(in_files, "hydra.sweeper.params"), *lines]
    if options.get("trials") is not None:
        return _search(lines, options)
    axes = _zipped(axes_of(lines), options.get("zip") or ())
    if options.get("jobs") is not None:
        axes.insert(0, _read_jobs(str(options["jobs"]), axes))
    return Axes(tuple(axes))


def _search(overrides: Sequence[Override], options: Mapping[str, Any]) -> Space:
    """Return the space of a search."""
    for name in ("zip", "jobs"):
        if options.get(name):
            problem = "a search chooses the values of each key by itself"
            raise UserError(problem, key=f"sweep.{name}", remedy=leave_out(f"sweep.{name}", "sweep.trials"))
    last = {_key(override): override for override in overrides}
    listed = axes_of([override for override in last.values() if not is_number(override)])
    numbers = {key: override for key, override in last.items() if is_number(override)}
    space = space_of(list(last), numbers, listed, str(options["average"]))
    if not space.searched:
        problem = "no key has several values to choose from"
        one = "optimizer.lr=tag(log,interval(1e-4,1e-1))"
        remedy = Remedy(f"Add one: '{one}'", add=[one])
        raise UserError(problem, key="sweep.trials", remedy=remedy)
    return space


def _check_given_once(overrides: Sequence[Override]) -> None:
    """Refuse a key that is swept and given again: the last override would replace the axis, and jobs would be missing.

    Args:
        overrides: of one command line, or of one config.
    """
    given: dict[str, Override] = {}
    for override in overrides:
        value: Any = override.value()
        values = value.list if isinstance(value, ChoiceSweep) else [value]
        keys = (key for one in values for key in arguments.leaves(_key(override).lstrip("~"), one))
        for key in dict.fromkeys(keys):
            first = given.setdefault(key, override)
            if first is not override and (arguments.is_sweep(first) or arguments.is_sweep(override)):
                lines = [str(one.input_line) for one in (first, override)]
                raise UserError(f"it is given twice: {' and '.join(lines)}", key=key, remedy=_merged(key, lines))


def _merged(key: str, lines: Sequence[str]) -> str:
    """Return how to write two overrides of a key as one."""
    values = [line.removeprefix(f"{key}=") for line in lines]
    if any(value == line or "(" in value for value, line in zip(values, lines, strict=True)):
        return "Leave one of them out."
    merged = shlex.quote(f"{key}={','.join(values)}")
    return f"Leave one of them out, or list all values in one: {merged}"


def is_of_sweep(override: Override) -> bool:
    """Return whether an override is about the sweep, not about its jobs."""
    return override.is_hydra_override() or override.key_or_group.partition(".")[0] in ("sweep", "detach")


def axes_of(overrides: Sequence[Override]) -> list[Axis]:
    """Return an axis for each key, in the order of Hydra's basic sweeper.

    Raises:
        UserError: a sweep that cannot be enumerated (`interval(0,1)`), or that has no values.
    """
    axes: dict[str, Axis] = {}
    for override in overrides:
        key, line = override.get_key_element(), override.input_line or ""
        lines = [line]
        if not arguments.is_sweep(override):
            if isinstance(override.value(), bool | int | float):
                lines = [f"{key}={override.get_value_element_as_str()}"]  # like the values of a sweep: 1e-3 is 0.001
        else:
            if not override.is_discrete_sweep():
                raise UserError(
                    f"{line} has no end", key=override.key_or_group, remedy=Remedy(_LIST, add=["sweep.trials=50"])
                )
            lines = [f"{key}={value}" for value in override.sweep_string_iterator()]
        if not lines:
            raise UserError(
                f"{line} has no values",
                key=override.key_or_group,
                remedy="glob(…) lists the options of a group, as in experiment=glob(*). For a key, list its "
                "values: a,b,c",
            )
        axes[_key(override)] = Axis((_key(override),), tuple((line,) for line in lines))
    return list(axes.values())


def _key(override: Override) -> str:
    key: str = override.get_key_element().lstrip("+")
    return key


def _allowed(overrides: Sequence[Override], where: str) -> Sequence[Override]:
    """Refuse overrides of the sweep itself where they would have no effect."""
    for override in overrides:
        if is_of_sweep(override):
            problem = f"{where} has {override.input_line}, which is not an option of a job"
            raise UserError(problem, key=override.key_or_group, remedy="Set it in config.yaml, or on the command line.")
    return overrides


def _zipped(axes: list[Axis], groups: Sequence[Any]) -> list[Axis]:
    """Return the axes with those of each group as one, in the place of the first of them."""
    for group in groups:
        if isinstance(group, str) or not isinstance(group, Sequence):
            works = f"sweep.zip=[[{','.join(map(str, groups))}]]"
            remedy = Remedy(f"Use '{works}'.", add=[works])
            raise UserError(f"{group} is not a list of keys", key="sweep.zip", remedy=remedy)
        found = {key: next((axis for axis in axes if axis.keys == (key,)), None) for key in map(str, group)}
        for key, axis in found.items():
            if axis is None or len(axis.values) < 2:
                swept = [axis.keys[0] for axis in axes if len(axis.values) > 1 and len(axis.keys) == 1]
                raise UserError(
                    f"{key} is not swept, or is zipped already", key="sweep.zip", remedy=suggestion(key, swept)
                )
        zipped = [axis for axis in axes if axis in found.values()]
        lengths = [len(axis.values) for axis in zipped]
        if len(set(lengths)) > 1:
            counts = ", ".join(f"{axis.keys[0]} has {length}" for axis, length in zip(zipped, lengths, strict=True))
            raise UserError(
                f"zipped axes need equally many values: {counts}",
                key="sweep.zip",
                remedy="List one value for each job.",
            )
        if zipped:
            keys = tuple(axis.keys[0] for axis in zipped)
            one = Axis(
                keys, tuple(tuple(line for (line,) in lines) for lines in zip(*(a.values for a in zipped), strict=True))
            )
            axes = [one if axis is zipped[0] else axis for axis in axes if axis is zipped[0] or axis not in zipped]
    return axes


def _read_jobs(name: str, axes: Sequence[Axis]) -> Axis:
    """Return the axis with a value for each line of a file. Empty lines and comments (`#`) are left out."""
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{name} cannot be read: {error}",
            key="sweep.jobs",
            remedy=missing_path(Path(name), "Name a text file.", "sweep.jobs"),
        ) from error
    taken = {key for axis in axes for key in axis.keys}
    keys: dict[str, None] = {}
    values = []
    for number, line in enumerate(text.splitlines(), 1):
        place = f"line {number} of {name}"
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"{place}: {error}", key="sweep.jobs", remedy="Quote it as in bash.") from error
        if not words:
            continue
        lines = arguments.with_hook_options_swept(words)
        for override in _allowed(arguments.parse(lines), place):
            if arguments.is_sweep(override):
                problem = f"{place} has several values: {override.input_line}"
                remedy = "Write a line for each, or sweep on the command line; a list has brackets."
                raise UserError(problem, key="sweep.jobs", remedy=remedy)
            keys[_key(override)] = None
        values.append(tuple(lines))
    twice = taken.intersection(keys)
    if twice:
        problem = f"{name} and the command line both set {', '.join(sorted(twice))}"
        raise UserError(problem, key="sweep.jobs", remedy="Set it in one of them.")
    if not values:
        raise UserError(f"{name} has no jobs", key="sweep.jobs", remedy="Write the overrides of one job in each line.")
    return Axis(tuple(keys), tuple(values))
