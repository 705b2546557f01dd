"""CheckpointHook on real runs: which files it writes, when, and their contents."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hydraloop.engine.checkpoint import saver
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.files.checkpoint_files import newest_intact
from hydraloop.files.run_directory import RECORDS
from hydraloop.hooks import checkpoint
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.hooks.ema import EMAHook
from hydraloop.tasks.task import Task
from tests.helpers import failing
from tests.hooks.tiny_runs import Scripted, Stopper, bits, engine_of, load, model, same


def files(folder: Path) -> set[str]:
    """The checkpoints in a run's folder (or any other)."""
    folder = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    return {path.stem for path in folder.glob("*.pth")}


def run(run_dir: Path, hook: CheckpointHook, **settings: Any) -> Any:
    engine = engine_of(run_dir, {"checkpoint": hook}, **settings)
    engine.train()
    return engine


# When. ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "epochs", "expected"),
    [
        ({}, 3, {"epoch_1", "epoch_2", "epoch_3"}),
        # MMEngine's documents: max_keep_ckpts, and save_begin with and without an interval.
        ({"interval": 5, "max_keep_ckpts": 2}, 20, {"epoch_15", "epoch_20"}),
        ({"interval": 2, "save_begin": 5, "save_last": False}, 10, {"epoch_5", "epoch_7", "epoch_9"}),
        ({"interval": 2, "save_begin": 5}, 10, {"epoch_5", "epoch_7", "epoch_9", "epoch_10"}),
        ({"interval": None}, 3, {"epoch_3"}),
        ({"interval": None, "save_last": False}, 3, set()),
        ({"min_time": "1h"}, 4, {"epoch_1", "epoch_4"}),  # the first one, and the end of training
        ({"min_time": "1h", "save_last": False}, 4, {"epoch_1"}),
        ({"by_epoch": False, "interval": 5}, 3, {"iter_5", "iter_10", "iter_12"}),
        ({"by_epoch": False, "interval": 5, "save_begin": 3, "save_last": False}, 3, {"iter_3", "iter_8"}),
    ],
)
def test_files_are_written_when_they_are_due(
    tmp_path: Path, options: dict[str, Any], epochs: int, expected: set[str]
) -> None:
    run(tmp_path, CheckpointHook(**options), max_epochs=epochs)
    assert files(tmp_path) == expected


def test_regular_checkpoints_that_come_before_min_time_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = CheckpointHook(min_time="10s", save_best="acc", asynchronous=False)
    metrics = {"acc": Scripted([0.1, 0.1, 0.1, 0.1, 0.2, 0.1, 0.1, 0.1, 0.1])}
    engine = engine_of(tmp_path, {"checkpoint": hook}, metrics=metrics, max_epochs=9)
    monkeypatch.setattr(checkpoint, "perf_counter", lambda: 4.0 * engine.progress.epoch)  # epochs of 4 s
    engine.train()
    # Every 12 s: a new best validation does not postpone the regular ones.
    assert files(tmp_path) == {"epoch_1", "epoch_4", "best_acc_epoch_5", "epoch_7", "epoch_9"}


def test_one_due_inside_a_window_is_written_at_its_end_with_that_number(tmp_path: Path) -> None:
    # Windows of an epoch of 7 end at 3, 6, 7; due at 2, 4, 6, ...
    train = engine_of(tmp_path / "unused", {}).loaders.train
    hook = CheckpointHook(by_epoch=False, interval=2, save_last=False)
    run(tmp_path, hook, train=[*train, *train][:7], accumulate=3, max_epochs=1)
    assert files(tmp_path) == {"iter_3", "iter_6"}
    assert load(tmp_path / "checkpoints" / "iter_3.pth")["progress"]["iteration"] == 3
    assert load(tmp_path / "checkpoints" / "iter_6.pth")["progress"]["optimizer_step"] == 2


def test_the_checkpoint_of_an_epoch_is_written_before_its_validation(tmp_path: Path) -> None:
    run(tmp_path, CheckpointHook(), max_epochs=2)
    progress = load(tmp_path / "checkpoints" / "epoch_2.pth")["progress"]
    assert (progress["epoch"], progress["iteration"], progress["last_validation"]) == (2, 8, 4)


