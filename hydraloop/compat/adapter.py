"""Adapter: what the adapters share. A hook of ours that calls an object of another framework where it has methods."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hydraloop.compat.uses_of_self import uses_of_self
from hydraloop.engine.hook import MOUNT_POINTS, Hook, Priority
from hydraloop.errors import UserError

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

_STATE = ("state_dict", "load_state_dict")


class Adapter(Hook):
    """Base of the adapters. An instance's class has only the mount points that its object uses, so that the printed
    order says what is called and the other points cost nothing."""

    collective = True  # the object may call some, nobody knows
    framework: ClassVar[str]
    """Whose objects the class adapts."""
    attached: ClassVar[Mapping[str, str]] = {}
    """Methods that the framework attaches to its objects and hydraloop does not, and what to use instead."""
    wrapped: Any
    """The other framework's object."""

    def _use_only(self, points: Collection[str], *, state: bool, priority: int | str = Priority.NORMAL) -> None:
        """Leave the mount points that are not in `points`, and without `state` the state, to the base class."""
        unused = {name: getattr(Hook, name) for name in MOUNT_POINTS if name not in points}
        if not state:
            unused.update({name: getattr(Hook, name) for name in _STATE})
        own = type(self)
        described = {"__doc__": own.__doc__, "__module__": own.__module__, "__qualname__": own.__qualname__}
        self.__class__ = type(own.__name__, (own,), {**described, **unused, "priority": priority})


def adapted(engine: Engine, framework: str) -> list[Any]:
    """The objects of a framework that an engine's hooks run, in the order of their registration."""
    hooks = engine.hooks.values()
    return [hook.wrapped for hook in hooks if isinstance(hook, Adapter) and hook.framework == framework]


def name_of(wrapped: object) -> str:
    """The name of an object's class."""
    return type(wrapped).__name__


def require_object(wrapped: object, key: str, kind: str) -> None:
    """Refuse a class, a name, a config: what is no object of the other framework yet.

    Raises:
        UserError: says what to give instead.
    """
    if isinstance(wrapped, type):
        raise UserError(f"{wrapped.__name__} is a class", key=key, remedy=f"Give {kind} itself: {wrapped.__name__}(…).")
    if wrapped is None or isinstance(wrapped, str | int | float | list | tuple | Mapping):
        raise UserError(
            f"{wrapped!r} is not {kind}", key=key, remedy=f"Name its class in the config: {key}._target_=package.Class."
        )


def overridden(wrapped: object, bases: Collection[str]) -> list[str]:
    """The names of the public and private methods that an object has of its own, not from its framework's base class.

    Args:
        bases: the modules of the framework's base class.
    """
    found = dict.fromkeys(name for name, value in getattr(wrapped, "__dict__", {}).items() if callable(value))
    for kind in type(wrapped).__mro__:
        if kind is not object and kind.__module__ not in bases:
            found.update(dict.fromkeys(name for name, value in vars(kind).items() if callable(value)))
    return [name for name in found if not name.startswith("__")]


def refuse_attached(wrapped: object, methods: Collection[str], attached: Mapping[str, str], key: str) -> None:
    """Refuse an object whose methods use what its framework would attach to it.

    Args:
        methods: the names of those that it has of its own.
        attached: see `Adapter`.

    Raises:
        UserError: names the method, what it uses and what to use instead.
    """
    missing = [name for name in attached if not hasattr(wrapped, name)]
    for method in methods:
        for name in uses_of_self(getattr(wrapped, method), missing):
            raise UserError(
                f"{name_of(wrapped)} uses self.{name} in {method}, which has no counterpart in hydraloop",
                key=key,
                remedy=attached[name],
            )


def refuse_known(wrapped: object, packages: tuple[str, ...], instead: Mapping[str, str], key: str) -> None:
    """Refuse an object of a class, or of one derived from it, that cannot work here.

    Args:
        packages: of the framework.
        instead: by the class's name, what to use.

    Raises:
        UserError: names the class and what to use.
    """
    for kind in type(wrapped).__mro__:
        if kind.__name__ in instead and kind.__module__.split(".")[0] in packages:
            derived = "" if kind is type(wrapped) else f", which {name_of(wrapped)} is derived from,"
            raise UserError(
                f"{packages[0]}'s {kind.__name__}{derived} does not carry over: "
                f"it works on parts of {packages[0]} that have no counterpart in hydraloop",
                key=key,
                remedy=instead[kind.__name__],
            )
