"""A batch that cannot be made: which sample does not fit, which worker has died, and where the data set has failed."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hydraloop.data import build_loader
from hydraloop.errors import UserError
from hydraloop.examples import Digits
from hydraloop.tasks import Regression
from tests.data.loader_parts import Words, pad
from tests.helpers import Recorder, make_engine


@pytest.fixture(autouse=True)
def _collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Until its iterator is collected, torch raises the error of a dead worker again at any signal of a child."""
    yield
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    gc.collect()


class Entries(Dataset[dict[str, int]]):
    """Dicts, one of them without a label."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"text": index} if index == self.broken else {"text": index, "label": 1}


class Failing(Words):
    """A data set that fails, or ends its process, at a sample."""

    def __init__(self, fail: Callable[[], object]) -> None:
        super().__init__()
        self.fail = fail

    def __getitem__(self, index: int) -> list[int]:
        if index == 17:
            self.fail()
        return super().__getitem__(index)


def labels(samples: list[dict[str, int]], *, scale: int = 1) -> Tensor:
    """Collates one entry."""
    return torch.tensor([sample["label"] * scale for sample in samples])


def no_file() -> None:
    raise OSError("no file")


def end_process(number: int) -> None:
    os.kill(os.getpid(), number)


def first_error(data: Any, first: int = 0, **options: Any) -> BaseException:
    loader = build_loader(data, shuffle=True, seed=1, batch_size=4, key="data.train", **options)
    loader.set_epoch(1)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of several types
        list(loader.begin(first, first))
    loader.end_workers()  # torch waits 5 s for each worker whose iterator is collected as a part of a cycle
    return caught.value


@pytest.mark.parametrize("workers", [0, 2])
def test_the_sample_that_cannot_be_collated_is_named(workers: int) -> None:
    # The order of epoch 1: the position tells which batch has the sample.
    loader = build_loader(Entries(), shuffle=True, seed=1, batch_size=4)
    first = next(number for number in range(5) if 13 in loader.indices_at(number, 1))
    for begin in (0, first):
        error = first_error(Entries(13), begin, collate_fn=functools.partial(labels, scale=2), num_workers=workers)
        assert isinstance(error, UserError)
        assert error.key == "data.loader.collate_fn"
        assert "labels fails for sample 13 of data.train: KeyError: 'label'" in str(error)
        assert "dataset[13]" in str(error)


def test_a_sample_that_does_not_go_with_another_is_named() -> None:
    error = first_error(Words(), collate_fn=None)
    assert isinstance(error, UserError)
    assert "default_collate fails for sample" in str(error)
    assert "together with sample" in str(error)
    assert "data.loader.collate_fn" in str(error)


def test_a_collate_function_that_needs_more_samples_names_the_batch() -> None:
    def four(samples: list[int]) -> None:
        if len(samples) == 4:
            raise ValueError("four")

    error = first_error(Words(), collate_fn=four)
    assert "four fails for the samples [" in str(error)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_stays_and_names_the_sample(workers: int) -> None:
    error = first_error(Failing(no_file), collate_fn=pad, num_workers=workers)
    assert isinstance(error, OSError)
    assert not isinstance(error, UserError)
    (note,) = error.__notes__
    assert note.startswith("data.train: sample 17, in batch ")
    assert note.endswith("of epoch 2")


@pytest.mark.parametrize(
    ("fail", "text"), [(signal.SIGKILL, "killed by signal: Killed"), (None, "exited unexpectedly")]
)
def test_a_worker_that_dies_names_the_option(fail: signal.Signals | None, text: str) -> None:
    ends = functools.partial(os._exit, 1) if fail is None else functools.partial(end_process, fail)
    error = first_error(Failing(ends), collate_fn=pad, num_workers=1)
    assert isinstance(error, UserError)
    assert error.key == "data.loader.num_workers"
    assert text in str(error)
    assert "while it loaded data.train" in str(error)


@pytest.mark.slow
def test_a_timeout_names_the_option_and_loads_no_sample_again() -> None:
    waits = Failing(functools.partial(time.sleep, 3))
    error = first_error(waits, collate_fn=pad, num_workers=1, timeout=1)
    assert isinstance(error, UserError)
    assert error.key == "data.loader.timeout"
    assert "DataLoader timed out after 1 seconds, while it loaded data.train" in str(error)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_for_data_that_returns_whole_batches_is_refused(workers: int) -> None:
    error = first_error(Digits("val"), collate_fn=pad, num_workers=workers)
    assert isinstance(error, UserError)
    assert error.key == "data.loader.collate_fn"
    assert error.problem == "it would have no effect, because the data set returns whole batches from __getitems__"


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_name_the_section_that_sets_the_option(workers: int) -> None:
    names = (
        *("collate_fn", "num_workers", "timeout", "prefetch_factor"),
        *("batch_size", "sampler", "batch_sampler", "steps_per_epoch"),
    )
    keys = {name: f"data.val_loader.{name}" for name in names}
    error = first_error(Entries(13), collate_fn=labels, num_workers=workers, keys=keys)
    assert isinstance(error, UserError)
    assert error.key == "data.val_loader.collate_fn"
    error = first_error(Failing(functools.partial(os._exit, 1)), collate_fn=pad, num_workers=1, keys=keys)
    assert isinstance(error, UserError)
    assert error.key == "data.val_loader.num_workers"


def test_an_error_that_does_not_come_again_is_raised_as_it_was() -> None:
    failures = iter([True])

    def once(samples: list[list[int]]) -> Tensor:
        if next(failures, False):
            raise ValueError("only once")
        return pad(samples)

    error = first_error(Words(), collate_fn=once)
    assert isinstance(error, ValueError)
    assert str(error) == "only once"


def test_a_validation_that_cannot_be_collated_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    val: Any = build_loader(Entries(13), shuffle=False, batch_size=8, key="data.val", collate_fn=labels)
    seen = Recorder()
    with pytest.raises(UserError, match=r"labels fails for sample 13 of data\.val") as caught:
        make_engine(tmp_path, {"seen": seen}, val=val, sanity_val_steps=2).train()
    assert caught.value.key == "data.loader.collate_fn"
    assert "before_train_iter 0" not in seen.trace


class Killing(torch.nn.Module):
    """Kills a worker during a forward, and waits for torch's signal handler."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
        time.sleep(2)
        return outputs.sum()


def test_a_worker_that_dies_while_the_model_computes_is_named(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(40, 4), torch.zeros(40, 1))
    train = build_loader(data, shuffle=False, batch_size=4, num_workers=1, timeout=60)
    task = Regression(torch.nn.Linear(4, 1), Killing())
    engine = make_engine(tmp_path, train=train, task=task)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="killed by signal: Killed, while it loaded data") as caught:
        engine.train()
    assert caught.value.key == "data.loader.num_workers"