def last(run_dir: Path) -> str:
    return (run_dir / "checkpoints" / "last_checkpoint").read_text().strip()


def test_a_best_file_is_the_last_checkpoint(tmp_path: Path) -> None:
    options: dict[str, Any] = {"interval": 3, "save_best": "score", "save_last": False}
    """Also at the iteration of a regular file, whose list has the best file that is deleted now."""
    for epochs, expected in ((2, "best_score_epoch_2"), (4, "best_score_epoch_3"), (5, "best_score_epoch_5")):
        folder = tmp_path / str(epochs)
        scores = {"score": Scripted([0.1, 0.2, 0.3, 0.0, 0.4], higher_is_better=True)}
        run(folder, CheckpointHook(**options), metrics=scores, max_epochs=epochs)
        assert last(folder) == f"{expected}.pth"
        assert newest_intact(folder / "checkpoints") == folder / "checkpoints" / f"{expected}.pth"


def test_a_subclass_may_add_any_mount_point(tmp_path: Path) -> None:
    class Own(CheckpointHook):
        iterations = 0

        def after_train_iter(self, *args: Any) -> None:
            super().after_train_iter(*args)
            self.iterations += 1

    hook = Own(interval=None)
    run(tmp_path, hook, max_epochs=1)
    assert hook.iterations == 4


