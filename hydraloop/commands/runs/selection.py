"""Which runs a condition selects, and their order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydraloop.commands.runs.found import MISSING, NAMES, Run
from hydraloop.condition import Condition
from hydraloop.errors import Remedy, UserError, suggestion

EXAMPLE = """python -m hydraloop runs 'accuracy > 0.9 and "ema" in hooks'"""


def selected(rows: Sequence[Run], text: str) -> list[Run]:
    """Return the runs that meet a condition. A run that cannot be compared, such as a text with a number, does not.

    Raises:
        UserError: it is not a condition, no run has a name in it, or no run can be compared.
    """
    condition = Condition(text, None, key="condition", example=EXAMPLE)
    meeting, mistakes = [], []
    values = [{name: row.value(name) for name in condition.names} for row in rows]
    for name, column in condition.names.items():
        if rows and all(found[name] is MISSING for found in values):
            raise _unknown(name, rows, condition.pointed(f"no run has {name}", column), text)
    for row, found in zip(rows, values, strict=True):
        try:
            if condition.holds(found, [str(row.path)]):
                meeting.append(row)
        except UserError as error:
            mistakes.append(error)
    if rows and len(mistakes) == len(rows):
        raise mistakes[0]
    return meeting


def ordered(rows: Sequence[Run], name: str, *, reverse: bool) -> list[Run]:
    """Return the runs in ascending order of a name, or the best first; those without a value come last.

    Raises:
        UserError: no run has the name, or its values have no order.
    """
    pairs: list[tuple[Any, Run]] = [(row.value(name), row) for row in rows]
    have = [pair for pair in pairs if pair[0] is not None and pair[0] == pair[0]]
    lacking = [row for value, row in pairs if value is None or value != value]
    if rows and not have:
        raise _unknown(name, rows, f"no run has {name}", name)
    goals = [row.result.objective for _, row in have if row.result.objective is not None]
    greater = any(goal.rule == "greater" for goal in goals if name in ("value", goal.metric))
    try:
        have.sort(key=lambda pair: pair[0], reverse=greater != reverse)
    except TypeError as error:
        problem = f"the values of {name} have no order: {error}"
        raise UserError(problem, key="--sort", remedy="Name a number, or a text.") from error
    return [row for _, row in have] + lacking


def _unknown(name: str, rows: Sequence[Run], problem: str, argument: str) -> UserError:
    known = {metric for row in rows for metric in row.result.val_metrics}.union(NAMES)
    near = suggestion(name, known)
    repaired = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w.])", near.word[1] if near.word else name, argument)
    remedy = Remedy(f"{near} An option has its full key, such as optimizer.lr.", (argument, repaired))
    return UserError(problem, key="runs", remedy=remedy)
