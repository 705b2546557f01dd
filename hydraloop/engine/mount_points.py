"""The mount points of a run, what a hook looks like to the engine, and priorities. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import IntEnum
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from hydraloop.errors import Remedy, UserError, suggestion

Mode = Literal["train", "val", "test"]
OnError = Literal["raise", "warn", "disable"]
ON_ERROR: tuple[OnError, ...] = ("raise", "warn", "disable")
Call = Callable[..., None]


class MountPoints:
    """One call for each mount point, in the order of a run. `hook.Hook` says when each is called, and with what."""

    before_run: Call
    after_load_checkpoint: Call
    at_position: Call
    before_train: Call
    before_train_epoch: Call
    before_train_iter: Call
    after_backward: Call
    before_optimizer_step: Call
    after_train_iter: Call
    on_log: Call
    after_train_epoch: Call
    before_save_checkpoint: Call
    before_val: Call
    before_val_epoch: Call
    before_val_iter: Call
    after_val_iter: Call
    after_val_epoch: Call
    after_val: Call
    on_exception: Call
    after_train: Call
    before_test: Call
    before_test_epoch: Call
    before_test_iter: Call
    after_test_iter: Call
    after_test_epoch: Call
    after_test: Call
    after_run: Call


MOUNT_POINTS = tuple(MountPoints.__annotations__)
"""Their names."""
GENERAL_POINTS: dict[str, tuple[tuple[str, Mode], ...]] = {
    general: tuple((general.replace("_", f"_{mode}_"), mode) for mode in ("train", "val", "test"))
    for general in ("before_epoch", "after_epoch", "before_iter", "after_iter")
}
"""The four general points, and the mount points (with their mode) at which each is called."""


@runtime_checkable
class HookLike(Protocol):
    """What the engine uses of a hook. `hook.Hook` describes the members, and is the class to inherit from."""

    priority: ClassVar[int | str]
    runs_after: ClassVar[tuple[str, ...]]
    on_error: ClassVar[OnError]
    rank_zero_only: ClassVar[bool]
    idle_points: Collection[str]
    name: str
    key: str

    @classmethod
    def overrides(cls, method: str) -> bool: ...
    def check_arguments(self, key: str) -> None: ...
    def attach(self, name: str, key: str) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Priority(IntEnum):
    """When a hook is called at a mount point: 0 first, 100 last. MMEngine's scale."""

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100
    # iMIX's names for two of them.
    HIGHER = VERY_HIGH
    LOWER = VERY_LOW

    @classmethod
    def of(cls, value: int | str, key: str | None = None) -> int:
        """Return the number of a priority given as a number (0..100) or a name (any case).

        Raises:
            UserError: the number is out of range or the name unknown; names `key`.
        """
        if isinstance(value, str):
            if value.strip().lstrip("-").isdigit():
                return cls.of(int(value), key)
            try:
                return int(cls.__members__[value.strip().upper()])
            except KeyError:
                raise UserError(
                    f"there is no priority {value!r}",
                    key=key,
                    remedy=suggestion(value, cls.__members__) + " A number from 0 (first) to 100 (last) works too.",
                ) from None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100:
            text = f"Use a number from 0 (first) to 100 (last), or a name: {', '.join(cls.__members__)}."
            nearest = "100" if isinstance(value, int) and value > 100 else "0"
            raise UserError(f"priority {value!r} is out of range", key=key, remedy=Remedy(text, (str(value), nearest)))
        return int(value)