def test_a_checkpoint_that_another_hook_requests_is_the_last_one(tmp_path: Path) -> None:
    class Asking(Hook):
        def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
            if engine.progress.iteration == 6:
                engine.request_checkpoint("preempted")
                engine.request_stop("preempted")

    hooks = {"checkpoint": CheckpointHook(save_last=False), "asking": Asking()}
    engine_of(tmp_path, hooks, max_epochs=3).train()
    assert files(tmp_path) == {"epoch_1", "preempted"}
    assert newest_intact(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "preempted.pth"


def test_a_run_that_is_resumed_earlier_continues_from_there(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run(tmp_path, CheckpointHook(), max_epochs=6)
    second = folder / "epoch_2.pth"
    stopped: dict[str, Hook] = {"checkpoint": CheckpointHook(), "stopper": Stopper(fail_at=10)}
    with pytest.raises(FloatingPointError):
        engine_of(tmp_path, stopped, max_epochs=6, resume=second).train()
    assert newest_intact(folder) == second, "the new branch has no checkpoint yet"
    run(tmp_path, CheckpointHook(max_keep_ckpts=2), max_epochs=4, resume=second)
    assert newest_intact(folder) == folder / "epoch_4.pth"
    assert files(tmp_path) == {"epoch_3", "epoch_4", "epoch_5", "epoch_6"}, "5 and 6 are of the earlier branch"


@pytest.mark.parametrize("point", ["before_train", "before_train_epoch", "before_train_iter", "after_backward"])
def test_an_attempt_to_resume_that_fails_before_it_has_trained_leaves_the_runs_place(
    tmp_path: Path, point: str
) -> None:
    folder = tmp_path / "checkpoints"
    run(tmp_path, CheckpointHook(), max_epochs=4)
    hooks = {"checkpoint": CheckpointHook(), "failing": failing(point)}
    with pytest.raises(RuntimeError, match="on purpose"):
        engine_of(tmp_path, hooks, max_epochs=4, resume=folder / "epoch_2.pth").train()
    assert newest_intact(folder) == folder / "epoch_4.pth"


def test_resuming_from_another_folder_changes_nothing_there(tmp_path: Path) -> None:
    run(tmp_path / "one", CheckpointHook(), max_epochs=2)
    first = tmp_path / "one" / "checkpoints" / "epoch_1.pth"
    run(tmp_path / "two", CheckpointHook(), max_epochs=2, resume=first)
    assert last(tmp_path / "one") == "epoch_2.pth"


def test_a_run_that_stops_early_saves_its_last_weights_once(tmp_path: Path) -> None:
    hooks = {"stopper": Stopper(stop_at=6), "checkpoint": CheckpointHook()}
    engine = engine_of(tmp_path, hooks, max_epochs=5)
    engine.train()
    # Six iterations are not whole epochs, so the name has the iteration.
    assert files(tmp_path) == {"epoch_1", "iter_6"}
    assert same(load(tmp_path / "checkpoints" / "iter_6.pth")["state_dict"], bits(engine.model))


@pytest.mark.parametrize("by_epoch", [True, False])
def test_a_stop_without_save_last_saves_nothing_more(tmp_path: Path, by_epoch: bool) -> None:
    hook = CheckpointHook(interval=4 if by_epoch else 100, by_epoch=by_epoch, save_last=False)
    engine = engine_of(tmp_path, {"stopper": Stopper(stop_at=6), "checkpoint": hook})
    engine.train()
    assert files(tmp_path) == set()


def test_after_an_error_nothing_is_written_as_last_best_or_published(tmp_path: Path) -> None:
    hook = CheckpointHook(save_best="score", rule="greater", published_keys=["state_dict"])
    hooks = {"stopper": Stopper(fail_at=7), "checkpoint": hook}
    engine = engine_of(tmp_path, hooks, metrics={"score": Scripted([0.5, 0.9, 0.9])})
    with pytest.raises(FloatingPointError):
        engine.train()
    assert files(tmp_path) == {"epoch_1", "best_score_epoch_1"}
    assert engine.best is not None
    assert engine.best.value == 0.5


# What. ---------------------------------------------------------------------------------------------------------------


def test_parts_can_be_left_out(tmp_path: Path) -> None:
    run(tmp_path / "all", CheckpointHook(), max_epochs=1)
    run(tmp_path / "less", CheckpointHook(save_optimizer=False, save_param_scheduler=False), max_epochs=1)
    whole = load(tmp_path / "all" / "checkpoints" / "epoch_1.pth")
    less = load(tmp_path / "less" / "checkpoints" / "epoch_1.pth")
    assert whole.keys() - less.keys() == {"optimizer", "schedulers"}
    assert same(whole["state_dict"], less["state_dict"])


def test_published_files_keep_the_named_entries_with_the_averaged_weights(tmp_path: Path) -> None:
    hook = CheckpointHook(save_best="loss", published_keys=["meta", "state_dict"])
    engine = engine_of(tmp_path, {"ema": EMAHook(momentum=0.1, warmup=False), "checkpoint": hook})
    engine.train()
    folder = tmp_path / "checkpoints"
    assert engine.best is not None
    best = Path(engine.best.checkpoint).stem
    assert {name for name in files(tmp_path) if name.endswith("_published")} == {
        "epoch_3_published",
        f"{best}_published",
    }
    for stem in ("epoch_3", best):
        published, source = load(folder / f"{stem}_published.pth"), load(folder / f"{stem}.pth")
        averaged = source["hooks"]["ema"]["averaged"]
        assert published.keys() == {"meta", "state_dict"}
        assert published["state_dict"].keys() == source["state_dict"].keys()
        assert same({name: published["state_dict"][name] for name in averaged}, averaged)
        assert not same(published["state_dict"], source["state_dict"])
    # A run can start from its weights: the metadata does not refer to a missing hook.
    fresh = engine_of(tmp_path / "fresh", {}, load_from=folder / "epoch_3_published.pth", max_iters=0)
    fresh.train()
    assert same(bits(fresh.model), load(folder / "epoch_3_published.pth")["state_dict"])


def test_published_files_have_the_raw_weights_with_weights_raw_and_only_the_best_without_save_last(
    tmp_path: Path,
) -> None:
    hook = CheckpointHook(save_best="loss", save_last=False, published_keys=["state_dict"])
    engine = engine_of(tmp_path, {"ema": EMAHook(), "checkpoint": hook}, weights="raw")
    engine.train()
    assert engine.best is not None
    best = Path(engine.best.checkpoint)
    assert {name for name in files(tmp_path) if "published" in name} == {f"{best.stem}_published"}
    published = load(best.with_name(f"{best.stem}_published.pth"))
    assert same(published["state_dict"], load(best)["state_dict"])


# The best. -----------------------------------------------------------------------------------------------------------


def best_run(tmp_path: Path, metrics: dict[str, Scripted], **options: Any) -> Any:
    length = 4
    return run(tmp_path, CheckpointHook(interval=None, save_last=False, **options), metrics=metrics, max_epochs=length)


@pytest.mark.parametrize("first", ["auto", True])
def test_the_best_file_replaces_the_one_before_it(first: str | bool, tmp_path: Path) -> None:
    engine = best_run(tmp_path, {"accuracy": Scripted([0.1, 0.5, 0.3, 0.5])}, save_best=first)
    assert files(tmp_path) == {"best_accuracy_epoch_2"}
    assert engine.best.metric == "accuracy"
    assert engine.best.value == 0.5
    assert engine.best.iteration == 8
    assert Path(engine.best.checkpoint) == tmp_path / "checkpoints" / "best_accuracy_epoch_2.pth"
    assert load(Path(engine.best.checkpoint))["progress"]["last_validation"] == 8


def test_several_metrics_have_a_best_file_each_and_the_first_is_the_runs(tmp_path: Path) -> None:
    metrics = {"acc": Scripted([0.1, 0.5, 0.3, 0.2]), "val/loss": Scripted([4.0, 3.0, 1.0, 2.0])}
    engine = best_run(tmp_path, metrics, save_best=["val/loss", "acc"])
    assert files(tmp_path) == {"best_acc_epoch_2", "best_val_loss_epoch_3"}
    assert (engine.best.metric, engine.best.value) == ("val/loss", 1.0)


@pytest.mark.parametrize("begin", ["x" * 300, "ü" * 130, "sets/" * 60])
def test_the_best_files_of_metrics_with_long_names_differ(tmp_path: Path, begin: str) -> None:
    metrics = {f"{begin}1": Scripted([0.1, 0.2]), f"{begin}2": Scripted([0.1, 0.2])}
    options: dict[str, Any] = {"save_best": list(metrics), "rule": "greater", "published_keys": ["state_dict"]}
    run(tmp_path, CheckpointHook(**options), metrics=metrics, max_epochs=2)
    best = {path for path in files(tmp_path) if path.startswith("best_")}
    assert len(best) == 4
    assert all(path.endswith(("_epoch_2", "_epoch_2_published")) for path in best)


VALUES = [0.3, 0.9, 0.1, 0.5]
"""Best in the second epoch if greater is better, in the third if less is."""


@pytest.mark.parametrize(
    "options",
    [
        {"rule": ["greater", "less", None]},
        {"greater_keys": ["speed"], "less_keys": ["wer", "loss"]},
        {"rule": [None, "less", "less"], "greater_keys": ["speed"]},
    ],
)
def test_several_metrics_can_have_different_directions(tmp_path: Path, options: dict[str, Any]) -> None:
    metrics = {"speed": Scripted(VALUES), "wer": Scripted(VALUES), "my_loss": Scripted(VALUES)}
    engine = best_run(tmp_path, metrics, save_best=["speed", "wer", "my_loss"], **options)
    assert files(tmp_path) == {"best_speed_epoch_2", "best_wer_epoch_3", "best_my_loss_epoch_3"}
    assert (engine.best.metric, engine.best.value) == ("speed", 0.9)


@pytest.mark.parametrize(
    ("name", "declared", "options", "epoch"),
    [
        ("top-1", None, {}, 2),  # a key of mmengine's list is a part of the name
        ("my_loss", None, {}, 1),
        ("wer", False, {}, 1),  # only the metric says it
        ("r2", True, {}, 2),
        ("stop_time", False, {}, 1),  # a metric's declaration has precedence over "top" in its name
        ("accuracy", None, {"rule": "less"}, 1),
        ("accuracy", True, {"less_keys": ["accuracy"]}, 1),  # the user's option has precedence over both
        ("wer", None, {"greater_keys": ["wer"]}, 2),
        ("wer", None, {"greater_keys": [], "less_keys": ["we"]}, 1),
    ],
)
def test_what_is_better(tmp_path: Path, name: str, declared: bool | None, options: dict[str, Any], epoch: int) -> None:
    metric = Scripted([1.0, 2.0, 1.5, 1.5], declared)
    best_run(tmp_path, {name: metric}, save_best=name, **options)
    assert files(tmp_path) == {f"best_{name}_epoch_{epoch}"}


@pytest.mark.parametrize(
    ("options", "names"),
    [({"val": False}, []), ({"max_epochs": 1}, ["speed"]), ({"task": "nameless", "max_epochs": 1}, ["loss"])],
)
def test_auto_without_validations_or_a_known_rule_keeps_no_best(
    tmp_path: Path, options: dict[str, Any], names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """`hydraloop/project` selects it: each project must run."""

    class Nameless(Task):
        metric_names: Any = ()

    if "task" in options:
        options = {**options, "task": Nameless(model(), nn.functional.mse_loss)}
    hook = CheckpointHook(save_best="auto", max_keep_ckpts=1)
    with caplog.at_level(logging.INFO):
        run(tmp_path, hook, metrics={"speed": Scripted([1.0])}, **options)
    assert {stem.partition("_")[0] for stem in files(tmp_path)} == {"epoch"}
    found = [line for line in caplog.messages if line.startswith("no best checkpoint is kept: hooks.checkpoint.")]
    assert all(f"'{name}'" in line for name, line in zip(names, found, strict=True))


@pytest.mark.parametrize(("rule", "epoch"), [("greater", 4), ("less", 3)])
def test_nan_and_infinity_are_never_best(tmp_path: Path, rule: str, epoch: int) -> None:
    values = Scripted([float("nan"), float("-inf") if rule == "less" else float("inf"), 1.0, 2.0])
    best_run(tmp_path, {"score": values}, save_best="score", rule=rule)
    assert files(tmp_path) == {f"best_score_epoch_{epoch}"}


# Going on. -----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_the_best_and_the_files_it_deletes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_keep_ckpts": 2, "save_best": "acc"}
    run(tmp_path, CheckpointHook(**options), metrics={"acc": Scripted([0.1, 0.8])}, max_epochs=2)
    assert files(tmp_path) == {"epoch_1", "epoch_2", "best_acc_epoch_2"}
    newest = tmp_path / "checkpoints" / "best_acc_epoch_2.pth"
    second = {"max_epochs": 4, "resume": newest}
    engine = run(tmp_path, CheckpointHook(**options), metrics={"acc": Scripted([0.7, 0.6])}, **second)
    assert files(tmp_path) == {"epoch_3", "epoch_4", "best_acc_epoch_2"}
    assert (engine.best.value, Path(engine.best.checkpoint)) == (0.8, newest)
    third = {"max_epochs": 6, "resume": tmp_path / "checkpoints" / "epoch_4.pth"}
    engine = run(tmp_path, CheckpointHook(**options), metrics={"acc": Scripted([0.7, 0.6, 0.9])}, **third)
    assert files(tmp_path) == {"epoch_5", "epoch_6", "best_acc_epoch_6"}
    assert engine.best.iteration == 24


@pytest.mark.parametrize("resumed", ["acc", "err"])
def test_metrics_that_are_best_at_the_same_time_share_one_file_with_a_name_for_each(
    tmp_path: Path, resumed: str
) -> None:
    options: dict[str, Any] = {"interval": None, "save_last": False, "save_best": ["acc", "err"]}
    options["rule"] = ["greater", "less"]
    metrics = {"acc": Scripted([0.1, 0.8]), "err": Scripted([0.9, 0.2])}
    run(tmp_path, CheckpointHook(**options), metrics=metrics, max_epochs=2)
    assert files(tmp_path) == {"best_acc_epoch_2", "best_err_epoch_2"}
    folder = tmp_path / "checkpoints"
    assert (folder / "best_acc_epoch_2.pth").samefile(folder / "best_err_epoch_2.pth")
    resume = tmp_path / "checkpoints" / f"best_{resumed}_epoch_2.pth"
    metrics = {"acc": Scripted([0.5]), "err": Scripted([0.5])}
    run(tmp_path, CheckpointHook(**options), metrics=metrics, max_epochs=3, resume=resume)
    assert files(tmp_path) == {"best_acc_epoch_2", "best_err_epoch_2"}


def test_where_the_file_system_has_no_links_the_other_best_files_are_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: Path) -> None:
        raise PermissionError("no links")

    monkeypatch.setattr("os.link", refuse)
    metrics = {"acc": Scripted([0.1]), "err": Scripted([0.9])}
    options: dict[str, Any] = {"save_best": ["acc", "err"], "rule": ["greater", "less"], "save_last": False}
    run(tmp_path, CheckpointHook(interval=None, **options), metrics=metrics, max_epochs=1)
    acc, err = (tmp_path / "checkpoints" / f"best_{name}_epoch_1.pth" for name in ("acc", "err"))
    assert not acc.samefile(err)
    assert acc.read_bytes() == err.read_bytes()


def test_a_moved_run_finds_its_files(tmp_path: Path) -> None:
    run(tmp_path / "old", CheckpointHook(save_best="acc"), metrics={"acc": Scripted([0.8])}, max_epochs=1)
    (tmp_path / "old").rename(tmp_path / "new")
    best = tmp_path / "new" / "checkpoints" / "best_acc_epoch_1.pth"
    hook = CheckpointHook(save_best="acc", max_keep_ckpts=1)
    engine = run(tmp_path / "new", hook, metrics={"acc": Scripted([0.1])}, max_epochs=2, resume=best)
    assert Path(engine.best.checkpoint) == best
    assert files(tmp_path / "new") == {"epoch_2", "best_acc_epoch_1"}


def test_a_best_validation_whose_file_is_gone_is_still_the_best(tmp_path: Path) -> None:
    run(tmp_path, CheckpointHook(save_best="acc"), metrics={"acc": Scripted([0.8, 0.7])}, max_epochs=2)
    (tmp_path / "checkpoints" / "best_acc_epoch_1.pth").unlink()
    hook = CheckpointHook(save_best="acc")
    resume = tmp_path / "checkpoints" / "epoch_2.pth"
    engine = run(tmp_path, hook, metrics={"acc": Scripted([0.7, 0.75])}, max_epochs=3, resume=resume)
    assert (engine.best.value, engine.best.checkpoint) == (0.8, None)
    assert files(tmp_path) == {"epoch_1", "epoch_2", "epoch_3"}


def test_the_best_file_of_the_validation_that_was_pending_stays_the_last_checkpoint(tmp_path: Path) -> None:
    """The pointer to the resumed file is written before it, not at the end of the first window after it."""

    class Saving(Hook):
        def after_train_epoch(self, engine: Engine) -> None:
            if engine.progress.epoch == 1:
                engine.checkpoints.save(engine.run_dir / "checkpoints" / "own.pth")

    def train(*scores: float, epochs: int, resume: Path | None = None) -> None:
        hooks = {"own": Saving(), "checkpoint": CheckpointHook(interval=None, save_last=False, save_best="acc")}
        metrics = {"acc": Scripted(scores, higher_is_better=True)}
        engine_of(tmp_path, hooks, metrics=metrics, max_epochs=epochs, resume=resume).train()

    train(0.2, epochs=1)
    train(0.2, 0.1, epochs=2, resume=tmp_path / "checkpoints" / "own.pth")
    assert last(tmp_path) == "best_acc_epoch_1.pth"


def test_a_resumed_run_that_is_over_writes_nothing_new(tmp_path: Path) -> None:
    run(tmp_path, CheckpointHook(), max_epochs=1)
    path = tmp_path / "checkpoints" / "epoch_1.pth"
    written = path.stat().st_mtime_ns
    run(tmp_path, CheckpointHook(), max_epochs=1, resume=path)
    assert files(tmp_path) == {"epoch_1"}
    assert path.stat().st_mtime_ns == written


def _killed_before_deleting(path: Path) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("options", "prefix"),
    [
        ({"interval": None, "save_last": False, "save_best": "acc"}, "best_acc_"),
        ({"max_keep_ckpts": 1}, ""),
    ],
    ids=["best", "regular"],
)
def test_what_a_killed_run_could_not_delete_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], prefix: str
) -> None:
    options["asynchronous"] = False
    monkeypatch.setattr(saver, "remove", _killed_before_deleting)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, CheckpointHook(**options), metrics={"acc": Scripted([0.1, 0.2])})
    assert files(tmp_path) == {f"{prefix}epoch_1", f"{prefix}epoch_2"}
    monkeypatch.undo()
    resume = tmp_path / "checkpoints" / f"{prefix}epoch_2.pth"
    # Two values: after the regular checkpoint, the validation of epoch 2 is still to be done.
    run(tmp_path, CheckpointHook(**options), metrics={"acc": Scripted([0.3, 0.4])}, resume=resume)
    assert files(tmp_path) == {f"{prefix}epoch_3"}


