"""Weights from files of other tools: mmengine, Lightning, `torch.save` of a state dict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydraloop.errors import UserError

_STATE_DICTS = ("state_dict", "model", "model_state_dict")
"""Entries that contain the weights; the first one counts."""
_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts that DDP, torch.compile, checkpointing and FSDP add to names, around the model or any of its modules."""
_WITH_TUPLES = ("numpy.", "functools.partial")
"""Beginnings of the names of classes whose objects have a tuple as their state."""


@contextmanager
def other_objects_ignored(path: Path) -> Iterator[None]:
    """Let weights-only loading of a file in the body replace objects of other classes by empty stand-ins.

    Loading stays weights-only: torch's restricted unpickler builds tensors and containers. This only gives it a
    harmless class for each name that it would refuse, so nothing that the file names is imported or called. The file is
    still refused if it names a function of `os` or `sys`, or has objects of a kind that the stand-ins do not cover.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # loading it gives the reason
        names = []
    stand_ins: list[Any] = [(_Stateful if name.startswith(_WITH_TUPLES) else _Mapping, name) for name in names]
    with torch.serialization.safe_globals(stand_ins):
        yield


class _Mapping:
    """Stand-in for a class or function: a call returns an ordered dict, which the unpickler lets have items and
    attributes. A subclass of it could not have items."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return OrderedDict()


class _Stateful:
    """Stand-in for a class whose objects get a state that is not a mapping."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def find_weights(checkpoint: Mapping[str, Any], own: Collection[str], path: Path, key: str) -> dict[str, Any]:
    """Return the weights under `state_dict`, named without the wrappers of DDP, torch.compile, checkpointing and FSDP.

    Other entries are kept if there is a `meta`, which says whether there are averaged weights.

    Args:
        checkpoint: as loaded.
        own: the names in the model, which may begin with the same words as the wrappers' names.
        path: its file, for the error.
        key: the option that named the file, for the error.

    Raises:
        UserError: it contains no state dict.
    """
    inner = (checkpoint[entry] for entry in _STATE_DICTS if isinstance(checkpoint.get(entry), Mapping))
    state = next(inner, checkpoint)
    tensors = any(isinstance(value, Tensor) for value in state.values())
    if not tensors or not all(isinstance(name, str) for name in state):
        found = f"its entries are {', '.join(map(str, list(checkpoint)[:5]))}"
        if any("_modules" in getattr(value, "__dict__", ()) for value in (checkpoint, *checkpoint.values())):
            found = "it has a pickled model, which is not loaded"
        raise UserError(
            f"{path} contains no state dict; {found}",
            key=key,
            remedy="Save the state dict alone with torch.save(model.state_dict(), path) and load that.",
        )
    found_names = _names_in(own, state)
    if len({*found_names.values()}) == len(state):  # otherwise the parts are no wrappers
        state = {found_names[name]: value for name, value in state.items()}
    return {**(checkpoint if isinstance(checkpoint.get("meta"), Mapping) else {}), "state_dict": state}


def _names_in(own: Collection[str], names: Collection[str]) -> dict[str, str]:
    """Return the name in the model, or without wrappers, for each name in a file. A module may be called `module`."""
    of_model = {_without_wrappers(name): name for name in own}
    may_strip = of_model.keys() == {*own}  # no name in the model has such a part
    found = {}
    for name in names:
        stripped = _without_wrappers(name)
        found[name] = name if name in own else of_model.get(stripped, stripped if may_strip else name)
    return found


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
