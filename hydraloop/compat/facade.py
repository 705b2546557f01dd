"""What another framework's hook is given: objects with a short list of attributes, and an error for any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hydraloop.errors import UserError

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class NoCounterpartError(UserError, AttributeError):
    """Something of another framework that hydraloop does not have.

    An AttributeError too, so that `hasattr` and `getattr` with a default work as they do on any object.
    """


class Context:
    """What the facades of one engine share: the engine, and who is using them at which mount point."""

    __slots__ = ("engine", "key", "point", "stop_asked", "user")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.user = ""
        """The class of the hook that is called now."""
        self.key = ""
        """Its key in the config."""
        self.point = ""
        """Its method that is called now, by the other framework's name."""
        self.stop_asked = False
        """Whether one of the hooks has asked to stop."""

    def call(self, user: str, key: str, point: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of a hook; what goes wrong within names it."""
        outer = self.user, self.key, self.point  # a checkpoint may be written within a mount point
        self.user, self.key, self.point = user, key, point
        try:
            return method(*args, **kwargs)
        finally:
            self.user, self.key, self.point = outer

    def stop(self, attribute: str) -> None:
        """Ask the engine to stop, once."""
        if not self.stop_asked:
            self.stop_asked = True
            self.engine.request_stop(f"{self.user} set {attribute} in {self.point}")

    def no_counterpart(self, what: str, remedy: str | None = None) -> NoCounterpartError:
        """The error that names what was used, by whom and where."""
        return NoCounterpartError(
            f"{what} has no counterpart in hydraloop (used by {self.user} in {self.point})",
            key=self.key or None,
            remedy=remedy or "README, 'Bringing hooks along', lists what carries over.",
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