# Where. --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dir", ["weights/mine", "~/weights", "$absolute/a b/weights"])
def test_an_out_dir_may_be_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out_dir: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    engine = run(
        tmp_path / "run",
        CheckpointHook(out_dir=out_dir.replace("$absolute", str(tmp_path)), save_best="loss", interval=None),
        max_epochs=1,
    )
    roots = {"weights/mine": tmp_path / "here", "~/weights": tmp_path / "home", "$absolute/a b/weights": tmp_path}
    folder = roots[out_dir] / out_dir.removeprefix("~/").removeprefix("$absolute/")
    assert files(folder) == {"epoch_1", "best_loss_epoch_1"}
    assert (folder / "last_checkpoint").is_file()
    assert Path(engine.best.checkpoint).resolve() == folder / "best_loss_epoch_1.pth"
    assert not list((tmp_path / "here").glob("~*"))


def test_checkpoints_are_not_written_where_python_reads_pth_files(tmp_path: Path) -> None:
    """Python stops at a binary `.pth` file there, and executes lines of it that begin with `import`."""
    with pytest.raises(UserError, match=r"hooks\.checkpoint\.out_dir: Python reads \.pth files in .*site-packages"):
        run(tmp_path / "run", CheckpointHook(out_dir=tmp_path / "lib" / "site-packages"), max_epochs=1)
    assert not (tmp_path / "lib").exists()


