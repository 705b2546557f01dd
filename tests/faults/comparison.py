"""What is equal in two runs, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hydraloop.engine.checkpoint.format import load
from tests.e2e.projects import Run

_TIMES = {"time", "data_time", "samples_per_second", "memory", "eta", "timestamp"}


def differences(one: Run, other: Run) -> list[str]:
    """Return what differs between two runs, apart from times: names of entries, and both values."""
    return [*differences_of_files(one, other), *compared("ledger", ledger(one), ledger(other))]


def differences_of_files(one: Run, other: Run) -> list[str]:
    """Return the same for runs without a ledger."""
    return [
        *compared("checkpoint", _checkpoint(one), _checkpoint(other)),
        *compared("result", result(one), result(other)),
        *compared("records", _records(one), _records(other)),
    ]


def ledger(run: Run) -> dict[str, Any]:
    """Return what each rank saw in each iteration, in the newest attempt that reached it."""
    lines = [json.loads(line) for line in (run.path / "ledger").read_text(encoding="utf-8").splitlines()]
    found = {f"{line['iteration']}, rank {line['rank']}": line for line in lines}
    return dict(sorted(found.items()))


def _checkpoint(run: Run) -> dict[str, Any]:
    """Return the newest checkpoint, without times and paths."""
    newest = (run.path / "checkpoints" / "last_checkpoint").read_text(encoding="utf-8").strip()
    checkpoint = load(run.path / "checkpoints" / Path(newest).name)
    for of_process in ("time", "seconds", "config"):
        checkpoint["meta"].pop(of_process, None)
    checkpoint["hooks"] = {name: state for name, state in checkpoint["hooks"].items() if name != "checkpoint"}
    return checkpoint


def result(run: Run) -> dict[str, Any]:
    found = {name: run.result[name] for name in ("status", "progress", "val_metrics", "test_metrics", "best")}
    found["best"] = {name: value for name, value in found["best"].items() if name != "checkpoint"}  # a path
    return found


def _records(run: Run) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name not in _TIMES} for record in run.records]


def compared(name: str, one: Any, other: Any) -> Iterator[str]:
    """Yield the entries that differ."""
    if type(one) is not type(other):
        yield f"{name}: {one!r} and {other!r}"
    elif isinstance(one, dict):
        for key in {**one, **other}:
            yield from compared(f"{name}.{key}", one.get(key), other.get(key))
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            yield f"{name}: {len(one)} and {len(other)} entries"
        for index, (first, second) in enumerate(zip(one, other, strict=False)):
            yield from compared(f"{name}.{index}", first, second)
    elif isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.numpy().tobytes() != other.numpy().tobytes():
            yield f"{name}: {one.flatten()[:4].tolist()} and {other.flatten()[:4].tolist()}"
    elif one != other and not (one != one and other != other):
        yield f"{name}: {one!r} and {other!r}"
