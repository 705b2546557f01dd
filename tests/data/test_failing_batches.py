"""A batch that cannot be made: which samples do not fit, and where the data set has failed."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hydraloop.data import build_loader
from tests.data.loader_parts import Words, pad


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


def labels(samples: list[dict[str, int]]) -> Tensor:
    """Collates one entry."""
    return torch.tensor([sample["label"] for sample in samples])


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
    for begin in (0, first):
        error = first_error(Entries(13), begin, collate_fn=labels, num_workers=workers)
        assert isinstance(error, KeyError)
        text = "".join(traceback.format_exception(error))
        assert f"data.loader.collate_fn fails for the samples {loader.indices_at(first, 1)} of data.train" in text
        assert "in labels" in text, "the log has the user's line"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_stays_and_names_the_samples(workers: int) -> None:
    error = first_error(Failing(no_file), collate_fn=pad, num_workers=workers)
    assert isinstance(error, OSError)
    text = "".join(traceback.format_exception(error))
    assert re.search(r"data\.train: samples \[.*\b17\b.*\], in epoch 2", text)