def test_what_a_kill_left_unfinished_is_removed_when_training_starts(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / ".epoch_2.pth.7.part").write_bytes(b"cut")
    (folder / ".epoch_1_published.safetensors.7.part").write_bytes(b"cut")
    (folder / ".last_checkpoint.7.part").write_bytes(b"cut")
    (folder / ".film.part").write_bytes(b"of the user")
    engine_of(tmp_path, {"checkpoint": CheckpointHook()}).validate()
    assert len(list(folder.glob(".*"))) == 4, "another process may train"
    run(tmp_path, CheckpointHook(), max_epochs=1)
    assert [path.name for path in folder.glob(".*")] == [".film.part"]


def test_the_files_of_another_run_are_not_overwritten(tmp_path: Path) -> None:
    run(tmp_path / "one", CheckpointHook(out_dir=tmp_path / "disk"), max_epochs=1)
    before = load(tmp_path / "disk" / "epoch_1.pth")["meta"]["time"]
    with pytest.raises(UserError, match=r"hooks\.checkpoint\.out_dir: .*another run"):
        run(tmp_path / "two", CheckpointHook(out_dir=tmp_path / "disk"), max_epochs=1)
    assert load(tmp_path / "disk" / "epoch_1.pth")["meta"]["time"] == before


def test_the_own_folder_of_another_run_is_not_written_to(tmp_path: Path) -> None:
    run(tmp_path / "one", CheckpointHook(), max_epochs=1)
    folder = tmp_path / "one" / "checkpoints"
    (tmp_path / "link").symlink_to(folder)
    before = load(folder / "epoch_1.pth")["meta"]["time"]
    for out_dir in (folder, tmp_path / "link"):
        with pytest.raises(UserError, match=r"hooks\.checkpoint\.out_dir: .*another run"):
            run(tmp_path / "two", CheckpointHook(out_dir=out_dir, max_keep_ckpts=1), max_epochs=2)
    assert files(tmp_path / "one") == {"epoch_1"}
    assert load(folder / "epoch_1.pth")["meta"]["time"] == before
    (tmp_path / "two" / RECORDS).mkdir()
    # It continues from the file there, which it has not written: neither this process nor a later one deletes it.
    for epochs, resume in ((3, "epoch_1"), (4, "epoch_3")):
        hook = CheckpointHook(out_dir=folder, max_keep_ckpts=1)
        run(tmp_path / "two", hook, max_epochs=epochs, resume=folder / f"{resume}.pth")
    assert files(tmp_path / "one") == {"epoch_1", "epoch_4"}


