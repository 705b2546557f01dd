"""TensorBoardTracker: TensorBoard's own loaders find each record once, also after errors."""

from __future__ import annotations

import json
import logging
import math
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

from hydraloop.files.metrics_log import LoggedObject, Record
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


def record(index: int, iteration: int, mode: str = "train", *objects: LoggedObject, **values: float) -> Record:
    values = values or ({"loss": index / 8} if mode == "train" else {"accuracy": index / 128, "loss": index / 8})
    return Record(index, mode, 1, iteration, BEGAN + index, {} if objects else values, {}, objects)


def training(first: int, last: int, *, index: int | None = None) -> list[Record]:
    """One record for each iteration from `first` to `last`, starting at line `index`."""
    begin = first if index is None else index
    return [record(begin + n, first + n) for n in range(last - first + 1)]


_trackers: list[TensorBoardTracker] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for tracker in _trackers:
        tracker.close()
    _trackers.clear()


def opened(run: Run) -> TensorBoardTracker:
    """A tracker as a new sender makes it."""
    _trackers.append(TensorBoardTracker({}, run, {}))
    _trackers[-1].open()
    return _trackers[-1]


def send(tracker: TensorBoardTracker, log: Sequence[Record], first: int = 0) -> None:
    """Send a log from a line on, or from the line that the tracker wants, as the follower does."""
    try:
        tracker.send(log[first:])
    except LostError as lost:
        tracker.send(log[lost.index :])


def folder_of(run: Run) -> Path:
    return run.run_dir / "tensorboard" / (run.name if run.sweep is not None else "")


def read(run: Run) -> EventAccumulator:
    found = EventAccumulator(str(folder_of(run)), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE)
    assert found.purge_orphaned_data
    return found.Reload()


def steps(run: Run | EventAccumulator, tag: str = "train/loss") -> list[int]:
    found = read(run) if isinstance(run, Run) else run
    return [event.step for event in found.Scalars(tag)] if tag in found.Tags()["scalars"] else []


def written(run: Run, tag: str = "train/loss") -> list[int]:
    """Steps in the files, including those that a loader would drop."""
    files = sorted(folder_of(run).iterdir())
    found = [event_pb2.Event.FromString(event) for file in files for event in RawEventFileLoader(str(file)).Load()]
    return [event.step for event in found for value in event.summary.value if value.tag == tag]


def session(run: Run) -> tuple[dict[str, Any], Any]:
    """Hyperparameters, and the status at the end (None before it)."""
    content = read(run).PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(content["_hparams_/session_start_info"])
    end = content.get("_hparams_/session_end_info")
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    return values, None if end is None else metadata.parse_session_end_info_plugin_data(end).status


# What is in the files. -----------------------------------------------------------------------------------------------


def test_scalars_have_tag_step_and_the_time_of_their_record(tmp_path: Path) -> None:
    """They are on disk when `send` returns. The speed is not in one of the two groups that are open first."""
    run = run_in(tmp_path)
    tracker = opened(run)
    tracker.send([record(0, 10, loss=0.5, lr=0.25, time=1.0), record(1, 20, loss=math.nan, lr=math.inf)])
    tracker.send([record(2, 20, "val", accuracy=0.75), record(3, 20, "test")])
    found = read(run)
    loss, lr, (accuracy,) = (found.Scalars(tag) for tag in ("train/loss", "train/lr", "val/accuracy"))
    assert [(event.step, event.wall_time) for event in loss] == [(10, BEGAN), (20, BEGAN + 1)]
    assert loss[0].value == 0.5
    assert math.isnan(loss[1].value)
    assert [event.value for event in lr] == [0.25, math.inf]
    assert (accuracy.step, accuracy.value, accuracy.wall_time) == (20, 0.75, BEGAN + 2)
    groups = sorted({tag.partition("/")[0] for tag in found.Tags()["scalars"]})
    assert groups == ["test", "train", "train_perf", "val"]


