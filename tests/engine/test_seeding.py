"""Seeds, and states of all generators that survive a file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hydraloop.engine.checkpoint.format import load, write
from hydraloop.engine.seeding import rng_state, seed_everything, seeded, set_rng_state


@pytest.fixture(autouse=True)
def _generators_restored() -> Iterator[None]:
    before = rng_state()
    yield
    set_rng_state(before)


def _draw() -> list[float]:
    # gauss() keeps a second number for the next call: it belongs to the state too.
    drawn = [random.random(), random.gauss(), float(np.random.rand()), float(np.random.randn())]
    return [*drawn, *torch.rand(3).tolist(), float(torch.randn(1))]


def test_the_same_seed_gives_the_same_numbers_and_another_one_others() -> None:
    seed_everything(3)
    first = _draw()
    seed_everything(3)
    assert _draw() == first
    seed_everything(4)
    assert all(one != other for one, other in zip(_draw(), first, strict=True))


def test_states_go_on_where_they_were_also_from_a_file(tmp_path: Path) -> None:
    seed_everything(5)
    _draw()
    state = rng_state()
    write(tmp_path / "rng.pth", {"rng": state})
    expected = [_draw(), _draw()]
    set_rng_state(state)
    assert [_draw(), _draw()] == expected
    seed_everything(9)
    set_rng_state(load(tmp_path / "rng.pth")["rng"])
    assert [_draw(), _draw()] == expected


def test_a_body_with_other_numbers_leaves_the_generators_as_they_were_also_after_an_error() -> None:
    seed_everything(6)
    expected = [_draw(), _draw()]
    seed_everything(6)
    with pytest.raises(ZeroDivisionError), seeded(7):
        _ = _draw()[0] / 0
    assert _draw() == expected[0]
    with seeded(7):
        inside = _draw()
    assert _draw() == expected[1]
    seed_everything(7)
    assert _draw() == inside


class Accelerators:
    """Accelerators that are not there, each with a generator of the CPU; `current` is the index of the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
        self.current = 0
        self.generators = [torch.Generator().manual_seed(index) for index in range(count)]
        self.touched: set[int] = set()
        module = SimpleNamespace(get_rng_state=self._get, set_rng_state=self._set, manual_seed_all=lambda seed: None)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind) if count else None
        )
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: self.current)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    def _get(self) -> torch.Tensor:
        self.touched.add(self.current)
        return self.generators[self.current].get_state()

    def _set(self, state: torch.Tensor) -> None:
        self.touched.add(self.current)
        self.generators[self.current].set_state(state)

    def draw(self) -> list[float]:
        return torch.rand(3, generator=self.generators[self.current]).tolist()


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_the_generator_of_the_own_accelerator_is_restored(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    accelerators = Accelerators(monkeypatch, kind, 3)
    accelerators.current = 1
    before = rng_state()
    with seeded(0):
        first = accelerators.draw()
    assert accelerators.draw() == first
    set_rng_state(before)
    assert accelerators.draw() == first
    assert accelerators.touched == {1}, "saving costs no call for other devices"
