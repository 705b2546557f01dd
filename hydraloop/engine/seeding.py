"""Seeds, and the states of every random number generator a run draws from."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's (where it is imported) and torch's generators, all devices included."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def rng_state() -> dict[str, Any]:
    """The states of all generators, as tensors, numbers and lists (loadable without pickle)."""
    state: dict[str, Any] = {"python": _as_lists(random.getstate()), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what `rng_state` returned. A device that is not here now is passed over."""
    random.setstate(_as_tuples(state["python"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def of_all_ranks(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry for a checkpoint out of all ranks' states: rank 0's, and the others' in it."""
    return states[0] if len(states) == 1 else {**states[0], "other_ranks": states[1:]}


def of_rank(state: dict[str, Any], rank: int) -> dict[str, Any] | None:
    """A rank's state out of `of_all_ranks`; None where the run had fewer ranks."""
    others = state.get("other_ranks", [])
    if rank == 0:
        return state
    return others[rank - 1] if rank <= len(others) else None


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value
