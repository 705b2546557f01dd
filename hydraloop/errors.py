"""The one kind of error that is a message for the user instead of a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what the user typed or wrote: what is wrong, where, and what to do.

    `app.py` prints it without a traceback and exits with a code that is not 0. Anything that is not the user's
    mistake is raised as an ordinary exception and keeps its whole traceback.

    Args:
        problem: what is wrong, in one sentence, with the offending value in it.
        key: where, as the user would type it (`hooks.ema.priority`), or None where no key applies.
        remedy: what to do about it; a command or a value that works, where there is one.
    """

    def __init__(self, problem: str, *, key: str | None = None, remedy: str | None = None) -> None:
        self.problem = problem
        self.key = key
        self.remedy = remedy
        super().__init__(self.__str__())

    def __str__(self) -> str:
        where = f"{self.key}: " if self.key else ""
        what_to_do = f"\n  {self.remedy}" if self.remedy else ""
        return f"{where}{self.problem}{what_to_do}"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling, and launchers send errors between processes.
        return (_rebuild, (type(self), self.problem, self.key, self.remedy))


class PeerError(RuntimeError):
    """Another rank has failed, and this one ends with it; whoever tells of the failure tells of the other's."""


def _rebuild(cls: type[UserError], problem: str, key: str | None, remedy: str | None) -> UserError:
    return cls(problem, key=key, remedy=remedy)


def close_names(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """The known names that resemble `name`, best first; upper and lower case count as the same."""
    by_lower = {other.lower(): other for other in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=most, cutoff=0.5)
    return [by_lower[other] for other in found]


def suggestion(name: str, known: Iterable[str]) -> str:
    """One sentence that lists the names close to `name`, or all known ones where none is close."""
    names = list(known)
    close = close_names(name, names)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    if not names:
        return "There are none."
    return f"Known: {', '.join(sorted(names))}."