def test_a_resumed_run_does_not_overwrite_those_of_another_either(tmp_path: Path) -> None:
    run(tmp_path / "one", CheckpointHook(out_dir=tmp_path / "disk"), max_epochs=2)
    before = load(tmp_path / "disk" / "epoch_2.pth")["meta"]["time"]
    run(tmp_path / "two", CheckpointHook(), max_epochs=1)
    resume = tmp_path / "two" / "checkpoints" / "epoch_1.pth"
    with pytest.raises(UserError, match=r"hooks\.checkpoint\.out_dir: .*another run"):
        run(tmp_path / "two", CheckpointHook(out_dir=tmp_path / "disk"), max_epochs=2, resume=resume)
    assert load(tmp_path / "disk" / "epoch_2.pth")["meta"]["time"] == before


def test_a_moved_run_continues_in_its_folder_elsewhere(tmp_path: Path) -> None:
    run(tmp_path / "old", CheckpointHook(out_dir=tmp_path / "disk"), max_epochs=1)
    (tmp_path / "old").rename(tmp_path / "new")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    resume = tmp_path / "link" / "epoch_1.pth"
    run(tmp_path / "new", CheckpointHook(out_dir=tmp_path / "disk"), max_epochs=2, resume=resume)
    assert files(tmp_path / "disk") == {"epoch_1", "epoch_2"}


