"""Seeds, deterministic kernels, threads, and saving and restoring the states of all random number generators."""

from __future__ import annotations

import functools
import os
import random
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_MASK = (1 << 64) - 1


def use_deterministic_kernels(wanted: bool) -> None:
    """Forbid nondeterministic kernels in torch, or allow them again. Called before the first matrix product.

    With CUDA, torch then needs a fixed cuBLAS workspace from the environment; a value that is set is kept.
    """
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # 24 MiB; torch's documentation names it and :16:8
    if wanted != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(wanted)  # imports torch's compiler, 1 s


def use_threads(count: int | None) -> None:
    """Set torch's number of threads; None: as before the first run of this process."""
    torch.set_num_threads(count or _default_threads())


@functools.cache
def _default_threads() -> int:
    return torch.get_num_threads()


def mix_seed(*parts: int) -> int:
    """Return a seed (0 .. 2^32 - 1) made of several numbers. Close numbers give unrelated seeds.

    torch's generator on the CPU keeps 32 bits of its seed, so `seed + epoch` would give run 0 the epochs of run 1, and
    `seed << 32` would be lost.

    Source: the finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, 2014).
    """
    mixed = 0
    for part in parts:
        mixed = (mixed + part + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed = mixed ^ (mixed >> 31)
    return mixed >> 32


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's (where it is imported) and torch's generators, all devices included."""
    random.seed(seed)
    if torch.accelerator.current_accelerator(check_available=True) is None:
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` formats four stacks, for devices to come
    else:
        torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def rng_state() -> dict[str, Any]:
    """Return the states of all generators, as tensors, numbers and lists (loadable without pickle).

    Of several accelerators, that of the current one.
    """
    version, keys, gauss = random.getstate()
    numbers = torch.frombuffer(array("q", keys), dtype=torch.int64)  # torch.tensor(keys) takes ten times as long
    state: dict[str, Any] = {"python": [version, numbers, gauss], "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        with suppress(torch.AcceleratorError):  # after an assertion of a GPU; the run ends with the error of it
            state[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    return state


def set_rng_state(state: dict[str, Any] | None) -> None:
    """Restore what `rng_state` returned. A generator without a saved state keeps its own; None: all of them."""
    if state is None:
        return
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, keys.tolist(), *rest))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    own = None if accelerator is None else state.get(accelerator.type)
    if own is not None:
        with suppress(torch.AcceleratorError):  # as in `rng_state`
            torch.get_device_module(accelerator).set_rng_state(own)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """In the body, the generators start from `seed`; then they are as before. No device sync."""
    before = rng_state()
    seed_everything(seed)
    try:
        yield
    finally:
        set_rng_state(before)


def of_all_ranks(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine all ranks' states into one entry for a checkpoint: rank 0's, with the others in it."""
    return states[0] if len(states) == 1 else {**states[0], "other_ranks": states[1:]}


def of_rank(state: dict[str, Any], rank: int) -> dict[str, Any] | None:
    """Return a rank's state from what `of_all_ranks` returned; None if the run had fewer ranks."""
    states = [state, *state.get("other_ranks", [])]
    return states[rank] if rank < len(states) else None
