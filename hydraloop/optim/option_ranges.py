"""The values that the options of a schedule may have, as metadata of their dataclass fields."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hydraloop.errors import UserError


class _Allowed(NamedTuple):
    words: str
    holds: Callable[[Any], bool]


def _numbers(words: str, holds: Callable[[float], bool], kinds: Any = int | float) -> Mapping[str, _Allowed]:
    def is_one(value: Any) -> bool:
        return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value) and holds(value)

    return {"allowed": _Allowed(words, is_one)}


def one_of(*words: str) -> Mapping[str, _Allowed]:
    """Return metadata for a choice between words."""
    return {"allowed": _Allowed(" or ".join(words), lambda value: value in words)}


COUNT = _numbers("a whole number from 1", lambda value: value >= 1, int)
COUNT_FROM_0 = _numbers("a whole number from 0", lambda value: value >= 0, int)
ABOVE_0 = _numbers("a number above 0", lambda value: value > 0)
FROM_0 = _numbers("a number from 0", lambda value: value >= 0)
SHARE = _numbers("a number from 0 to 1", lambda value: 0 <= value <= 1)
SHARE_ABOVE_0 = _numbers("a number above 0, up to 1", lambda value: 0 < value <= 1)
BETWEEN_0_AND_1 = _numbers("a number between 0 and 1", lambda value: 0 < value < 1)


def check_ranges(options: Any) -> None:
    """Check each field of a dataclass that has a range, and each number of a list; None is always allowed."""
    for field in dataclasses.fields(options):
        allowed, value = field.metadata.get("allowed"), getattr(options, field.name)
        if allowed is None or value is None:
            continue
        for item in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            if not allowed.holds(item):
                raise UserError(f"cannot be {item!r}", key=field.name, remedy=f"Use {allowed.words}.")
