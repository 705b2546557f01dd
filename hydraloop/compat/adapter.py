"""Adapter: base class of hooks that call an object of another framework."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor

from hydraloop.compat.stand_in import Caller, Context, StandIn
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import MOUNT_POINTS, Hook, Priority
from hydraloop.errors import UserError

_OF_A_RUN = (
    *("format", "meta", "state_dict", "optimizer", "schedulers", "hooks", "precision", "rng", "progress", "data"),
    "messages",
)
"""Hydraloop's entries in a checkpoint."""
_STATE = ("state_dict", "load_state_dict")


class Adapter(Hook):
    """Base class of the adapters. Each instance has its own class, with only the mount points that its object uses.

    For all adapters:

    * A stand-in raises a `NoCounterpartError` for an attribute that is not supported.
    * A scalar with a name that hydraloop uses (epoch, loss, …) becomes `<hook>/<name>` in the records, with one
      warning.
    * The object may add entries to a checkpoint. Changing one of hydraloop's, at any depth, is an error that names it.
      A write through a tensor's `.data` is not detected, and changes the run if the checkpoint is about to be saved.
    * It cannot request a checkpoint in a method that is called after an error, at the end, or to save a checkpoint.

    Cost: about 2.5 µs per call in addition to the object's own time. No host sync, unless the object reads a value.
    """

    collective = True  # the object may use collectives
    stand_in: ClassVar[type[StandIn]]
    """The first argument of the object's methods: the runner or trainer."""
    wrapped: Any
    """The other framework's object."""
    _shared: StandIn | None = None

    def _restrict(
        self,
        points: Collection[str],
        made: Mapping[str, Callable[..., None]],
        *,
        state: bool,
        priority: int | str = Priority.NORMAL,
    ) -> None:
        """Give this instance its own class.

        Args:
            points: the mount points of the class.
            made: methods for mount points that the adapter's class does not define.
            state: whether the class has `state_dict` and `load_state_dict`.
        """
        own = type(self)
        unused = [*(name for name in MOUNT_POINTS if name not in points), *(() if state else _STATE)]
        methods = {**{name: getattr(Hook, name) for name in unused}, **made}
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        self.__class__ = type(own.__name__, (own,), {**names, **methods, "priority": priority})

    def _stand_in_of(self, engine: Engine) -> Any:
        """Return the stand-in that all adapters of this framework share in an engine."""
        if self._shared is None or self._shared.context.engine is not engine:
            first = adapters(engine, self.stand_in)[0]
            self._shared = self.stand_in(Context(engine)) if first is self else first._stand_in_of(engine)
        return self._shared

    def _invoke(self, context: Context, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the object, with its name for the errors of stand-ins."""
        outer = context.caller  # a checkpoint may be written inside a mount point
        context.caller = Caller(type(self.wrapped).__name__, self.name, self.key, method)
        try:
            getattr(self.wrapped, method)(*args, **kwargs)
        finally:
            context.caller = outer

    def state_dict(self) -> dict[str, Any]:
        """Return the object's state."""
        state: dict[str, Any] = self.wrapped.state_dict()
        return state


def adapters(engine: Engine, stand_in: type[StandIn]) -> list[Adapter]:
    """Return an engine's adapters with this kind of stand-in, in the order of their registration."""
    return [hook for hook in engine.hooks.values() if isinstance(hook, Adapter) and hook.stand_in is stand_in]


def check_object(wrapped: object, packages: tuple[str, ...], instead: Mapping[str, str], key: str, kind: str) -> None:
    """Check that an object can be adapted.

    Args:
        packages: of the framework.
        instead: classes of the framework that are not supported, and what to use instead.
        kind: of object, for messages: "an mmengine hook".

    Raises:
        UserError: it is a class, a name or a config, or its class is in `instead` or inherits from one there.
    """
    if wrapped is None or isinstance(wrapped, type | str | int | float | list | tuple | Mapping):
        remedy = f"Give an object. In the config, name its class: {key}._target_=package.Class."
        raise UserError(f"{wrapped!r} is not {kind}", key=key, remedy=remedy)
    for base in type(wrapped).__mro__:
        if base.__name__ in instead and base.__module__.split(".")[0] in packages:
            derived = "" if base is type(wrapped) else f", which {type(wrapped).__name__} is derived from,"
            raise UserError(
                f"{packages[0]}'s {base.__name__}{derived} is not supported: "
                f"it uses parts of {packages[0]} that have no counterpart in hydraloop",
                key=key,
                remedy=instead[base.__name__],
            )


def overridden(wrapped: object, bases: Collection[str]) -> list[str]:
    """Return the names of the methods that an object does not inherit from its framework's base class.

    Args:
        bases: modules of the framework's base class.
    """
    kinds = [kind for kind in type(wrapped).__mro__ if kind is not object and kind.__module__ not in bases]
    own: list[Mapping[str, Any]] = [getattr(wrapped, "__dict__", {}), *map(vars, kinds)]
    callables = [name for attributes in own for name, value in attributes.items() if callable(value)]
    return list(dict.fromkeys(name for name in callables if not name.startswith("__")))


@contextmanager
def lent(checkpoint: dict[str, Any], hook: Adapter, method: str, *, saving: bool) -> Iterator[dict[str, Any]]:
    """Yield a copy of a checkpoint, with the same tensors; at the end, copy the object's changes to the checkpoint.

    An error in the block leaves the checkpoint unchanged.

    Args:
        hook: of the object that gets the copy.
        method: of the object, by the other framework's name.
        saving: the checkpoint is about to be written, and the object may only add entries. Otherwise it was loaded, and
            the object may also change entries that are not hydraloop's.

    Raises:
        UserError: another entry was changed, at any depth.
    """
    bare = "state_dict" not in checkpoint  # a file that contains only weights
    protected = [entry for entry in checkpoint if saving or bare or entry in _OF_A_RUN]
    kept = {entry: checkpoint[entry] for entry in protected}
    before, copied = dict(_items(kept)), _copy(checkpoint)
    yield copied
    after = dict(_items({entry: copied[entry] for entry in protected if entry in copied}))
    changed = [path for path in {**before, **after} if path not in before or before[path] != after.get(path)]
    if changed:
        raise UserError(
            f"{type(hook.wrapped).__name__} changes {changed[0]!r} of the checkpoint in {method}; hydraloop's entries, "
            "such as the raw weights, cannot be changed",
            key=hook.key,
            remedy="Add an entry with another name. For averaged weights, use hooks=ema."
            if saving
            else "The entry is already loaded: change the model, or change the file before the run.",
        )
    checkpoint.clear()
    checkpoint.update({**copied, **kept})


def _copy(value: Any) -> Any:
    """Copy dicts and lists, at any depth, but not what they contain."""
    if isinstance(value, dict):
        twin = copy.copy(value)  # of the same class
        twin.update((name, _copy(item)) for name, item in value.items())
        return twin
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _items(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each item in a checkpoint, with a value that differs if the item has changed."""
    if isinstance(value, dict | list):
        yield path, type(value) is list
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _items(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, Tensor):
        # `_version` counts writes, except through `.data`. torch has no public name for it.
        yield path, (id(value), 0 if value.is_inference() else value._version)
    else:
        yield path, (type(value), value) if isinstance(value, str | int | float) else id(value)
