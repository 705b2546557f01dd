"""TensorBoardTracker: TensorBoard's own loaders find each record once, also after errors."""

from __future__ import annotations

import copy
import json
import logging
import math
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import (
    STORE_EVERYTHING_SIZE_GUIDANCE,
    EventAccumulator,
)
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto import event_pb2
from tensorboard.plugins.hparams import api_pb2, metadata

from hydraloop.run_files.record_log import LoggedObject, Record
from hydraloop.tracking.tensorboard import TensorBoardTracker
from hydraloop.tracking.tracker import Attempt, Finish, LostError, Run, Sweep, UnusableError

BEGAN = 1_700_000_000.5


def run_in(path: Path, *, resumed_at: Sequence[int] = (), params: dict[str, Any] | None = None, **fields: Any) -> Run:
    given = {"optimizer.lr": 0.1, "seed": 3, "task.metrics.accuracy._target_": "x", **(params or {})}
    attempts = tuple(
        Attempt(n, iteration, given, "", {"host": "here"}, BEGAN + 60 * n, 100 + n)
        for n, iteration in enumerate((0, *resumed_at))
    )
    path.mkdir(parents=True, exist_ok=True)
    return Run(path, "uid", "digits", "name", attempts, **fields)


def record(
    index: int, iteration: int, mode: str = "train", *, picture: str = "", histograms: str = "", **values: float
) -> Record:
    values = values or ({"loss": index / 8} if mode == "train" else {"accuracy": index / 128, "loss": index / 8})
    objects = [LoggedObject("image", f"{mode}/predictions", picture)] if picture else []
    objects += [LoggedObject("histogram", f"{mode}/histograms", histograms)] if histograms else []
    return Record(index, mode, 1, iteration, BEGAN + index, {} if objects else values, {}, tuple(objects))


def training(first: int, last: int, *, index: int | None = None) -> list[Record]:
    """One record for each iteration from `first` to `last`, starting at line `index`."""
    begin = first if index is None else index
    return [record(begin + n, first + n) for n in range(last - first + 1)]


def opened(run: Run, memory: dict[str, Any] | None = None, **options: Any) -> TensorBoardTracker:
    tracker = TensorBoardTracker(options, run, {} if memory is None else memory)
    tracker.open()
    return tracker


def folder_of(run: Run) -> Path:
    return run.run_dir / "tensorboard" / (run.name if run.sweep is not None else "")


def read(run: Run) -> EventAccumulator:
    found = EventAccumulator(str(folder_of(run)), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE)
    assert found.purge_orphaned_data
    return found.Reload()


def steps(run: Run | EventAccumulator, tag: str = "train/loss") -> list[int]:
    found = read(run) if isinstance(run, Run) else run
    return [event.step for event in found.Scalars(tag)] if tag in found.Tags()["scalars"] else []


def raw(run: Run) -> list[Any]:
    """All events in the files, including those that a loader would drop."""
    files = sorted(folder_of(run).iterdir())
    return [event_pb2.Event.FromString(event) for file in files for event in RawEventFileLoader(str(file)).Load()]


def written(run: Run, tag: str = "train/loss") -> list[int]:
    return [event.step for event in raw(run) for value in event.summary.value if value.tag == tag]


def session(run: Run) -> tuple[dict[str, Any], Any]:
    """Hyperparameters, and the status at the end (None before it)."""
    content = read(run).PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(content["_hparams_/session_start_info"])
    end = content.get("_hparams_/session_end_info")
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    return values, None if end is None else metadata.parse_session_end_info_plugin_data(end).status


# What is in the files. -----------------------------------------------------------------------------------------------


