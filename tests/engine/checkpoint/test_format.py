"""Checkpoint files: whole or absent, without pickle, found again."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hydraloop.engine.checkpoint.format import FORMAT, check_loadable, check_resumable, evaluation_weights, load, write
from hydraloop.errors import Terminated, UserError
from tests.helpers import differences

# Writing. ------------------------------------------------------------------------------------------------------------


@contextmanager
def _full_disk(limit: int) -> Iterator[None]:
    """Files cannot grow beyond `limit` bytes: the system's own error, in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "epoch_1.pth"
    write(path, {"a": torch.ones(2)})
    before = path.read_bytes()
    for target in (path, tmp_path / "new.pth"):
        with pytest.raises(OSError, match="File too large") as caught, _full_disk(20_000):
            write(target, {"a": torch.zeros(100_000)})
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(target))
        assert path.read_bytes() == before
        assert [entry.name for entry in tmp_path.iterdir()] == ["epoch_1.pth"]


def test_a_signal_while_writing_is_raised_and_leaves_the_old_file(tmp_path: Path) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        in_callback = frame is not None and frame.f_code.co_name == "remove"  # of a weak reference: it would be lost
        if list(tmp_path.glob(".*")) and not in_callback:  # in the middle of the file
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Terminated(number)

    path = tmp_path / "epoch_1.pth"
    write(path, {"a": 1})
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        with pytest.raises(Terminated):
            write(path, {"a": [torch.ones(2) for _ in range(5_000)]})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert load(path) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["epoch_1.pth"]


def test_writing_replaces_the_old_file_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "epoch_1.pth"
    write(path, {"a": 1})
    write(path, {"a": 2})
    assert load(path) == {"a": 2}
    assert [entry.name for entry in path.parent.iterdir()] == ["epoch_1.pth"]


class _Integer(int):
    pass


@pytest.mark.parametrize(
    "value",
    [object(), print, _Integer(3), {_Integer(3): 1}, Path("a"), nn.Linear(1, 1), lambda: None, np.float64(1)],
    ids=lambda value: type(value).__name__,
)
def test_what_could_not_be_loaded_is_refused_and_named(value: Any) -> None:
    with pytest.raises(UserError, match="cannot be loaded without pickle") as caught:
        check_loadable({"hooks": {"mine": {"list": [1, {"value": value}]}}}, "checkpoint")
    assert "checkpoint['hooks']['mine']['list'][1]['value']" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        2**80,
        float("inf"),
        1 + 2j,
        b"bytes",
        [1, [2.0]],
        (1, (2, "three")),
        {1, 2},
        OrderedDict(a=1),
        Counter("abca"),
        torch.Size([2, 3]),
        torch.float16,
        torch.device("cuda", 1),
        torch.arange(6).reshape(2, 3),
        torch.ones(2, dtype=torch.bfloat16),
        nn.Parameter(torch.ones(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_written_comes_back_as_it_was(tmp_path: Path, value: Any) -> None:
    write(tmp_path / "a.pth", {"value": value})
    loaded = load(tmp_path / "a.pth")["value"]
    assert type(loaded) is type(value)
    assert list(differences(loaded, value)) == []


# Loading. ------------------------------------------------------------------------------------------------------------


class _Evil:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_a_file_with_pickled_objects_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    path, marker = tmp_path / "evil.pth", tmp_path / "marker"
    torch.save({"state_dict": {}, "object": _Evil(marker)}, path)
    with pytest.raises(UserError, match="more than tensors and plain values") as caught:
        load(path, key="load_from")
    assert not marker.exists()
    assert caught.value.key == "load_from"
    assert "If you trust the file" in str(caught.value)
    assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
    assert f"({_Evil.__reduce__(_Evil(marker))[0].__module__}.mkdir)" in str(caught.value), "what the file names"
    assert "safe_globals" not in str(caught.value), "the advice of torch"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    before = tmp_path / "epoch_2.pth"
    write(before, {})
    path = tmp_path / "epoch_3.pth"
    write(path, {"state_dict": {"weight": torch.randn(1000)}})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(
        UserError, match=r"is not a complete checkpoint|is damaged: its (table of contents|end)"
    ) as caught:
        load(path)
    assert caught.value.key == "resume"
    assert str(caught.value.remedy) == f"Use the checkpoint before it: resume={before}"


def test_a_file_that_is_not_there_or_no_checkpoint_is_a_clear_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no checkpoint file"):
        load(tmp_path / "epoch_9.pth")
    with pytest.raises(UserError, match="there is no checkpoint file"):
        load(tmp_path)
    torch.save(torch.ones(2), tmp_path / "tensor.pth")
    with pytest.raises(UserError, match="contains a Tensor, not a checkpoint"):
        load(tmp_path / "tensor.pth")
    with zipfile.ZipFile(tmp_path / "other.pth", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(UserError):
        load(tmp_path / "other.pth")
    (tmp_path / "text.pth").write_text("hello")
    with pytest.raises(UserError, match="is not a checkpoint"):
        load(tmp_path / "text.pth")


ENTRIES = ("state_dict", "meta", "progress", "rng", "hooks", "precision")


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_file_without_the_rest_of_a_run_cannot_be_resumed(tmp_path: Path, entry: str) -> None:
    checkpoint: dict[str, Any] = {"format": FORMAT, **{key: {} for key in ENTRIES}}
    check_resumable(checkpoint, Path("a.pth"))
    del checkpoint[entry]
    with pytest.raises(UserError, match=f"has no {entry}") as caught:
        check_resumable(checkpoint, Path("a.pth"))
    assert "load_from=a.pth" in str(caught.value)


def test_another_format_is_refused() -> None:
    checkpoint: dict[str, Any] = {"format": FORMAT + 1, **{key: {} for key in ENTRIES}}
    with pytest.raises(UserError, match=f"the checkpoint format {FORMAT + 1}"):
        check_resumable(checkpoint, Path("a.pth"))


# Weights. ------------------------------------------------------------------------------------------------------------


def _with_average() -> dict[str, Any]:
    return {
        "meta": {"averaged_weights": "my_ema"},
        "state_dict": {"weight": torch.zeros(2), "buffer": torch.zeros(1)},
        "hooks": {"my_ema": {"averaged": {"weight": torch.ones(2)}}},
    }


def test_evaluation_takes_the_average_where_there_is_one() -> None:
    checkpoint = _with_average()
    weights = evaluation_weights(checkpoint)
    assert weights["weight"].tolist() == [1, 1]
    assert weights["buffer"].tolist() == [0], "what is not averaged is the raw model's"
    assert checkpoint["state_dict"]["weight"].tolist() == [0, 0], "the checkpoint is not changed"
    assert evaluation_weights(checkpoint, "raw")["weight"].tolist() == [0, 0]