@pytest.mark.parametrize("out_dir", ["$tmp/file/dir", "$tmp/" + "long" * 99])
def test_an_out_dir_that_cannot_be_written_to_is_an_error_before_training(tmp_path: Path, out_dir: str) -> None:
    (tmp_path / "file").touch()
    hook = CheckpointHook(out_dir=out_dir.replace("$tmp", str(tmp_path)))
    engine = engine_of(tmp_path / "run", {"checkpoint": hook})
    with pytest.raises(UserError, match=r"hooks\.checkpoint\.out_dir: .*cannot be written") as error:
        engine.train()
    assert error.value.remedy == "Use a folder that you may write to."
    assert engine.progress.iteration == 0


# Mistakes. -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_best": 3}, r"save_best: there is no metric '3'"),
        ({"save_best": "acuracy"}, r"save_best: there is no metric 'acuracy'\n  Did you mean accuracy"),
        ({"save_best": ["auto", "loss"]}, r"save_best: there is no metric 'auto'"),
        ({"save_best": "speed"}, r"checkpoint\.rule: it is not known whether"),
        ({"save_best": "accuracy", "val": False}, r"save_best: this needs a validation"),
    ],
)
def test_options_that_do_not_fit_the_run_are_refused_before_the_first_iteration(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    hook = CheckpointHook(save_best=options.pop("save_best"))
    metrics = {"accuracy": Scripted([]), "speed": Scripted([])}
    engine = engine_of(tmp_path, {"checkpoint": hook}, metrics=metrics, **options)
    with pytest.raises(UserError, match=message):
        engine.train()
    assert engine.progress.iteration == 0
