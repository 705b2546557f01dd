"""Entries of a checkpoint in the hands of another framework's hook: it may add its own, and not change hydraloop's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hydraloop.compat.adapter import Adapter, name_of
from hydraloop.errors import UserError

_OF_A_RUN = ("format", "meta", "state_dict", "optimizer", "schedulers", "hooks", "precision", "rng", "progress")


@contextmanager
def to_be_saved(checkpoint: dict[str, Any], hook: Adapter, point: str) -> Iterator[dict[str, Any]]:
    """Lend a checkpoint that is about to be written; entries that are added to it are taken over.

    What is lent has dicts and lists of its own and the same tensors, so that whatever is raised leaves the checkpoint
    as it was.

    Raises:
        UserError: an entry that was there is changed, at whatever depth; names it.
    """
    remedy = "Let it add an entry of its own. For averaged weights there is hooks=ema."
    with _lent(checkpoint, list(checkpoint), hook, point, remedy) as lent:
        yield lent


@contextmanager
def loaded(checkpoint: dict[str, Any], hook: Adapter, point: str) -> Iterator[dict[str, Any]]:
    """Lend a checkpoint that was loaded; entries that are not hydraloop's may be changed and taken out.

    Raises:
        UserError: one of hydraloop's is changed, when that has no effect any more; names it.
    """
    bare = "state_dict" not in checkpoint  # every entry is a weight
    own = [entry for entry in checkpoint if bare or entry in _OF_A_RUN]
    remedy = "It is loaded by then: change the model itself, or the file beforehand."
    with _lent(checkpoint, own, hook, point, remedy) as lent:
        yield lent


@contextmanager
def _lent(
    checkpoint: dict[str, Any], own: list[str], hook: Adapter, point: str, remedy: str
) -> Iterator[dict[str, Any]]:
    versions: dict[int, int] = {}
    lent = {entry: _copied(value, versions) for entry, value in checkpoint.items()}
    yield lent
    kept = {entry: checkpoint[entry] for entry in own}
    changed = _first_change(kept, {entry: lent[entry] for entry in own if entry in lent}, versions)
    if changed is not None:
        raise UserError(
            f"{name_of(hook.wrapped)} changes {changed!r} of the checkpoint in {point}; what hydraloop puts into one, "
            "raw weights included, stays as it is",
            key=hook.key,
            remedy=remedy,
        )
    checkpoint.clear()
    checkpoint.update({**lent, **kept})


def _copied(value: Any, versions: dict[int, int]) -> Any:
    """Dicts and lists anew, at every depth; what they hold is the same. The versions of tensors, by id, are noted."""
    if isinstance(value, dict):
        twin = copy.copy(value)  # of the same class
        twin.update((name, _copied(item, versions)) for name, item in value.items())
        return twin
    if isinstance(value, Tensor):
        versions[id(value)] = _version(value)
    return [_copied(item, versions) for item in value] if isinstance(value, list) else value


def _version(tensor: Tensor) -> int:
    """How often the tensor was written to, except through `.data`; torch has no public name for this counter."""
    return 0 if tensor.is_inference() else tensor._version


def _first_change(old: Any, new: Any, versions: dict[int, int], where: str = "") -> str | None:
    """The path of the first item that is not the same object as it was, or the same plain value; None if all are."""
    if isinstance(old, list) and isinstance(new, list):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys((*old, *new)):
            path = f"{where}.{name}" if where else str(name)
            if name not in old or name not in new:
                return path
            found = _first_change(old[name], new[name], versions, path)
            if found is not None:
                return found
        return None
    if isinstance(old, Tensor):
        same = old is new and _version(old) == versions[id(old)]
    else:
        same = old is new or (isinstance(old, str | int | float) and type(old) is type(new) and old == new)
    return None if same else where