def test_scalars_have_tag_step_and_the_time_of_their_record(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    tracker = opened(run)
    tracker.send([record(0, 10, loss=0.5, lr=0.25), record(1, 20, loss=math.nan, lr=math.inf)])
    tracker.send([record(2, 20, "val", accuracy=0.75)])
    found = read(run)
    loss, lr, (accuracy,) = (found.Scalars(tag) for tag in ("train/loss", "train/lr", "val/accuracy"))
    assert [(event.step, event.wall_time) for event in loss] == [(10, BEGAN), (20, BEGAN + 1)]
    assert loss[0].value == 0.5
    assert math.isnan(loss[1].value)
    assert [event.value for event in lr] == [0.25, math.inf]
    assert (accuracy.step, accuracy.value, accuracy.wall_time) == (20, 0.75, BEGAN + 2)


def test_speed_is_not_the_first_that_is_seen(tmp_path: Path) -> None:
    """TensorBoard sorts groups by name, and opens the first two."""
    run = run_in(tmp_path)
    opened(run).send([record(0, 1, loss=0.5, time=1.0), record(1, 1, "val"), record(2, 1, "test")])
    groups = sorted({tag.partition("/")[0] for tag in read(run).Tags()["scalars"]})
    assert groups == ["test", "train", "train_perf", "val"]


def test_everything_is_on_disk_when_send_returns(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    tracker = opened(run)
    for n in range(3):
        tracker.send([record(n, n + 1)])
        assert steps(run) == list(range(1, n + 2))


def picture(run_dir: Path, name: str = "visualization/val_iter_4.png") -> bytes:
    path = run_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (7, 5), (200, 10, 10)).save(path)
    return path.read_bytes()


def test_pictures_are_there_as_they_are(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    content = picture(tmp_path)
    shown = [record(0, 4, "val", picture="visualization/val_iter_4.png")]
    opened(run).send(shown)
    (image,) = read(run).Images("val/predictions")
    assert (image.step, image.width, image.height, image.encoded_image_string) == (4, 7, 5, content)


def test_pictures_can_be_left_out(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    picture(tmp_path)
    opened(run, pictures=False).send([record(0, 4, "val", picture="visualization/val_iter_4.png")])
    assert read(run).Tags()["images"] == []


def test_a_picture_that_is_gone_or_is_none_is_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_in(tmp_path)
    (tmp_path / "notes.txt").write_text("no picture")
    tracker = opened(run)
    tracker.send([record(0, 4, "val", picture="notes.txt"), record(1, 5)])
    tracker.send([record(2, 6, "val", picture="gone.png"), record(3, 7)])
    assert read(run).Tags()["images"] == []
    assert steps(run) == [5, 7]
    assert [line.getMessage() for line in caplog.records] == [
        "notes.txt is skipped, as others like it will be: it is not a PNG file"
    ]


def test_names_that_are_no_unicode_block_nothing(tmp_path: Path) -> None:
    """Bytes of a command line or a file name that are not UTF-8 become question marks."""
    run = run_in(tmp_path, params={"task.metrics.caf\udce9": "se\udce9n"})
    tracker = opened(run, hparams=["task"])
    measured: dict[str, Any] = {"caf\udce9": 0.5}
    tracker.send([record(0, 10, **measured), record(1, 20, "val", **measured)])
    (tmp_path / "h.json").write_text(json.dumps({"caf\udce9": {"bucket": [], "nonfinite": 3}}))
    tracker.send([record(2, 30, histograms="h.json")])
    tracker.finish(Finish("finished"))
    found = read(run)
    assert [found.Scalars(tag)[0].value for tag in ("train/caf?", "val/caf?", "nonfinite/caf?")] == [0.5, 0.5, 3.0]


@pytest.mark.parametrize("content", ["[]", "[" * 100_000, '{"w": {"bucket": [1], "min": "x"}}'])
def test_broken_histograms_are_left_out(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    """Their records are written, and there is one warning."""
    run = run_in(tmp_path)
    (tmp_path / "h.json").write_text(content)
    tracker = opened(run)
    tracker.send([record(n, n + 1, histograms="h.json") for n in range(3)])
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 1


def test_histograms_are_taken_from_their_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_in(tmp_path)
    facts = {"min": -1.0, "max": 3.0, "num": 4, "sum": 4.0, "sum_squares": 12.0, "nonfinite": 2}
    none = {"min": 0.0, "max": 0.0, "num": 0, "sum": 0.0, "sum_squares": 0.0, "nonfinite": 5}
    content = {
        "weights/a": {**facts, "bucket_limit": [1.0, 3.0], "bucket": [1, 3]},
        "gradients/a": {**none, "bucket_limit": [], "bucket": []},
    }
    (tmp_path / "iter_4.json").write_text(json.dumps(content))
    (tmp_path / "torn.json").write_text(json.dumps(content)[:40])
    tracker = opened(run)
    tracker.send([record(0, 4, histograms="iter_4.json"), record(1, 5, histograms="torn.json")])
    found = read(run)
    (event,) = found.Histograms("weights/a")
    value = event.histogram_value
    assert (event.step, value.min, value.max, value.num, value.sum, value.sum_squares) == (4, -1.0, 3.0, 4, 4.0, 12.0)
    assert (list(value.bucket_limit), list(value.bucket)) == ([1.0, 3.0], [1.0, 3.0])
    assert [event.value for event in found.Scalars("nonfinite/gradients/a")] == [5.0]
    assert [event.value for event in found.Scalars("nonfinite/weights/a")] == [2.0]
    assert found.Tags()["histograms"] == ["weights/a"]
    assert [line.getMessage().split(",")[0] for line in caplog.records] == ["torn.json is skipped"]


def test_the_first_object_of_a_kind_that_cannot_be_shown_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_in(tmp_path)
    (tmp_path / "media").mkdir()
    files = [LoggedObject("artifact", f"train/{name}", f"media/{name}") for name in ("a.npz", "b.npz")]
    broken = LoggedObject("table", "train/t", "media/t.json")
    (tmp_path / "media" / "t.json").write_text('{"columns": ["a"]}')
    tracker = opened(run)
    for n, one in enumerate((*files, broken)):
        (tmp_path / one.path).touch()
        tracker.send([replace(record(n, n + 1), objects=(one,))])
    assert steps(run) == [1, 2, 3]
    assert [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING] == [
        "media/a.npz is skipped, as others like it will be: TensorBoard does not show files",
        "media/t.json is skipped, as others like it will be: 'rows'",
    ]


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("lr=0.1,hooks=[ema]", "lr=0.1,hooks=[ema]"),
        ("data=../x y", "data=.._x_y"),
        ("..", "job"),
        ("é" * 200, "é" * 70 + "-df20b2aa"),
    ],
)
def test_a_job_of_a_sweep_is_named_by_its_folder(tmp_path: Path, name: str, folder: str) -> None:
    sweep = Sweep(tmp_path, "uid", "name", 0, ("optimizer.lr",))
    run = replace(run_in(tmp_path / "0", sweep=sweep), name=name)
    assert opened(run).where == f"tensorboard --logdir {tmp_path}"
    assert [path.name for path in (tmp_path / "0" / "tensorboard").iterdir()] == [folder]


# The HPARAMS tab. ----------------------------------------------------------------------------------------------------


def test_a_session_begins_with_its_hyperparameters_and_ends_with_its_status(tmp_path: Path) -> None:
    run = run_in(tmp_path, params={"optimizer.weight_decay": None, "precision.name": "bf16", "engine.test": True})
    tracker = opened(run, hparams=["optimizer", "precision.name", "engine.test", "see"])
    assert session(run) == (
        {"optimizer.lr": 0.1, "optimizer.weight_decay": "null", "precision.name": "bf16", "engine.test": True}, None
    )  # fmt: skip
    assert session(run)[0]["engine.test"] is True, "a switch, not a number"
    tracker.send(training(1, 2))
    tracker.finish(Finish("finished"))
    assert session(run)[1] == api_pb2.STATUS_SUCCESS


def test_each_of_several_optimizers_is_in_the_table(tmp_path: Path) -> None:
    shown = {"optimizer.rest._target_": "torch.optim.AdamW", "optimizer.rest.lr": 0.1, "optimizer.hidden.lr": 0.2}
    run = run_in(tmp_path, params={**shown, "optimizer.rest.eps": 1e-8, "optimizer.groups.0.lr": 0.3})
    opened(run)
    assert session(run)[0] == {"optimizer.lr": 0.1, "seed": 3, **shown}


@pytest.mark.parametrize(("status", "code"), [("failed", 1), ("interrupted", 130), ("killed", 137)])
def test_a_run_that_did_not_come_to_its_end_has_failed(tmp_path: Path, status: Any, code: int) -> None:
    run = run_in(tmp_path)
    opened(run).finish(Finish(status, "an error", code))
    assert session(run)[1] == api_pb2.STATUS_FAILURE


def overrides(run_dir: Path, *lines: str) -> None:
    (run_dir / ".hydra").mkdir()
    (run_dir / ".hydra" / "overrides.yaml").write_text(json.dumps(lines))


def test_hyperparameters_are_what_was_typed_and_what_is_well_known(tmp_path: Path) -> None:
    overrides(
        tmp_path, "model=gpt", "hooks=[ema]", "optimizer.lr=1e-1", "++data.root=/data", "~default_hooks.progress",
        "resume=auto", "data.api_key=verysecretvalue",
    )  # fmt: skip
    run = run_in(tmp_path, params={"data.root": "/data", "data.api_key": "***", "engine.max_epochs": 5})
    opened(run)
    assert session(run)[0] == {
        "seed": 3.0, "optimizer.lr": 0.1, "model": "gpt", "hooks": "[ema]", "data.root": "/data",
        "default_hooks.progress": "removed", "data.api_key": "***",
    }  # fmt: skip


def test_secrets_of_the_command_line_are_masked(tmp_path: Path) -> None:
    overrides(tmp_path, "+somewhere.token=verysecretvalue")
    run = run_in(tmp_path)
    opened(run)
    assert not any(b"verysecretvalue" in path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())


def columns(run: Run) -> tuple[dict[str, bool], list[str]]:
    """Columns of the table: hyperparameters with whether they differ, and metrics."""
    content = read(run).PluginTagToContent("hparams")[metadata.EXPERIMENT_TAG]
    found = metadata.parse_experiment_plugin_data(content)
    return {info.name: info.differs for info in found.hparam_infos}, [info.name.tag for info in found.metric_infos]


def test_the_tables_columns_come_with_the_first_evaluation(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "uid", "name", 0, ("optimizer.lr", "engine.test"))
    run = run_in(tmp_path / "0", sweep=sweep, params={"engine.test": True})
    tracker = opened(run)
    tracker.send([record(0, 1), record(1, 1, "val", used_memory=5.0)])
    assert written(run, metadata.EXPERIMENT_TAG) == []
    tracker.send([record(2, 2), record(3, 2, "val", accuracy=0.5, loss=1.0), record(4, 3, "val", accuracy=0.6)])
    tracker.send([record(5, 3, "test", accuracy=0.5, loss=1.0)])
    metrics = ["val/accuracy", "val/loss", "test/accuracy", "test/loss", "train/loss"]
    assert columns(run) == ({"optimizer.lr": True, "engine.test": True, "seed": False}, metrics)
    assert written(run, metadata.EXPERIMENT_TAG) == [2]


# Each record once. ---------------------------------------------------------------------------------------------------


def test_a_second_process_with_an_older_memory_writes_each_step_once(tmp_path: Path) -> None:
    run, memory = run_in(tmp_path), dict[str, Any]()
    tracker = opened(run, memory)
    tracker.send(training(1, 3, index=0))
    saved = copy.deepcopy(memory)
    tracker.send(training(4, 6, index=3))  # and then it died, before the cursor was written
    later = opened(run, saved)
    later.send([record(3, 4)])
    assert steps(run) == [1, 2, 3, 4], "what is not confirmed yet is gone"
    later.send(training(5, 8, index=4))
    assert steps(run) == written(run) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_a_process_that_died_while_opening_leaves_nothing(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    opened(run).send(training(1, 3, index=0))
    opened(run).send(training(1, 2, index=0))
    assert written(run) == [1, 2]


@contextmanager
def full_disk(beyond: int) -> Iterator[None]:
    """Let no file grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (beyond, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 7, 100])
def test_a_write_that_failed_half_way_can_be_repeated(tmp_path: Path, room: int) -> None:
    run = run_in(tmp_path)
    tracker = opened(run)
    tracker.send(training(1, 2, index=0))
    (path,) = (tmp_path / "tensorboard").iterdir()
    with full_disk(path.stat().st_size + room), pytest.raises(OSError, match="File too large"):
        tracker.send(training(3, 60, index=2))
    tracker.send(training(3, 60, index=2))
    assert steps(run) == written(run) == list(range(1, 61))


def test_finish_can_be_repeated_and_something_can_follow_it(tmp_path: Path) -> None:
    run, memory = run_in(tmp_path), dict[str, Any]()
    tracker = opened(run, memory)
    tracker.send(training(1, 2, index=0))
    tracker.finish(Finish("failed", None, 1))
    opened(run, memory)  # by somebody who finds nothing to send
    assert session(run)[1] == api_pb2.STATUS_FAILURE
    tracker = opened(run, memory)
    tracker.send([record(2, 3)])
    assert session(run)[1] is None
    tracker.finish(Finish("finished"))
    tracker.finish(Finish("finished"))
    assert session(run)[1] == api_pb2.STATUS_SUCCESS
    assert written(run, "_hparams_/session_end_info") == [0]
    assert written(run) == [1, 2, 3]


def test_without_its_memory_everything_is_written_anew(tmp_path: Path) -> None:
    run, memory = run_in(tmp_path), dict[str, Any]()
    opened(run, memory).send(training(1, 5, index=0))
    resumed = run_in(tmp_path, resumed_at=[5])
    opened(resumed, memory).send(training(6, 8, index=5))
    (tmp_path / "tensorboard" / "notes.txt").write_text("somebody else's")
    opened(resumed).send(training(1, 8, index=0))
    (tmp_path / "tensorboard" / "notes.txt").unlink()
    assert written(resumed) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("damage", ["deleted", "folder deleted", "shortened"])
def test_a_file_that_is_gone_or_was_shortened_is_written_again(tmp_path: Path, damage: str) -> None:
    run, memory = run_in(tmp_path), dict[str, Any]()
    opened(run, memory).send(training(1, 3, index=0))
    resumed = run_in(tmp_path, resumed_at=[3])
    tracker = opened(resumed, memory)
    tracker.send(training(4, 5, index=3))
    newest = sorted((tmp_path / "tensorboard").iterdir())[-1]
    if damage == "shortened":
        with newest.open("rb+") as file:
            file.truncate(newest.stat().st_size - 1)
    else:
        shutil.rmtree(newest.parent) if damage == "folder deleted" else newest.unlink()
    for call in (lambda: tracker.send(training(6, 6, index=5)), lambda: tracker.finish(Finish("finished"))):
        saved = memory.copy()
        with pytest.raises(LostError) as lost:
            call()
        assert (lost.value.index, memory) == (0, {})
        memory.update(saved)
    memory.clear()
    tracker.send(training(1, 6, index=0))
    tracker.finish(Finish("finished"))
    assert steps(resumed) == written(resumed) == list(range(1, 7))
    assert session(resumed) == ({"seed": 3.0, "optimizer.lr": 0.1}, api_pb2.STATUS_SUCCESS)


# Resuming. -----------------------------------------------------------------------------------------------------------


class Resumable:
    """A run whose records are kept, as in its log, so that they can be sent again."""

    def __init__(self, path: Path) -> None:
        """Ten iterations with a validation at 5 and 10, a test, and an end."""
        self.path, self.memory, self.resumes = path, dict[str, Any](), list[int]()
        evaluations = [record(11, 10, "val"), record(12, 10, "test")]
        self.log = [*training(1, 5, index=0), record(5, 5, "val"), *training(6, 10, index=6), *evaluations]
        self.tracker = opened(run_in(path), self.memory)
        self.tracker.send(self.log)
        self.tracker.finish(Finish("failed", None, 1))

    def resume(self, *, at: int, kept: int) -> None:
        """Begin the next attempt, after all but `kept` records have been cut."""
        self.resumes.append(at)
        cut, self.log = self.log[kept:], self.log[:kept]
        self.tracker = TensorBoardTracker({}, run_in(self.path, resumed_at=self.resumes), self.memory)
        index = self.tracker.rewound(kept) if cut else kept
        self.tracker.open()
        if index < kept:
            self.tracker.send(self.log[index:])

    def send(self, *records: Record) -> None:
        self.log += [replace(one, index=len(self.log) + n) for n, one in enumerate(records)]
        self.tracker.send(self.log[-len(records) :])

    def steps(self, tag: str = "train/loss") -> list[int]:
        """Steps as TensorBoard finds them; each is in the files once, also for readers that purge nothing."""
        found = steps(self.tracker.run, tag)
        assert found == written(self.tracker.run, tag)
        return found


def test_what_a_resumed_run_does_again_is_there_once(tmp_path: Path) -> None:
    run = Resumable(tmp_path)
    run.resume(at=7, kept=8)
    assert (run.steps(), run.steps("test/loss")) == ([*range(1, 8)], [])
    run.send(*training(8, 12), record(13, 12, "test"))
    run.tracker.finish(Finish("finished"))
    assert (run.steps(), run.steps("val/loss"), run.steps("test/loss")) == ([*range(1, 13)], [5], [12])
    assert session(run.tracker.run)[1] == api_pb2.STATUS_SUCCESS
    assert [path.stat().st_size > 0 for path in sorted((tmp_path / "tensorboard").iterdir())] == [False, True]


def test_records_of_the_checkpoints_own_iteration_are_cut_one_by_one(tmp_path: Path) -> None:
    run = Resumable(tmp_path)
    run.resume(at=5, kept=5)  # the validation at 5 is made up
    run.send(record(5, 5, "val"), record(6, 6))
    assert (run.steps(), run.steps("val/loss")) == ([*range(1, 7)], [5])
    assert columns(run.tracker.run)[1][0] == "val/accuracy"


def test_a_tensorboard_that_is_open_drops_what_it_has_read(tmp_path: Path) -> None:
    run = Resumable(tmp_path)
    watching = read(run.tracker.run)
    assert steps(watching) == list(range(1, 11))
    run.resume(at=7, kept=8)
    assert steps(watching.Reload()) == list(range(1, 8))
    assert (steps(watching, "val/loss"), steps(watching, "test/loss")) == ([5], [])
    run.send(*training(8, 12))
    assert steps(watching.Reload()) == list(range(1, 13))


def test_a_run_that_is_resumed_without_a_cut_continues(tmp_path: Path) -> None:
    run = Resumable(tmp_path)
    watching = read(run.tracker.run)
    run.resume(at=10, kept=13)
    assert session(run.tracker.run)[1] is None
    run.send(*training(11, 12))
    assert (run.steps(), run.steps("test/loss")) == ([*range(1, 13)], [10])
    assert steps(watching.Reload()) == list(range(1, 13))
    assert [text.step for text in read(run.tracker.run).Tensors("config")] == [0, 10]


def test_a_run_that_is_resumed_again_and_again(tmp_path: Path) -> None:
    run = Resumable(tmp_path)
    for at, kept, last in ((7, 8, 12), (12, 13, 14), (9, 10, 11), (3, 3, 6), (5, 5, 9)):
        run.resume(at=at, kept=kept)
        run.send(*training(at + 1, last))
        assert run.steps() == list(range(1, last + 1))
    assert [text.step for text in read(run.tracker.run).Tensors("config")] == [0, *run.resumes]


def test_a_resume_that_died_while_opening_is_repeated(tmp_path: Path) -> None:
    run = Resumable(tmp_path)
    saved, log = copy.deepcopy(run.memory), run.log
    run.resume(at=7, kept=8)
    run.send(*training(8, 9))
    run.memory, run.log = saved, log
    run.resumes.clear()
    run.resume(at=7, kept=8)
    run.send(*training(8, 12))
    assert run.steps() == list(range(1, 13))


def test_files_sort_in_the_order_of_attempts_though_the_clock_went_back(tmp_path: Path) -> None:
    memory: dict[str, Any] = {}
    run = run_in(tmp_path, resumed_at=[10] * 11)
    attempts = [replace(attempt, began=BEGAN - 3600 * attempt.number) for attempt in run.attempts]
    for number in range(12):
        opened(replace(run, attempts=tuple(attempts[: number + 1])), memory).send([record(number, number)])
    assert steps(run) == written(run) == list(range(12))


# Bad input. ----------------------------------------------------------------------------------------------------------


def test_a_file_where_the_folder_belongs_cannot_be_helped(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("mine")
    with pytest.raises(UnusableError, match="tensorboard is not a folder: move it away"):
        opened(run_in(tmp_path))


def test_a_folder_that_cannot_be_written_is_tried_again(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    tracker = TensorBoardTracker({}, run, {})
    with full_disk(10), pytest.raises(OSError, match="File too large"):
        tracker.open()
    tracker.open()
    tracker.send(training(1, 2, index=0))
    assert steps(run) == [1, 2]


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = TensorBoardTracker({}, run_in(tmp_path / "my runs" / "a"), {})
    assert tracker.where == f"tensorboard --logdir '{tmp_path}/my runs/a/tensorboard'"
    monkeypatch.chdir(tmp_path / "my runs")
    assert tracker.where == "tensorboard --logdir a/tensorboard"


def test_neither_torch_nor_tensorflow_is_needed(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['tensorflow'] = None; from pathlib import Path\n"
        "from hydraloop.tracking.tensorboard import TensorBoardTracker as Tracker\n"
        "from hydraloop.tracking.tracker import Attempt, Finish, Record, Run\n"
        "run = Run(Path(sys.argv[1]), '', '', '', (Attempt(0, 0, {}, '', {}, 1.0, 1),))\n"
        "tracker = Tracker({}, run, {}); tracker.open()\n"
        "tracker.send([Record(0, 'val', 1, 1, 1.0, {'loss': 1.0}, {})]); tracker.finish(Finish('finished'))\n"
        "assert 'torch' not in sys.modules, 'imported'"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_nothing_is_said_when_all_is_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hydraloop")
    run = Resumable(tmp_path)
    run.resume(at=7, kept=8)
    run.send(*training(8, 9))
    assert [line.getMessage() for line in caplog.records if line.name.startswith("hydraloop")] == []
