"""LoggerHook: the records of real runs."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.messages import position
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.files.metrics_writer import cuts
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.hooks.logger import LoggerHook
from hydraloop.hooks.runtime_info import RuntimeInfoHook
from hydraloop.hooks.timer import IterTimerHook
from hydraloop.tasks.metrics import MeanAbsoluteError
from hydraloop.tasks.task import Task
from tests.helpers import EngineWithNeededHooks, HostSyncs, at, failing, logged, make_engine
from tests.hooks.tiny_runs import Scripted, engine_of
from tests.ranks import on_ranks


class Listener(Hook):
    """Keeps the losses of the iterations and the records."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.records: list[dict[str, Any]] = []

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        self.losses.append(outputs["loss"])

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))


class Diverging(Task):
    """A loss of NaN, and a second one that is infinite."""

    def forward(self, batch: Any) -> dict[str, Any]:
        loss = super().forward(batch)["loss"]
        return {"loss": loss * math.nan, "aux_loss": torch.tensor(-math.inf)}


def _engine(
    tmp_path: Path,
    logger: LoggerHook,
    *,
    task: Callable[..., Task] = Task,
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> Engine:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    batches = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(7)]
    hooks = {"runtime_info": RuntimeInfoHook(), "timer": IterTimerHook(), "logger": logger, "listener": Listener()}
    return engine_of(
        tmp_path,
        hooks,
        task=task(model, nn.MSELoss()),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5),
        loaders=Loaders(batches, batches[:1], batches[1:2]),
        **{"max_epochs": 2, "sanity_val_steps": 1, **(settings or {}), **more},
    )


class Summed(Task):
    """A loss as (sum, count): batches are pairs of the sum and the count."""

    def forward(self, batch: Any) -> dict[str, Any]:
        total, count = batch
        return {"loss": (total.sum() + 0 * self.model.weight.sum(), count.sum())}


def test_the_loss_of_sums_and_counts_is_the_mean_over_all_terms_as_in_validation(tmp_path: Path) -> None:
    """One term of 10, then 99 terms of 1: their mean is 1.09, and the mean of the two means is 5.5."""
    data = [(torch.tensor([10.0]), torch.tensor([1])), (torch.tensor([99.0]), torch.tensor([99]))]
    hooks = {"runtime_info": RuntimeInfoHook(), "logger": LoggerHook(interval=2)}
    task = Summed(nn.Linear(1, 1))
    make_engine(tmp_path, hooks, train=data, val=data, task=task, sanity_val_steps=0).train()
    train, val = _lines(tmp_path)
    assert (train["loss"], val["loss"]) == (pytest.approx(1.09), pytest.approx(1.09))


