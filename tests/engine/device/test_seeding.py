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
from hydraloop.engine.device.seeding import rng_state, seed_everything, seeded, set_rng_state, with_states


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


@pytest.mark.parametrize("seed", [0, 2**32 + 5, 2**63 - 1])
def test_any_seed_is_taken(seed: int) -> None:
    seed_everything(seed)
    first = _draw()
    seed_everything(seed)
    assert _draw() == first


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
    with seeded(7) as outside:
        with with_states(outside):
            assert _draw() == expected[1]
        inside = _draw()
    assert rng_state()["python"][1].equal(outside["python"][1])
    seed_everything(7)
    assert _draw() == inside


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_generators_of_other_accelerators_are_restored(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    generator = torch.Generator()
    module = SimpleNamespace(get_rng_state=generator.get_state, set_rng_state=generator.set_state)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    before = generator.get_state()
    with seeded(0):
        torch.rand(3, generator=generator)
    assert generator.get_state().equal(before)


def _gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[list[torch.Tensor]]:
    """Make torch report GPUs; return the states to which their generators are set."""
    put_back: list[list[torch.Tensor]] = []
    states = [torch.full((16,), index, dtype=torch.uint8) for index in range(count)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", put_back.append)
    return put_back


@pytest.mark.parametrize("now", [0, 1, 2, 3])
def test_generator_states_of_gpus_are_put_back_or_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, now: int
) -> None:
    _gpus(monkeypatch, 2)
    state = rng_state()
    put_back = _gpus(monkeypatch, now)
    set_rng_state(state)
    warnings = [record.getMessage() for record in caplog.records]
    if now == 2:
        assert (put_back, warnings) == ([state["cuda"]], [])
    else:
        assert (put_back, len(warnings)) == ([], 1)
        assert f"states of 2 GPUs, and there are {now} now" in warnings[0]
