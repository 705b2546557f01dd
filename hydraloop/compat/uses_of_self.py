"""Which attributes of its own object a method uses, found in its bytecode without calling it."""

from __future__ import annotations

import dis
from collections.abc import Collection
from itertools import pairwise
from types import CodeType


def uses_of_self(method: object, names: Collection[str]) -> list[str]:
    """Return those of `names` that a method reads from its first argument, also in functions within it.

    Nothing is found in a callable that is not a Python function, or that reads them in another way (`getattr`).
    """
    code = getattr(method, "__code__", None)
    if not isinstance(code, CodeType) or not code.co_argcount:
        return []
    return list(dict.fromkeys(_reads(code, code.co_varnames[0], names)))


def _reads(code: CodeType, variable: str, names: Collection[str]) -> list[str]:
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    found = [
        after.argval
        for before, after in pairwise(steps)
        if after.opname in ("LOAD_ATTR", "LOAD_METHOD") and after.argval in names and _last_loaded(before) == variable
    ]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found += _reads(constant, variable, names)
    return found


def _last_loaded(step: dis.Instruction) -> object:
    """The variable that an instruction loads; Python 3.13 has some that load two."""
    if not step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return None
    return step.argval[-1] if isinstance(step.argval, tuple) else step.argval
