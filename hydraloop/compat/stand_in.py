"""Objects that replace those of another framework for its hooks. They have a fixed list of attributes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydraloop.engine.engine import Engine
from hydraloop.engine.records import entries
from hydraloop.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

RESERVED = frozenset({*entries.RESERVED, *entries.NUMBERS})
"""Names that hydraloop uses in a record. The scalars that the task returns or logs are reserved too."""
_NO_CHECKPOINT = ("before_save_checkpoint", "on_save_checkpoint", "on_exception", "after_run", "teardown")
"""Methods in which no checkpoint can be requested."""


class NoCounterpartError(UserError, AttributeError):
    """An attribute of another framework's object that hydraloop does not have.

    Also an AttributeError, so that `hasattr` and `getattr` with a default work.
    """


class Caller(NamedTuple):
    """The hook that is being called, for messages."""

    kind: str = ""  # class of the other framework's object
    name: str = ""
    key: str = ""
    method: str = ""  # by the other framework's name


class Context:
    """The engine and the current caller. All stand-ins of one engine share it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.caller = Caller()
        self._stop_requested = False
        self._renamed: set[str] = set()

    @property
    def stopping(self) -> bool:
        """Whether training stops, or a hook has requested it."""
        return self._stop_requested or self.engine.stopping

    def set_stopping(self, stop: bool, attribute: str) -> None:
        """Request a stop, once.

        Args:
            attribute: the one that the hook has set, for messages.

        Raises:
            NoCounterpartError: the hook withdraws the request.
        """
        if stop and not self._stop_requested:
            self._stop_requested = True
            self.engine.request_stop(f"{self.caller.kind} set {attribute} in {self.caller.method}")
        elif not stop and self.stopping:
            raise self.no_counterpart(f"withdrawing {attribute}")

    def add(self, name: str, value: float | Tensor, count: int = 1) -> None:
        """Add a scalar to the next record. A reserved name becomes `<hook>/<name>`, and a warning says so once.

        Args:
            count: number of values that `value` is the sum of.
        """
        messages = self.engine.messages
        if name in RESERVED or name in messages.read("losses", ()):
            kind, hook, key, _ = self.caller
            given, name = name, f"{hook}/{name}"
            if name not in self._renamed:
                self._renamed.add(name)
                told = "%s: %s logs %r, a name that hydraloop uses; in the records it is %r"
                log.warning(told, key, kind, given, name)
        messages.add(name, value / count, count)

    def request_checkpoint(self, what: str, path: Path, *, optimizer: bool, schedulers: bool) -> None:
        """Request a checkpoint, which is written after this mount point.

        Args:
            what: the method that the hook called, for messages.

        Raises:
            NoCounterpartError: no checkpoint can be requested in this method.
        """
        if self.caller.method in _NO_CHECKPOINT:
            raise self.no_counterpart(
                f"{what} in {self.caller.method}",
                "Request it at an earlier point (after_train, on_train_end), or use default_hooks.checkpoint.",
            )
        self.engine.request_checkpoint(
            str(path), lambda engine: engine.save_checkpoint(path, optimizer=optimizer, schedulers=schedulers)
        )

    def no_counterpart(self, what: str, remedy: str | None = None) -> NoCounterpartError:
        """Return the error that names `what`, the hook that used it, and the method."""
        return NoCounterpartError(
            f"{what} has no counterpart in hydraloop (used by {self.caller.kind} in {self.caller.method})",
            key=self.caller.key or None,
            remedy=remedy or "docs/how-to/migrating.md lists what works.",
        )


class StandIn:
    """Base class. It has the attributes in `ATTRIBUTES`, and the methods and properties of a subclass."""

    STANDS_FOR = ""
    """Name in messages: "mmengine's runner"."""
    ATTRIBUTES: Mapping[str, Callable[[Any], Any]] = {}
    """Read-only attributes: functions of the stand-in."""
    INSTEAD: Mapping[str, str] = {}
    """What to use instead of attributes that are not supported."""
    context: Context

    def __init__(self, context: Context, **attributes: Any) -> None:
        self.__dict__.update(attributes, context=context)

    @property
    def _engine(self) -> Engine:
        return self.context.engine

    def __getattr__(self, name: str) -> Any:
        if name in self.ATTRIBUTES:
            return self.ATTRIBUTES[name](self)
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        raise self.context.no_counterpart(f"{self.STANDS_FOR}.{name}", self.INSTEAD.get(name))

    def __setattr__(self, name: str, value: Any) -> None:
        prop = getattr(type(self), name, None)
        if not isinstance(prop, property) or prop.fset is None:
            raise self.context.no_counterpart(f"setting {self.STANDS_FOR}.{name}", self.INSTEAD.get(name))
        prop.fset(self, value)
