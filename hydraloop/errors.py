"""Errors that are shown to the user as a message, suggestions for misspelled names, and text for a terminal."""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

_COLOUR = re.compile(r"\x1b\[[\d;:]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""All characters that a terminal obeys, except for newlines and tabs; also those that change the direction of text."""


def printable(text: str) -> str:
    """Return a text that may come from anywhere without colours, and with control characters written as `\\x1b`.

    A terminal obeys them: they change its title, the clipboard, or what it has shown.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), _COLOUR.sub("", text))


class UserError(Exception):
    """A mistake in a command line, a config or a call: the key, the problem and the fix.

    The command line prints it without a traceback and exits with a code that is not 0. All other errors are ordinary
    exceptions, and keep their traceback.

    Args:
        problem: one sentence with the wrong value in it.
        key: as the user types it, `hooks.ema.priority`. None: no key is concerned.
        remedy: how to fix it, if possible with a command or a value that works.
    """

    def __init__(self, problem: str, *, key: str | None = None, remedy: str | None = None) -> None:
        self.problem = problem
        self.key = key
        self.remedy = remedy
        super().__init__(self.__str__())

    def __str__(self) -> str:
        where = f"{self.key}: " if self.key else ""
        what_to_do = f"\n  {self.remedy}" if self.remedy else ""
        return printable(f"{where}{self.problem}{what_to_do}")

    def __reduce__(self) -> tuple[object, ...]:
        # The default pickling loses keyword-only arguments, and launchers send errors between processes.
        return (_rebuild, (type(self), self.problem, self.key, self.remedy), self.__dict__)


def not_installed(package: str, *, key: str | None = None, use: str = "") -> UserError:
    """Return the mistake that a package is missing which only one feature needs.

    Args:
        package: as pip names it.
        key: of the feature.
        use: what the package does for the feature, if the key does not say it: `lists the GPUs`.
    """
    needed = f", which {use}," if use else ""
    return UserError(f"the package {package}{needed} is not installed", key=key, remedy=f"pip install {package}")


class Terminated(KeyboardInterrupt):
    """Raised when a signal other than Ctrl-C's SIGINT ends this process."""

    def __init__(self, number: int) -> None:
        super().__init__(f"by {signal.Signals(number).name}")
        self.number = number


def interrupt(number: int) -> KeyboardInterrupt:
    """Return the exception for a signal that ends this process: `KeyboardInterrupt` for SIGINT, else `Terminated`."""
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)


class PeerError(RuntimeError):
    """Raised on healthy ranks after another rank has failed; only the original error is reported."""


def _rebuild(cls: type[UserError], problem: str, key: str | None, remedy: str | None) -> UserError:
    return cls(problem, key=key, remedy=remedy)


def any_of(names: Sequence[str]) -> str:
    """Join names: `a`, `a or b`, `a, b or c`."""
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def close_names(name: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.5) -> list[str]:
    """Return the known names that resemble `name`, the best first. Case is ignored.

    Args:
        most: how many are returned at most.
        cutoff: the lowest resemblance, as of difflib. 1 is equality.
    """
    by_lower = {other.lower(): other for other in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=most, cutoff=cutoff)
    return [by_lower[other] for other in found]


def meant(key: str, known: Iterable[str], *, only_equal: bool = False) -> list[str]:
    """Return the known keys that a wrong key may mean, by their last parts; none if that cannot be told.

    They are equal, or one has the typed words as whole words (`epochs`, `engine.max_epochs`), or they are alike. Among
    these, the whole key decides; an option of a sweep comes last.

    Args:
        only_equal: whether the last parts must be equal.
    """
    name, of_sweep = key.rpartition(".")[2], "." not in key or key.startswith("sweep.")
    ends = {one: one.rpartition(".")[2] for one in known if of_sweep or not one.startswith("sweep.")}
    found = [one for one, end in ends.items() if end == name]
    if not (found or only_equal):
        words = {*name.split("_")}
        found = [one for one, end in ends.items() if words <= {*end.split("_")}]
    if not (found or only_equal):
        close = close_names(name, ends.values(), cutoff=0.8)
        found = [one for one, end in ends.items() if end in close]
    if "." not in key:
        found = [one for one in found if "." not in one] or (found if len(found) <= 3 else [])

    def rank(one: str) -> tuple[bool, float]:
        return not one.startswith("sweep."), difflib.SequenceMatcher(None, key, one).ratio()

    best = max(map(rank, found), default=None)
    return [one for one in found if rank(one) == best]


def emptying(key: str) -> str | None:
    """Return the line for a defaults list that selects nothing at a key. None: no option of a group is at the key."""
    group = "model" if key == "task.model" else key.partition(".")[0]
    if key in ("task", "task.model", "optimizer", "precision") or group == "data":
        return f"- override /{group}: {'base' if group == 'data' else 'null'}"
    return None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return one sentence with the names close to `name`, or with all known names if no name is close."""
    names = list(known)
    if close := close_names(name, names):
        return f"Did you mean {any_of(close)}?"
    return f"Known: {', '.join(sorted(names))}." if names else "No name is known."


def missing_path(path: Path, otherwise: str, optional: str = "") -> str:
    """Return the sentences about a wrong path: a file, a run or a sweep that resembles it if it does not exist.

    Args:
        otherwise: what to do if nothing resembles the path.
        optional: the key with the path, if it can be left out.
    """
    known = [*path.parent.glob("*"), *Path().glob("outputs/*/*"), *Path().glob("multirun/*/*")]
    near = [] if path.exists() else close_names(str(path), map(str, known), most=1, cutoff=0.8)
    if near:
        return f"Did you mean {near[0]}?"
    return f"{otherwise} Or leave {optional} out." if optional else otherwise


def leave_out(*keys: str) -> str:
    """Return one sentence: leave one of these options out."""
    return f"Leave {any_of(keys)} out."


def use_one_of(choices: Sequence[str]) -> str:
    """Return one sentence with the possible values of an option."""
    return f"Use {any_of(choices)}."
