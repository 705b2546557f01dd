"""Seeds made of several numbers, and the global generators of the CPU while data is loaded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy
import torch
from torch.utils.data import get_worker_info

_Loaded = TypeVar("_Loaded")
_numpy: Any = numpy.random  # its stubs lack public names
_KNOWN = random.Random(0).getstate()
_NEXT = random.Random(0).random()
_UNSEEDED, _SAME = _numpy.MT19937(0), _numpy.MT19937(0)
"""NumPy's generator for samples that do not draw, and another one in the same state."""
_SEEDED = _numpy.MT19937()
"""NumPy's generator for samples that draw."""
_MASK = (1 << 64) - 1


class SampleGenerators:
    """Seeds the global generators for each sample; Python's and NumPy's only if samples draw from them.

    Seeding the three takes 6 µs, and most data sets draw from one of them or from none. A draw is noticed after the
    batch: the generator has moved. Then the batch is loaded again, and this generator is seeded for each sample from
    now on. So in each process, only the first batch that draws is loaded twice. torch's generator is always seeded
    (1 µs), because a sample may read `torch.initial_seed()`, which does not move it.
    """

    def __init__(self) -> None:
        self._python = self._numpy = False  # whether samples draw from it

    def loaded(self, load: Callable[[Callable[[int], object]], _Loaded], *, exact: bool = False) -> _Loaded:
        """Return what `load` returns. In the training process, the run's generators keep their states.

        Args:
            load: is called with a function that seeds the generators (0 <= seed < 2^32). It is called again if it has
                drawn from a generator that the function did not seed.
            exact: see `private_generators`.
        """
        with private_generators(exact=exact):
            while True:
                self._watch()
                try:
                    loaded = load(self._seed if self._python or self._numpy else torch.default_generator.manual_seed)
                except Exception:
                    if not self._notices_draws():
                        raise
                else:
                    if not self._notices_draws():
                        return loaded

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._python:
            random.seed(seed)
        if self._numpy:
            _numpy.seed(seed)

    def _watch(self) -> None:
        """Bring the generators that are not seeded into known states."""
        if not self._python:
            random.setstate(_KNOWN)
        if not self._numpy:
            _numpy.set_bit_generator(_UNSEEDED)

    def _notices_draws(self) -> bool:
        """Return whether a generator that was not seeded has moved. It is seeded from now on."""
        python = not self._python and random.random() != _NEXT
        numpy = not self._numpy and _UNSEEDED.random_raw() != _SAME.random_raw()
        if numpy:
            _UNSEEDED.state = _SAME.state
            _numpy.set_bit_generator(_SEEDED)
        self._python, self._numpy = self._python or python, self._numpy or numpy
        return python or numpy


@contextmanager
def private_generators(*, exact: bool = False) -> Iterator[None]:
    """Restore the states of the global generators of the CPU after the body. In a loader worker, do nothing.

    Args:
        exact: restore also the second number of a pair that `numpy.random.randn` has drawn and not yet returned. This
            takes 70 µs, because NumPy has it only in a copy of the whole state. It is not needed if the body runs
            before every batch, as then a resumed run drops the same numbers.
    """
    if get_worker_info() is not None:
        yield
        return
    python, of_torch = random.getstate(), torch.default_generator.get_state()
    of_numpy, state = _numpy.get_bit_generator(), _numpy.get_state() if exact else None
    _numpy.set_bit_generator(_SEEDED)
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(of_torch)
        _numpy.set_bit_generator(of_numpy)
        if state is not None:
            _numpy.set_state(state)


def seed_generators(seed: int) -> None:
    """Seed the global generators of the CPU; 0 <= seed < 2^32."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which also seeds the devices
    _numpy.seed(seed)


def mix_seed(*parts: int) -> int:
    """Return a seed (0 .. 2^32 - 1) made of several numbers. Close numbers give unrelated seeds.

    Parts may be arrays of uint64 from NumPy. The seeds of all their items are then computed at once, as such an array:
    64 seeds take 20 µs, instead of 100 µs one by one.

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
