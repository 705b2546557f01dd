"""The stream in docs/how-to/data.md, which reads files: split between ranks and workers, resumed at any batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.data.streams import stream_loader
from tests.data.test_stream import cut_run
from tests.docs.pages import blocks
from tests.e2e.projects import REPOSITORY

LENGTHS = (7, 3, 5, 6)


@pytest.fixture
def lines(tmp_path: Path) -> Callable[[], Any]:
    """Creates the stream, over files of different lengths; the label is the number of the sample."""
    numbers = iter(range(sum(LENGTHS)))
    for file, length in enumerate(LENGTHS):
        text = "\n".join(f"0.5,1.5,{next(numbers)}" for _ in range(length))
        (tmp_path / f"{file}.csv").write_text(text, encoding="utf-8")
    (code,) = [b.text for b in blocks(REPOSITORY / "docs/how-to/data.md") if b.file == "lines.py"]
    names: dict[str, Any] = {}
    exec(compile(code, "lines.py", "exec"), names)
    return lambda: names["Lines"](tmp_path)


def labels(batch: Any) -> list[int]:
    found: list[int] = batch[1].tolist()
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_was_cut_reads_what_a_whole_one_reads(lines: Callable[[], Any], workers: int) -> None:
    options = {"num_workers": workers}
    whole = cut_run(lines, (), 24, listed=labels, **options)
    assert cut_run(lines, (3, 4, 14, 20), 24, listed=labels, **options) == whole
    first_pass = list(chain(*whole))[: sum(LENGTHS)]
    assert first_pass != sorted(first_pass), "the files are shuffled"


def test_ranks_and_workers_share_the_files(lines: Callable[[], Any]) -> None:
    loaders = [
        stream_loader(lines(), train=False, steps_per_epoch=99, num_workers=2, rank=rank, world_size=2)
        for rank in range(2)
    ]
    assert sorted(label for loader in loaders for batch in loader for label in labels(batch)) == [*range(sum(LENGTHS))]
