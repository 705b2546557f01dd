"""`python train.py predict`: the predictions of a finished run, in the order of the data.

A file is `.jsonl` with one line for each sample, or `.npz` with one array for each output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydraloop.commands.evaluate import FinishedRun, new_file, run_on_ranks
from hydraloop.commands.parser import OnRun
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.errors import UserError
from hydraloop.files import atomic
from hydraloop.files.config_yaml import plain
from hydraloop.launch.other_ranks import Peers

FORMATS = (".jsonl", ".npz")
OUTPUT = "output"
"""The name of predictions that have none: a tensor or a list instead of a dict."""

Parts = Iterator[tuple[str, Any]]
"""The name of the data set (empty for a single one), and what `engine.predict` yields."""


def run(typed: OnRun, argv: Sequence[str], peers: Peers) -> None:
    """Write the predictions for one split, and print the path of the file.

    Raises:
        UserError: the file exists, or has an unknown format.
        BaseException: as of `run_on_ranks`.
    """
    output = new_file(typed, "predictions.jsonl")
    if output.suffix not in FORMATS:
        remedy = f"Use {output.stem}.jsonl or .npz."
        raise UserError(f"{output} is neither JSON lines nor NumPy's format", key="output", remedy=remedy)
    run_on_ranks(typed, partial(predict, output), argv, peers)


def predict(output: Path, finished: FinishedRun, ranks: Distributed) -> str:
    """Predict on all ranks, and write the file on rank 0. Returns its path."""
    engine = finished.engine(ranks, finished.split)
    loaders = finished.data(engine)
    parts = ((name, part) for name, loader in loaders.items() for part in engine.predict(loader))
    if ranks.is_main:
        write(output, parts)
    else:
        for _ in parts:  # takes part in collectives
            pass
    return str(output)


def write(path: Path, parts: Parts) -> None:
    """Write all predictions to a file, whose suffix says the format. It appears when it is complete.

    Raises:
        UserError: an array cannot have values of their type.
        ValueError: the predictions have different shapes, and cannot be an array.
    """
    with atomic.replacing(path) as unfinished:
        if path.suffix == ".npz":
            arrays = _arrays(parts)
            with unfinished.open("wb") as binary:
                np.savez(binary, **arrays)
            return
        with unfinished.open("w", encoding="utf-8") as text:
            for row in _rows(parts):
                text.write(json.dumps(plain(row)) + "\n")


def _columns(part: Any) -> Mapping[str, Any]:
    return part if isinstance(part, Mapping) else {OUTPUT: part}


def _rows(parts: Parts) -> Iterator[dict[str, Any]]:
    """Yield a line for each sample: the data set if there are several, the position in it, and the outputs."""
    counts: dict[str, int] = {}
    for data_set, part in parts:
        columns = _columns(part)
        for sample in zip(*columns.values(), strict=True):
            counts[data_set] = index = counts.get(data_set, -1) + 1
            where = {"data_set": data_set} if data_set else {}
            yield dict(**where, index=index, **dict(zip(columns, sample, strict=True)))  # refuses an output `index`


def _arrays(parts: Parts) -> dict[str, Any]:
    """Return the arrays by name; with several data sets `<data set>/<output>`."""
    found: dict[str, list[Any]] = {}
    for data_set, part in parts:
        for name, value in _columns(part).items():
            found.setdefault(f"{data_set}/{name}".lstrip("/"), []).append(_array(value))
    return {name: np.concatenate(arrays) for name, arrays in found.items()}


def _array(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy()  # NumPy has no bfloat16
    array = np.array(value)
    if array.dtype == object:
        problem = f"there are values of type {type(value[0]).__name__}, which an array cannot have"
        raise UserError(problem, key="output", remedy="Use JSON lines: output=predictions.jsonl")
    return array