def test_pictures_are_there_as_they_are(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    Image.new("RGB", (7, 5), (200, 10, 10)).save(tmp_path / "a.png")
    opened(run).send([record(0, 4, "val", LoggedObject("image", "val/predictions", "a.png"))])
    (image,) = read(run).Images("val/predictions")
    content = (tmp_path / "a.png").read_bytes()
    assert (image.step, image.width, image.height, image.encoded_image_string) == (4, 7, 5, content)


def test_histograms_are_taken_from_their_file(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    facts = {"min": -1.0, "max": 3.0, "num": 4, "sum": 4.0, "sum_squares": 12.0, "nonfinite": 2}
    none = {"min": 0.0, "max": 0.0, "num": 0, "sum": 0.0, "sum_squares": 0.0, "nonfinite": 5}
    content = {
        "weights/a": {**facts, "bucket_limit": [1.0, 3.0], "bucket": [1, 3]},
        "gradients/a": {**none, "bucket_limit": [], "bucket": []},
    }
    (tmp_path / "iter_4.json").write_text(json.dumps(content))
    opened(run).send([record(0, 4, "train", LoggedObject("histogram", "train/histograms", "iter_4.json"))])
    found = read(run)
    (event,) = found.Histograms("weights/a")
    value = event.histogram_value
    assert (event.step, value.min, value.max, value.num, value.sum, value.sum_squares) == (4, -1.0, 3.0, 4, 4.0, 12.0)
    assert (list(value.bucket_limit), list(value.bucket)) == ([1.0, 3.0], [1.0, 3.0])
    assert [event.value for event in found.Scalars("nonfinite/gradients/a")] == [5.0]
    assert [event.value for event in found.Scalars("nonfinite/weights/a")] == [2.0]
    assert found.Tags()["histograms"] == ["weights/a"]


def test_objects_that_cannot_be_shown_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file, damaged and lost ones. Their records are written."""
    run = run_in(tmp_path)
    (tmp_path / "bad").write_text('{"w": {"bucket": [1], "min": "x", "nonfinite": 0}}')
    bad = [LoggedObject(kind, "a", "bad") for kind in ("artifact", "image", "table", "histogram")]  # type: ignore[arg-type]
    tracker = opened(run)
    for n, one in enumerate([*bad, LoggedObject("image", "a", "gone")]):
        tracker.send([record(2 * n, n, "val", one), record(2 * n + 1, n)])
    assert steps(run) == [0, 1, 2, 3, 4]
    assert [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING] == [
        "TensorBoard cannot show bad, and others will be skipped, too: it is a file"
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
    run = run_in(tmp_path / "0", sweep=Sweep(tmp_path, "uid", "name", 0, ("optimizer.lr",)))
    object.__setattr__(run, "name", name)
    assert opened(run).where == f"tensorboard --logdir {tmp_path}"
    assert [path.name for path in (tmp_path / "0" / "tensorboard").iterdir()] == [folder]


# The HPARAMS tab. ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ended", "status"), [("finished", api_pb2.STATUS_SUCCESS), ("killed", api_pb2.STATUS_FAILURE)]
)
def test_a_session_has_what_was_typed_and_what_is_well_known_and_its_end(
    tmp_path: Path, ended: Any, status: Any
) -> None:
    """Secrets of the command line are masked."""
    (tmp_path / ".hydra").mkdir()
    typed = ["model=gpt", "hooks=[ema]", "optimizer.lr=1e-1", "++data.root=/data", "+some.token=verysecretvalue"]
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps(typed))
    params = {"data.root": "/data", "engine.max_epochs": 5, "optimizer.weight_decay": None}
    run = run_in(tmp_path, params=params)
    tracker = opened(run)
    tracker.send([record(0, 1), record(1, 1, "val", used_memory=5.0), record(2, 2, "val", accuracy=0.5, loss=1.0)])
    shown = {
        "seed": 3.0, "optimizer.lr": 0.1, "optimizer.weight_decay": "null", "model": "gpt", "hooks": "[ema]",
        "data.root": "/data", "some.token": "***",
    }  # fmt: skip
    assert session(run) == (shown, None)
    tracker.finish(Finish(ended))
    assert session(run) == (shown, status)


def test_the_table_has_the_swept_keys_and_the_metrics_of_evaluations(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "uid", "name", 0, ("optimizer.lr", "engine.test"))
    run = run_in(tmp_path / "0", sweep=sweep, params={"engine.test": True})
    tracker = opened(run)
    tracker.send([record(0, 1), record(1, 1, "val", used_memory=5.0), record(2, 2, "val", accuracy=0.5, loss=1.0)])
    tracker.send([record(3, 3, "test", accuracy=0.5, loss=1.0)])
    tracker.finish(Finish("finished"))
    content = read(run).PluginTagToContent("hparams")[metadata.EXPERIMENT_TAG]
    found = metadata.parse_experiment_plugin_data(content)
    options = {info.name: (info.differs, info.type) for info in found.hparam_infos}
    number = api_pb2.DATA_TYPE_FLOAT64
    assert options == {
        "optimizer.lr": (True, number), "engine.test": (True, api_pb2.DATA_TYPE_BOOL), "seed": (False, number)
    }  # fmt: skip
    tags = [info.name.tag for info in found.metric_infos]
    assert tags == ["val/accuracy", "val/loss", "test/accuracy", "test/loss", "train/loss"]


# Each record once. ---------------------------------------------------------------------------------------------------


def test_each_sender_writes_each_record_once(tmp_path: Path) -> None:
    """After a kill at any time, a cut and an end. A TensorBoard that is open drops what it has read."""
    run, log = run_in(tmp_path), [*training(1, 5, index=0), record(5, 5, "val"), *training(6, 10, index=6)]
    opened(run).send(log)
    watching = read(run)
    assert steps(watching) == list(range(1, 11))
    (tmp_path / "tensorboard" / "notes.txt").write_text("somebody else's")

    resumed, log = run_in(tmp_path, resumed_at=[7]), [*log[:8], *training(8, 12)]
    for _ in range(2):
        tracker = opened(resumed)
        send(tracker, log, first=8)
    with pytest.raises(LostError):
        opened(resumed).finish(Finish("finished"))
    tracker = opened(resumed)
    send(tracker, log, first=12)
    tracker.finish(Finish("finished"))

    assert (tmp_path / "tensorboard" / "notes.txt").read_text() == "somebody else's"
    (tmp_path / "tensorboard" / "notes.txt").unlink()
    assert steps(resumed) == written(resumed) == steps(watching.Reload()) == list(range(1, 13))
    assert steps(watching, "val/loss") == [5]
    assert [text.step for text in read(resumed).Tensors("config")] == [0, 7]
    assert written(resumed, "_hparams_/session_end_info") == [0]
    *emptied, last = [path.stat().st_size for path in sorted((tmp_path / "tensorboard").iterdir())]
    assert (set(emptied), last > 0) == ({0}, True)


@contextmanager
def full_disk(beyond: int) -> Iterator[None]:
    """Let no file grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (beyond, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [-1_000_000, 0, 7, 100])
def test_a_write_that_failed_half_way_can_be_repeated(tmp_path: Path, room: int) -> None:
    run, log = run_in(tmp_path), training(1, 60, index=0)
    tracker = opened(run)
    tracker.send(log[:2])
    (path,) = (tmp_path / "tensorboard").iterdir()
    if room < 0:  # the file cannot even be begun
        tracker.close()
    with full_disk(max(10, path.stat().st_size + room)), pytest.raises(OSError, match="File too large"):
        tracker.send(log[2:])
    send(tracker, log, first=2)
    assert steps(run) == written(run) == list(range(1, 61))


def test_a_file_where_the_folder_belongs_cannot_be_helped(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("mine")
    with pytest.raises(UnusableError, match="tensorboard is not a folder: move it away"):
        opened(run_in(tmp_path))


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
