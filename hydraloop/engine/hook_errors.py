"""What an error in a hook does: it ends the run, or is logged once for each cause."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from hydraloop.engine.hook import OnError
from hydraloop.errors import UserError
from hydraloop.run_files.result import describe

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Policy:
    """What an error in a hook does."""

    name: str
    on_error: OnError
    newly_disabled: set[str]
    disabled: bool = False
    _first: dict[tuple[object, ...], str] = field(default_factory=dict)
    """By cause (type and place), the first error of this run as text."""
    _repeated: Counter[tuple[object, ...]] = field(default_factory=Counter)
    """By cause, the number of later errors, which are only counted."""

    def handle(self, error: Exception, point: str) -> None:
        """Raise the error, or log it with its traceback the first time, and let the run continue."""
        if self.on_error == "raise" or isinstance(error, UserError):  # a user's mistake always ends the run
            error.add_note(f"hydraloop: raised in the hook {self.name!r} at {point}")
            raise error
        if self.on_error == "disable":
            self.disabled = True
            self.newly_disabled.add(self.name)
        cause = _cause(error)
        if cause in self._first:
            self._repeated[cause] += 1
            return
        self._first[cause] = describe(error).partition("\n")[0]
        then = "it is switched off" if self.disabled else "the run continues"
        log.warning(
            "hook %s failed at %s; %s (on_error=%s): %s: %s",
            self.name, point, then, self.on_error, type(error).__name__, error, exc_info=error,
        )  # fmt: skip

    def report_repeated(self) -> None:
        """Log the number of errors that were only counted, in one line, and forget all errors."""
        if self._repeated:
            ((most, _),) = self._repeated.most_common(1)
            kinds = len(self._repeated)
            text = "this kind" if kinds == 1 else f"{kinds} kinds, the most frequent"
            log.warning(
                "%s: %d more error%s of %s: %s",
                self.name, self._repeated.total(), "s" if self._repeated.total() > 1 else "", text, self._first[most],
            )  # fmt: skip
        self._first.clear()
        self._repeated.clear()


def _cause(error: Exception) -> tuple[object, ...]:
    """Return what repeated errors have in common: the type, the system's error number, and the place in the code."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = () if place is None else (place.tb_frame.f_code.co_filename, place.tb_lineno)
    return (type(error), getattr(error, "errno", None), *where)
