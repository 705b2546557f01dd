"""The stream of tar files in docs/how-to/data.md: split between ranks and workers, resumed at any batch."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.streams import stream_loader
from tests.data.test_stream import cut_run
from tests.docs.pages import blocks
from tests.e2e.projects import REPOSITORY

LENGTHS = (7, 3, 5, 6)


@pytest.fixture
def shards(tmp_path: Path) -> Callable[[], Any]:
    """Creates the stream, over tar files of different lengths; the label is the number of the sample."""
    number = 0
    for shard, length in enumerate(LENGTHS):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
            for _ in range(length):
                array = io.BytesIO()
                np.save(array, np.full((1, 2, 2), number, dtype=np.float32))
                for suffix, content in (("npy", array.getvalue()), ("cls", str(number).encode())):
                    entry = tarfile.TarInfo(f"{number:03}.{suffix}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
                number += 1
    (code,) = [b.text for b in blocks(REPOSITORY / "docs/how-to/data.md") if b.file == "my_project/shards.py"]
    names: dict[str, Any] = {}
    exec(compile(code, "shards.py", "exec"), names)
    return lambda: names["TarShards"](tmp_path)


def labels(batch: Any) -> list[int]:
    found: list[int] = batch[1].tolist()
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_was_cut_reads_what_a_whole_one_reads(shards: Callable[[], Any], workers: int) -> None:
    options = {"num_workers": workers}
    whole = cut_run(shards, (), 24, listed=labels, **options)
    assert cut_run(shards, (3, 4, 14, 20), 24, listed=labels, **options) == whole
    first_pass = list(chain(*whole))[: sum(LENGTHS)]
    assert first_pass != sorted(first_pass), "the shards are shuffled"


def test_ranks_and_workers_share_the_shards(shards: Callable[[], Any]) -> None:
    loaders = [
        stream_loader(shards(), train=False, steps_per_epoch=99, num_workers=2, rank=rank, world_size=2)
        for rank in range(2)
    ]
    assert sorted(label for loader in loaders for batch in loader for label in labels(batch)) == [*range(sum(LENGTHS))]
