"""What another framework's hook is given: objects with a short list of attributes, and an error for any other."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.compat.adapter import Adapter, name_of
from hydraloop.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)

RESERVED = frozenset(
    {"mode", "epoch", "iteration", "nonfinite"}
    | {"loss", "grad_norm", "lr", "momentum", "eta", "time", "data_time", "memory", "mfu", "skipped"}
)
"""Names that hydraloop's own numbers have in a record, beside the losses that the task returns."""
_NOTHING_IS_WRITTEN = ("before_save_checkpoint", "on_save_checkpoint", "on_exception", "after_run", "teardown")


class NoCounterpartError(UserError, AttributeError):
    """Something of another framework that hydraloop does not have.

    An AttributeError too, so that `hasattr` and `getattr` with a default work as they do on any object.
    """


class Context:
    """What the facades of one engine share: the engine, and who is using them at which mount point."""

    __slots__ = ("_renamed", "engine", "key", "name", "point", "stop_asked", "user")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.user = ""
        """The class of the hook that is called now."""
        self.name = self.key = ""
        """Its name and its key in the config."""
        self.point = ""
        """Its method that is called now, by the other framework's name."""
        self.stop_asked = False
        """Whether one of the hooks has asked to stop."""
        self._renamed: set[str] = set()

    def call(self, hook: Adapter, point: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of what a hook wraps; what goes wrong within names it."""
        outer = self.user, self.name, self.key, self.point  # a checkpoint may be written within a mount point
        self.user, self.name, self.key, self.point = name_of(hook.wrapped), hook.name, hook.key, point
        try:
            return getattr(hook.wrapped, point)(*args, **kwargs)
        except AttributeError as error:
            instead = hook.attached.get(error.name or "")
            if instead is None or error.obj is not hook.wrapped:
                raise
            raise self.no_counterpart(f"self.{error.name}", instead) from None
        finally:
            self.user, self.name, self.key, self.point = outer

    def stop(self, attribute: str) -> None:
        """Ask the engine to stop, once."""
        if not self.stop_asked:
            self.stop_asked = True
            self.engine.request_stop(f"{self.user} set {attribute} in {self.point}")

    def add(self, name: str, value: float | Tensor, count: int = 1) -> None:
        """Put a scalar into the next record; one with a name of hydraloop's own as `<hook>/<name>`.

        Args:
            count: of how many values it is the sum.
        """
        messages = self.engine.messages
        if name in RESERVED or name in messages.read("losses", ()):
            name = self._rename(name)
        messages.add(name, value)
        for _ in range(count - 1):  # a mean is over as many values as were added
            messages.add(name, 0.0)

    def _rename(self, name: str) -> str:
        new = f"{self.name}/{name}"
        if new not in self._renamed:
            self._renamed.add(new)
            log.warning(
                "%s: %s logs %r, a name of hydraloop's own; the records have it as %r", self.key, self.user, name, new
            )
        return new

    def request_checkpoint(self, what: str, path: Path, *, optimizer: bool, schedulers: bool) -> None:
        """Ask the engine for a checkpoint, written once this mount point is over.

        Args:
            what: what the hook called for it.

        Raises:
            NoCounterpartError: at this point none is written any more, or one is being written.
        """
        if self.point in _NOTHING_IS_WRITTEN:
            raise self.no_counterpart(
                f"{what} in {self.point}",
                "No checkpoint is written there: ask at an earlier point (after_train, on_train_end), or use "
                "default_hooks.checkpoint.",
            )
        self.engine.request_checkpoint(
            str(path), lambda engine: engine.save_checkpoint(path, optimizer=optimizer, schedulers=schedulers)
        )

    def no_counterpart(self, what: str, remedy: str | None = None) -> NoCounterpartError:
        """The error that names what was used, by whom and where."""
        return NoCounterpartError(
            f"{what} has no counterpart in hydraloop (used by {self.user} in {self.point})",
            key=self.key or None,
            remedy=remedy or "docs/how-to/migrating.md lists what works.",
        )


class Facade:
    """Stands for an object of another framework: properties and methods of the class are what carries over."""

    STANDS_FOR = ""
    """How its users call it: "mmengine's runner"."""
    INSTEAD: dict[str, str] = {}
    """By attribute, what to use instead of it."""

    def __init__(self, context: Context) -> None:
        self.__dict__["context"] = context

    @property
    def _engine(self) -> Engine:
        engine: Engine = self.context.engine
        return engine

    def __getattr__(self, name: str) -> Any:
        # Only for what is not there. Python's own questions (__len__, __deepcopy__) are answered in its own way.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        raise self.context.no_counterpart(f"{self.STANDS_FOR}.{name}", self.INSTEAD.get(name))

    def __setattr__(self, name: str, value: Any) -> None:
        prop = getattr(type(self), name, None)
        if not isinstance(prop, property) or prop.fset is None:
            raise self.context.no_counterpart(f"setting {self.STANDS_FOR}.{name}", self.INSTEAD.get(name))
        prop.fset(self, value)