def _lines(tmp_path: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return logged(tmp_path / name)


def test_records_of_a_run(tmp_path: Path) -> None:
    engine = _engine(tmp_path, LoggerHook(interval=5))
    engine.train()
    listener = engine.hooks["listener"]
    assert isinstance(listener, Listener)
    records = _lines(tmp_path)
    assert records == listener.records
    assert [(record["mode"], record["epoch"], record["iteration"]) for record in records] == [
        ("train", 1, 5), ("train", 1, 7), ("val", 1, 7),
        ("train", 2, 10), ("train", 2, 14), ("val", 2, 14), ("test", 2, 14),
    ]  # fmt: skip
    losses = [loss.item() for loss in listener.losses]
    assert records[0]["loss"] == pytest.approx(sum(losses[:5]) / 5)
    assert records[3]["loss"] == pytest.approx(sum(losses[7:10]) / 3)
    assert (records[0]["lr"], records[0]["momentum"]) == (0.01, 0.5)
    assert records[5]["loss"] == engine.metrics["loss"]
    assert records[6]["loss"] == engine.evaluator.test_metrics["loss"]


def test_a_train_record_has_everything_in_order(tmp_path: Path) -> None:
    engine = _engine(tmp_path, LoggerHook())
    engine.train()
    train = next(record for record in _lines(tmp_path) if record["mode"] == "train")
    assert list(train) == [
        "mode", "epoch", "iteration", "lr", "momentum", "eta", "time", "data_time", "samples_per_second", "memory",
        "loss",
    ]  # fmt: skip
    assert 1 < train["memory"] < 1e6
    assert 0 < train["data_time"] < train["time"]


def test_samples_per_second_are_the_samples_since_the_last_record_by_their_time(tmp_path: Path) -> None:
    """The batches have several sizes. The second run is resumed between two records."""
    sizes = (2, 4, 6, 8, 10)

    def train(**settings: Any) -> None:
        batches = [(torch.ones(size, 3), torch.ones(size, 2)) for size in sizes]
        checkpoint = CheckpointHook(interval=6, by_epoch=False)
        hooks = {"timer": IterTimerHook(), "logger": LoggerHook(interval=4), "checkpoint": checkpoint}
        engine_of(tmp_path, hooks, train=batches, val=False, **settings).train()

    train(max_epochs=2)
    train(max_epochs=3, resume=tmp_path / "checkpoints" / "iter_6.pth")
    samples = {record["iteration"]: record["samples_per_second"] * record["time"] for record in _lines(tmp_path)}
    means = {4: sum(sizes[:4]) / 4, 5: 10, 8: (4 + 6) / 2, 10: (8 + 10) / 2, 12: (2 + 4) / 2, 15: (6 + 8 + 10) / 3}
    assert samples == pytest.approx(means)


@pytest.mark.parametrize(
    ("options", "iterations"),
    [
        ({"max_epochs": 2}, [5, 7, 10, 14]),
        ({"max_iters": 17}, [5, 7, 10, 14, 15, 17]),
        ({"max_epochs": 2, "stop": "a hook"}, [5, 7, 9]),
        ({"max_epochs": 2, "stop": Settings().out_of_time}, [5, 7]),  # a resumed run makes the record of 10
    ],
)
def test_a_record_closes_each_epoch_and_the_training(
    tmp_path: Path, options: dict[str, Any], iterations: list[int]
) -> None:
    """Without it, the last values of a run would be missing, and a run shorter than the interval would have none."""
    stop = options.pop("stop", None)
    engine = _engine(tmp_path, LoggerHook(interval=5), settings={"max_epochs": None, **options})
    if stop is not None:
        engine = _with(engine, stop=at("after_train_iter", lambda engine: engine.request_stop(stop), nth=9))
    engine.train()
    records = [record for record in _lines(tmp_path) if record["mode"] == "train"]
    assert [record["iteration"] for record in records] == iterations
    losses = [loss.item() for loss in engine.hooks["listener"].losses]
    for record, begin in zip(records, [0, *iterations], strict=False):
        ended = losses[begin : record["iteration"]]
        assert record["loss"] == pytest.approx(sum(ended) / len(ended))


def test_a_value_of_the_end_of_an_epoch_is_in_the_record_that_closes_it(tmp_path: Path) -> None:
    """Also if the interval fires at that iteration. The lr is the one that the iteration used, before schedules."""

    def schedule(engine: Engine) -> None:
        engine.optimizer.param_groups[0]["lr"] = engine.progress.iteration / 100

    def add(engine: Engine) -> None:
        engine.messages.add("norm", engine.progress.epoch)

    hooks = {
        "schedule": at("after_train_iter", schedule, nth=0, priority=70),
        "ending": at("after_train_epoch", add, nth=0),
    }
    _with(_engine(tmp_path, LoggerHook(interval=7)), **hooks).train()
    records = [record for record in _lines(tmp_path) if record["mode"] == "train"]
    assert [(record["epoch"], record["iteration"], record["norm"]) for record in records] == [(1, 7, 1), (2, 14, 2)]
    assert [record["lr"] for record in records] == [0.06, 0.13]


def test_interval_null_leaves_the_evaluations(tmp_path: Path) -> None:
    engine = _engine(tmp_path, LoggerHook(interval=None))
    engine.train()
    assert [record["mode"] for record in _lines(tmp_path)] == ["val", "val", "test"]


def test_lines_for_people(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hydraloop.hooks.logger")
    _engine(tmp_path, LoggerHook(interval=7)).train()
    messages = [record for record in caplog.records if record.name == "hydraloop.hooks.logger"]
    header, *lines = (" ".join(record.getMessage().split()) for record in messages)
    assert len(lines) == len(_lines(tmp_path)) == 5
    assert header == "epoch iter lr eta time data samples/s memory loss"
    span = r"[\d.]+(?:µs|ms|s)"
    assert re.fullmatch(rf"train 1/2 7/14 1\.0e-02 0:00:0\d {span} {span} \d+ \d+MiB \d\.\d+", lines[0])
    assert re.fullmatch(r"val 1/2 7/14 \d\.\d+ best", lines[1])
    assert lines[-1].startswith("test 2/2 14/14 ")
    styles = [getattr(record, "style", None) for record in messages]
    assert styles == ["header", "train", "best", "train", "best" if lines[3].endswith("best") else "val", "test"]


def _notes(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    values: Sequence[float],
    save_best: str | None = None,
    **settings: Any,
) -> list[str]:
    """Train with validations of these accuracies. Returns the notes at the end of their lines."""
    caplog.clear()
    caplog.set_level(logging.INFO, logger="hydraloop.hooks.logger")
    hooks = {
        "runtime_info": RuntimeInfoHook(),
        "logger": LoggerHook(interval=None),
        "checkpoint": CheckpointHook(save_best=save_best),
    }
    engine_of(tmp_path, hooks, metrics={"accuracy": Scripted(values, True)}, **settings).train()
    lines = [record.getMessage() for record in caplog.records if record.name == "hydraloop.hooks.logger"]
    return ["best" * (" best" in line) + line.partition(" best")[2] for line in lines if line.startswith("val")]


def test_the_mark_is_of_the_metric_that_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert _notes(tmp_path, caplog, [0.5, 0.6, 0.7]) == ["best"] * 3
    assert _notes(tmp_path / "loss", caplog, [0.5, 0.6, 0.7], save_best="loss") == ["best", "", ""]


@pytest.mark.parametrize("save_best", ["auto", None])
def test_a_resumed_run_compares_with_all_its_validations(
    save_best: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _notes(tmp_path, caplog, [0.7, 0.6], save_best, max_epochs=2)
    resume = tmp_path / "checkpoints" / "epoch_2.pth"  # before the second validation, which is made again
    assert _notes(tmp_path, caplog, [0.6, 0.8], save_best, max_epochs=3, resume=resume) == ["", "best"]


def test_any_json_reader_can_read_a_diverged_run(tmp_path: Path) -> None:
    engine = _engine(tmp_path, LoggerHook(interval=7), task=Diverging, settings={"allow_nan": True})
    engine.train()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    first = (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    record = json.loads(first, parse_constant=refuse)
    assert record["loss"] is None
    assert record["aux_loss"] is None
    assert record["nonfinite"] == {"loss": "nan", "aux_loss": "-inf"}
    listener = engine.hooks["listener"]
    assert isinstance(listener, Listener)
    assert math.isnan(listener.records[0]["loss"])
    assert "nonfinite" not in listener.records[0]


def test_a_second_run_appends_after_the_last_whole_line(tmp_path: Path) -> None:
    _engine(tmp_path, LoggerHook(interval=7)).train()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(before + b'{"mode": "trai')
    _engine(tmp_path, LoggerHook(interval=7)).train()
    after = (tmp_path / "metrics.jsonl").read_bytes()
    assert after.startswith(before + b'{"mode": "train", "epoch": 1, "iteration": 7')
    assert len(_lines(tmp_path)) == 10


@pytest.mark.parametrize(
    ("checkpoint", "again"),
    [
        ("epoch_1.pth", [("val", 7), ("train", 10), ("train", 14), ("val", 14), ("test", 14)]),
        ("epoch_2.pth", [("val", 14), ("test", 14)]),
    ],
)
def test_a_resumed_run_takes_out_what_it_does_again(
    checkpoint: str, again: list[tuple[str, int]], tmp_path: Path
) -> None:
    def positions(name: str) -> list[tuple[str, int]]:
        return [(record["mode"], record["iteration"]) for record in _lines(tmp_path, name)]

    def run(**settings: Any) -> None:
        engine = _engine(tmp_path, LoggerHook(interval=5), **settings)
        _with(engine, checkpoint=CheckpointHook()).train()

    run()
    before = positions("metrics.jsonl")
    run(settings={"resume": tmp_path / "checkpoints" / checkpoint})
    assert positions("metrics.jsonl") == before, "each once, as in a run that was not interrupted"
    assert cuts(tmp_path / "metrics.jsonl") == [len(before) - len(again)]


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("checkpoint", ["epoch_1.pth", "epoch_2.pth"])
def test_the_records_that_the_log_of_a_resumed_run_lacks_are_counted(
    checkpoint: str, lost: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _with(_engine(tmp_path, LoggerHook(interval=2)), checkpoint=CheckpointHook()).train()
    file, path = tmp_path / "metrics.jsonl", tmp_path / "checkpoints" / checkpoint
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[lost:]))
    _with(_engine(tmp_path, LoggerHook(interval=2), settings={"resume": path}), checkpoint=CheckpointHook()).train()
    saved = torch.load(path, weights_only=True)
    there, iteration = saved["meta"]["records"], saved["progress"]["iteration"]
    text = (
        f"metrics.jsonl lacks {lost} of the {there} records up to iteration {iteration}: lines are missing or damaged"
    )
    assert [message for message in caplog.messages if "lacks" in message] == ([text] if lost else [])


def test_a_copy_of_a_checkpoint_has_no_earlier_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _with(_engine(tmp_path / "run", LoggerHook(interval=5)), checkpoint=CheckpointHook()).train()
    copy = shutil.copy(tmp_path / "run" / "checkpoints" / "epoch_1.pth", tmp_path / "copy.pth")
    resumed = _engine(tmp_path / "new", LoggerHook(interval=5), settings={"resume": Path(copy)})
    _with(resumed, checkpoint=CheckpointHook()).train()
    assert "lacks" not in caplog.text


def test_an_attempt_that_fails_before_it_trains_takes_nothing_out(tmp_path: Path) -> None:
    _with(_engine(tmp_path, LoggerHook(interval=5)), checkpoint=CheckpointHook()).train()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    settings = {"resume": tmp_path / "checkpoints" / "epoch_1.pth"}
    resumed = _engine(tmp_path, LoggerHook(interval=5), settings=settings)
    with pytest.raises(RuntimeError, match="on purpose"):
        _with(resumed, checkpoint=CheckpointHook(), failing=failing("after_load_checkpoint")).train()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_each_record_is_in_the_file_before_later_hooks_get_it(tmp_path: Path) -> None:
    seen: list[int] = []

    class Follower(Hook):
        priority = 90  # a tracker's

        def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
            seen.append(len(_lines(tmp_path)))

    _with(_engine(tmp_path, LoggerHook(interval=7)), follower=Follower()).train()
    assert seen == [1, 2, 3, 4, 5]


class Reporting(Hook):
    """Makes a record in each epoch, before and after the logger's of the validation."""

    priority = 100

    def __init__(self, entries: dict[str, Any] | None = None) -> None:
        self.entries = {"mode": "weights"} if entries is None else entries

    def after_train_epoch(self, engine: Engine) -> None:
        engine.log_record({**self.entries, "iteration": engine.progress.iteration, "norm": 2.5})

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        engine.log_record({**position(engine.progress, "val"), "picture": "here.png"})


def _with(engine: Engine, **hooks: Hook) -> Engine:
    """The same engine with additional hooks."""
    return EngineWithNeededHooks(
        task=engine.task,
        optimizer=engine.optimizer,
        loaders=engine.loaders,
        hooks={**engine.hooks, **hooks},
        settings=engine.settings,
        run_dir=engine.run_dir,
    )


def test_a_record_without_a_position_gets_the_current_one(tmp_path: Path) -> None:
    def log(engine: Engine) -> None:
        engine.log_record({"mine": torch.tensor(0.5)})

    _with(_engine(tmp_path, LoggerHook()), val=at("after_val_epoch", log), end=at("after_train_epoch", log)).train()
    assert [record for record in _lines(tmp_path) if "mine" in record] == [
        {"mode": "train", "epoch": 1, "iteration": 7, "mine": 0.5},
        {"mode": "val", "epoch": 1, "iteration": 7, "mine": 0.5},
    ]


@pytest.mark.parametrize("value", [{"a": math.nan}, [1.0, math.nan], torch.ones(2)])
def test_a_record_that_is_not_flat_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    engine = _with(_engine(tmp_path, LoggerHook()), reporting=Reporting({"norms": value}))
    with pytest.raises(TypeError, match=rf"not a {type(value).__name__} as its 'norms'"):
        engine.train()
    flat = Reporting({"mode": "weights", "none": None, "flag": True, "text": "a"})
    engine = _with(_engine(tmp_path, LoggerHook()), reporting=flat)
    engine.train()
    assert {"mode": "weights", "none": None, "flag": True, "text": "a", "iteration": 7, "norm": 2.5} in _lines(tmp_path)


@pytest.mark.parametrize("name", ["mode", "epoch", "iteration", "nonfinite"])
@pytest.mark.parametrize("kind", ["scalar", "metric"])
def test_nothing_takes_the_place_of_where_a_record_belongs(kind: str, name: str, tmp_path: Path) -> None:
    metrics = {name: MeanAbsoluteError()} if kind == "metric" else {}
    engine = _engine(tmp_path, LoggerHook(interval=3), task=partial(Task, metrics=metrics))
    if kind == "scalar":
        engine = _with(engine, adding=at("before_train_iter", lambda engine: engine.messages.add(name, 3.0), nth=0))
    with pytest.raises(UserError, match=rf"every record already has an entry '{name}'") as raised:
        engine.train()
    assert "another name" in str(raised.value.remedy)
    assert engine.progress.iteration == (0 if kind == "metric" else 3)


def test_without_a_logger_records_still_reach_the_others(tmp_path: Path) -> None:
    engine = _engine(tmp_path, LoggerHook())
    del engine.hooks["logger"]
    engine = _with(engine, reporting=Reporting())
    engine.train()
    listener = engine.hooks["listener"]
    assert isinstance(listener, Listener)
    assert [record["mode"] for record in listener.records] == ["weights", "val", "weights", "val"]
    assert not (tmp_path / "metrics.jsonl").exists()


def test_one_host_sync_a_record(tmp_path: Path) -> None:
    engine = _engine(tmp_path, LoggerHook(interval=2))
    engine.batches.use(Loaders(engine.loaders.train))
    with HostSyncs() as syncs:
        engine.train()
    listener = engine.hooks["listener"]
    assert isinstance(listener, Listener)
    assert [record["iteration"] for record in listener.records] == [2, 4, 6, 7, 8, 10, 12, 14]
    assert syncs.count == 8 + 1, "the weights are checked at the end"


def records_of_a_rank(distributed: Distributed, run_dir: str) -> tuple[list[str], list[Any], list[float]]:
    """Train on one rank. Returns the files in its folder, its records, its own losses."""
    folder = Path(run_dir) / str(distributed.rank)
    folder.mkdir()
    engine = _engine(folder, LoggerHook(interval=7), distributed=distributed)
    if distributed.rank == 1:
        engine.batches.use(Loaders([(inputs + 1, targets) for inputs, targets in engine.loaders.train or ()]))
    else:
        engine.batches.use(Loaders(engine.loaders.train))
    engine.train()
    listener = engine.hooks["listener"]
    assert isinstance(listener, Listener)
    return [path.name for path in folder.iterdir()], listener.records, [float(loss) for loss in listener.losses]


def test_other_ranks_take_part_and_write_nothing(tmp_path: Path) -> None:
    main, other = on_ranks(2, records_of_a_rank, str(tmp_path))
    assert (other[0], other[1]) == ([], [])
    assert "metrics.jsonl" in main[0]
    assert main[2] != other[2]
    assert main[1][0]["loss"] == pytest.approx((sum(main[2][:7]) + sum(other[2][:7])) / 14)
    assert main[1][0]["samples_per_second"] == pytest.approx(2 * 4 / main[1][0]["time"]), "those of both ranks"
