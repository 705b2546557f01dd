"""Patterns for names of modules, parameters and checkpoint entries: a glob, or `re:` and a regular expression."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable

from hydraloop.errors import UserError, any_of, close_names


def compiled(pattern: str, key: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern.

    Args:
        pattern: a glob, in which `*` also matches dots, or `re:` and a regular expression.
        key: the option that has the pattern, for the error.

    Raises:
        UserError: the regular expression is wrong.
    """
    if not pattern.startswith("re:"):
        return re.compile(fnmatch.translate(pattern))
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        remedy = r"A \ before a character such as [ or . removes its special meaning."
        raise UserError(f"'{pattern}' is not a regular expression: {error}", key=key, remedy=remedy) from error


def matching(patterns: Iterable[str], names: Collection[str], key: str) -> set[str]:
    """Return the names that match one of the patterns, or are in a module whose name does.

    Raises:
        UserError: a pattern matches no name; the remedy has close names.
    """
    found: set[str] = set()
    for pattern in patterns:
        expression = compiled(pattern, key)
        new = {name for name in names if any(expression.fullmatch(part) for part in _with_modules(name))}
        if not new:
            raise UserError(f"{pattern!r} matches no name", key=key, remedy=close_to(pattern, names))
        found |= new
    return found


def close_to(pattern: str, names: Collection[str]) -> str:
    """Return a sentence with the names, or parts of them before a dot, that resemble a pattern; else with the first."""
    parts = {part for name in names for part in _with_modules(name)}
    close = close_names(pattern.removeprefix("re:").strip(".*^$"), sorted(parts))
    if close:
        return f"Did you mean {any_of(close)}?"
    return f"The names are {', '.join(list(names)[:3])}, …"


def _with_modules(name: str) -> list[str]:
    """Return the names of the modules that a parameter or module is in, and its own."""
    return [*(name[: dot.start()] for dot in re.finditer(r"\.", name)), name]
