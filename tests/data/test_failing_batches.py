"""A batch that cannot be made: which samples do not fit, and where the data set has failed."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hydraloop.data import build_loader
from hydraloop.errors import UserError
from tests.data.loader_parts import Words, pad
from tests.helpers import Recorder, make_engine


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


def first_error(data: Any, first: int = 0, **options: Any) -> BaseException:
    loader = build_loader(data, shuffle=True, seed=1, batch_size=4, key="data.train", **options)
    loader.set_epoch(1)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of several types
        list(loader.begin(first, first))
    loader.end_workers()  # torch waits 5 s for each worker whose iterator is collected as a part of a cycle
    return caught.value


@pytest.mark.parametrize("workers", [0, 2])
def test_the_samples_that_cannot_be_collated_are_named(workers: int) -> None:
    # The order of epoch 1: the position tells which batch has the sample.
    loader = build_loader(Entries(), shuffle=True, seed=1, batch_size=4)
    first = next(number for number in range(5) if 13 in loader.indices_at(number, 1))
    keys = {name: f"data.val_loader.{name}" for name in ("batch_size", "sampler", "batch_sampler", "collate_fn")}
    for begin in (0, first):
        collate = functools.partial(labels, scale=2)
        error = first_error(Entries(13), begin, collate_fn=collate, num_workers=workers, keys=keys)
        assert isinstance(error, UserError)
        assert error.key == "data.val_loader.collate_fn"
        samples = loader.indices_at(first, 1)
        assert error.problem == f"labels fails for the samples {samples} of data.train: KeyError: 'label'"
        assert "in labels" in "".join(traceback.format_exception(error)), "the log has the user's line"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_stays_and_names_the_samples(workers: int) -> None:
    error = first_error(Failing(no_file), collate_fn=pad, num_workers=workers)
    assert isinstance(error, OSError)
    text = "".join(traceback.format_exception(error))
    assert re.search(r"data\.train: samples \[.*\b17\b.*\], in epoch 2", text)


def test_a_validation_that_cannot_be_collated_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    val: Any = build_loader(Entries(3), shuffle=False, batch_size=4, key="data.val", collate_fn=labels)
    seen = Recorder()
    with pytest.raises(UserError, match=r"labels fails for the samples \[0, 1, 2, 3\] of data\.val") as caught:
        make_engine(tmp_path, {"seen": seen}, val=val, sanity_val_steps=2).train()
    assert caught.value.key == "data.loader.collate_fn"
    assert "before_train_iter 0" not in seen.trace
