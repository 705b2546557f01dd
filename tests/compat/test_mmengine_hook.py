"""MMEngineHook with objects that have a hook's methods; with real hooks: test_with_mmengine.py."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop.compat import MMEngineHook
from hydraloop.engine.hook import MOUNT_POINTS, Hook
from hydraloop.engine.hook_order import mount_points_of, slot_of
from hydraloop.engine.optimizers.optimizer_set import OptimizerSet
from hydraloop.errors import UserError
from hydraloop.hooks import CheckpointHook, LoggerHook, RuntimeInfoHook
from hydraloop.safety.allowlist import ALLOWLIST
from tests.compat.scripts import engine_with, refusal
from tests.helpers import Recorder, logged
from tests.hooks.tiny_runs import BATCHES, Stopper, load, model

POINTS = [
    point
    for point in MOUNT_POINTS
    if point not in ("at_position", "after_backward", "before_optimizer_step", "on_log", "on_exception")
]


class Writes:
    """Records each call with the names of its arguments."""

    def __init__(self) -> None:
        self.trace: list[str] = []
        self.named: dict[str, list[str]] = {}


def _writing(point: str) -> Callable[..., None]:
    def method(self: Writes, runner: Any, **arguments: Any) -> None:
        batch_idx = f" {arguments['batch_idx']}" if "batch_idx" in arguments else ""
        self.trace.append(f"{point}{batch_idx}")
        self.named[point] = list(arguments)

    return method


for _point in POINTS:
    setattr(Writes, _point, _writing(_point))


def hook_with(**methods: Callable[..., Any]) -> MMEngineHook:
    """A hook whose object has these methods, without self."""
    return MMEngineHook(type("Theirs", (), {name: staticmethod(method) for name, method in methods.items()})())


def test_all_22_points_are_called_where_ours_are(tmp_path: Path) -> None:
    engine_with(CheckpointHook(), max_epochs=1, run_dir=tmp_path / "first").train()
    resume = tmp_path / "first" / "checkpoints" / "epoch_1.pth"
    writes, recorder = Writes(), Recorder()
    hooks = (MMEngineHook(writes), recorder, CheckpointHook())
    engine_with(
        *hooks, max_epochs=2, test=True, resume=resume, resume_strict=False, run_dir=tmp_path / "second"
    ).train()
    assert set(writes.named) == set(POINTS)
    assert writes.trace == [entry for entry in recorder.trace if entry.split()[0] in POINTS]
    assert writes.named["before_run"] == []
    assert writes.named["before_train_iter"] == ["batch_idx", "data_batch"]
    assert writes.named["after_test_iter"] == ["batch_idx", "data_batch", "outputs"]
    assert writes.named["after_val_epoch"] == ["metrics"]
    assert writes.named["before_save_checkpoint"] == ["checkpoint"]


def test_only_what_the_object_has_is_a_mount_point() -> None:
    hook = hook_with(after_train_epoch=print, helper=print)
    assert mount_points_of(hook.overrides) == ("after_train_epoch",)
    assert not hook.overrides("state_dict")
    assert "mmengine" not in sys.modules


def test_its_own_priority_is_taken() -> None:
    theirs = Writes()
    assert slot_of("theirs", MMEngineHook(theirs)).priority == 50
    theirs.priority = "VERY_LOW"  # type: ignore[attr-defined]  # as a config sets it there
    assert slot_of("theirs", MMEngineHook(theirs)).priority == 90
    assert slot_of("theirs", MMEngineHook(theirs), "HIGH").priority == 30


def test_iter_and_epoch_do_not_count_the_current_one(tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}

    def at(point: str) -> Callable[..., None]:
        return lambda runner, **_: seen.setdefault(point, []).append((runner.iter, runner.epoch))

    points = ("before_train_iter", "after_train_iter", "after_train_epoch", "after_val_epoch", "after_train")
    engine_with(hook_with(**{point: at(point) for point in points}), max_epochs=2, run_dir=tmp_path).train()
    assert seen["before_train_iter"] == seen["after_train_iter"] == [(n, n // BATCHES) for n in range(2 * BATCHES)]
    assert seen["after_train_epoch"] == [(BATCHES, 0), (2 * BATCHES, 1)]
    assert seen["after_val_epoch"] == [(BATCHES, 1), (2 * BATCHES, 2)]
    assert seen["after_train"] == [(2 * BATCHES, 2)]


def test_numbers_of_several_optimizers_have_their_names(tmp_path: Path) -> None:
    found: list[Any] = []

    def before_train(runner: Any) -> None:
        found.extend([runner.optim_wrapper.get_lr(), runner.optim_wrapper.get_momentum()])
        found.append(runner.message_hub.get_scalar("train/b.lr").current())

    net = model()
    first = torch.optim.SGD([{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.5}], lr=0.25)
    optimizer = OptimizerSet({"a": first, "b": torch.optim.AdamW(net[3].parameters(), lr=0.125)})
    engine_with(
        hook_with(before_train=before_train), net=net, optimizer=optimizer, max_epochs=1, run_dir=tmp_path
    ).train()
    assert found == [{"a.lr": [0.25, 0.5], "b.lr": [0.125]}, {"a.momentum": [0, 0], "b.momentum": [0.9]}, 0.125]


def test_what_the_runner_has(tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    def before_train(runner: Any) -> None:
        names = (
            "max_iters max_epochs val_interval val_begin work_dir log_dir experiment_name seed rank world_size "
            "distributed model train_dataloader val_dataloader test_dataloader hooks"
        )
        found.update({name: getattr(runner, name) for name in names.split()})
        loop, wrapper = runner.train_loop, runner.optim_wrapper
        found["loop"] = [loop.iter, loop.epoch, loop.max_iters, loop.max_epochs, loop.val_interval, loop.val_begin]
        found["loaders"] = [loop.dataloader, runner.val_loop.dataloader, runner.test_loop.dataloader]
        found["optimizer"] = [wrapper.optimizer, wrapper.param_groups, wrapper.get_lr(), wrapper.get_momentum()]
        runner.logger.info("said")

    hook = hook_with(before_train=before_train)
    engine = engine_with(hook, max_epochs=2, test=True, run_dir=tmp_path)
    engine.train()
    loaders, optimizer = engine.loaders, engine.optimizer
    assert found["loop"] == [0, 0, 2 * BATCHES, 2, 1, 0]
    assert [found[name] for name in ("max_iters", "max_epochs", "val_interval", "val_begin")] == [2 * BATCHES, 2, 1, 0]
    assert found["loaders"] == [loaders.train, loaders.val, loaders.test]
    assert [found[f"{split}_dataloader"] for split in ("train", "val", "test")] == found["loaders"]
    assert found["optimizer"] == [optimizer, optimizer.param_groups, {"lr": [0.1]}, {"momentum": [0.9]}]
    assert found["model"] is engine.model
    assert found["hooks"] == [hook.wrapped]
    assert found["work_dir"] == found["log_dir"] == str(tmp_path)
    assert [found[name] for name in ("experiment_name", "seed", "rank", "world_size", "distributed")] == [
        tmp_path.name,
        0,
        0,
        1,
        False,
    ]


def test_the_model_is_in_evaluation_mode_after_a_validation_and_test(tmp_path: Path) -> None:
    seen: list[bool] = []
    points = ("after_val_epoch", "after_val", "after_test_epoch", "after_test")
    theirs = {point: lambda runner, **_: seen.append(runner.model[1].training) for point in points}
    engine = engine_with(hook_with(**theirs), max_epochs=1, test=True, run_dir=tmp_path)
    engine.train()
    assert seen == [False] * 4
    assert engine.model[1].training  # type: ignore[index]  # a Sequential


def test_scalars_go_into_the_records_and_information_to_other_hooks(tmp_path: Path) -> None:
    seen: list[Any] = []

    def after_train_iter(runner: Any, **_: Any) -> None:
        hub = runner.message_hub
        hub.update_scalar("train/twice", torch.tensor([2.0 * runner.iter]))
        hub.update_scalars({"train/thrice": 3 * runner.iter, "val/hidden": {"value": 8.0, "count": 2}})
        hub.update_info("last", runner.iter)
        hub.update_info_dict({"gone": 1})

    def after_train_epoch(runner: Any) -> None:
        hub = runner.message_hub
        seen.append([hub.get_info(name) for name in ("last", "epoch", "iter", "max_epochs", "max_iters", "none")])
        seen.append([hub.pop_info("gone"), hub.get_info("gone", "away"), "last" in hub.runtime_info])
        names = ("train/twice", "train/thrice", "val/hidden", "train/lr")
        seen.append([hub.get_scalar(name).current() for name in names])
        seen.append(hub.get_scalar("train/loss").current() > 0)

    other = hook_with(after_train_epoch=after_train_epoch)
    hooks = (hook_with(after_train_iter=after_train_iter), other, RuntimeInfoHook(), LoggerHook(interval=BATCHES))
    engine_with(*hooks, max_epochs=1, run_dir=tmp_path).train()
    assert seen == [[3, 1, BATCHES, 1, BATCHES, None], [1, "away", True], [6.0, 9.0, 8.0, 0.1], True]
    record, validated = map(json.loads, (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert (record["train/twice"], record["train/thrice"]) == (3.0, 4.5)
    assert "val/hidden" not in record | validated


def test_a_scalar_with_a_count_is_a_sum(tmp_path: Path) -> None:
    """As in mmengine, a window's mean is the sum of its values divided by the sum of its counts."""
    seen: list[float] = []

    def after_train_iter(runner: Any, batch_idx: int, **_: Any) -> None:
        hub = runner.message_hub
        hub.update_scalar("train/even", 10.0, count=2)
        hub.update_scalars({"train/uneven": {"value": torch.tensor(6.0), "count": 1 + batch_idx}})
        seen.append(hub.get_scalar("train/even").current())

    hooks = (hook_with(after_train_iter=after_train_iter), LoggerHook(interval=BATCHES))
    engine_with(*hooks, max_epochs=1, val=False, run_dir=tmp_path).train()
    record = json.loads((tmp_path / "metrics.jsonl").read_text(encoding="utf-8"))
    assert (record["train/even"], record["train/uneven"]) == (5.0, 24 / (1 + 2 + 3 + 4))
    assert seen == [10.0] * BATCHES


def test_a_count_of_nothing_has_no_counterpart(tmp_path: Path) -> None:
    hook = hook_with(before_train=lambda runner: runner.message_hub.update_scalar("train/mine", 0.0, count=0))
    said = refusal(engine_with(hook, run_dir=tmp_path).train)
    assert "count=0 of mmengine's runner.message_hub.update_scalar has no counterpart" in said


def test_hydraloops_own_numbers_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def after_train_iter(runner: Any, **_: Any) -> None:
        for name in ("loss", "epoch", "lr"):
            runner.message_hub.update_scalar(name, 100.0)
        assert runner.message_hub.get_scalar("loss").current() == 100.0

    def record(hook: Hook, run_dir: Path) -> dict[str, Any]:
        hooks = (RuntimeInfoHook(), LoggerHook(interval=BATCHES), hook)
        engine_with(*hooks, max_epochs=1, val=False, run_dir=run_dir).train()
        (made,) = logged(run_dir / "metrics.jsonl")
        made.pop("memory")
        return made

    alone = record(Hook(), tmp_path / "alone")
    with caplog.at_level(logging.WARNING):
        both = record(hook_with(after_train_iter=after_train_iter), tmp_path / "both")
    assert both == {**alone, "h2/loss": 100.0, "h2/epoch": 100.0, "h2/lr": 100.0}
    said = [entry.getMessage() for entry in caplog.records]
    assert said[0] == ("hooks.h2: Theirs logs 'loss', a name that hydraloop uses; in the records it is 'h2/loss'")
    assert len(said) == 3


def test_an_unknown_scalar_is_named_with_those_there_are(tmp_path: Path) -> None:
    hook = hook_with(after_val_epoch=lambda runner, metrics: runner.message_hub.get_scalar("train/nothing"))
    with pytest.raises(KeyError, match="train/nothing is not in the message hub; it has train/lr, val/accuracy"):
        engine_with(hook, max_epochs=1, run_dir=tmp_path).train()


def test_stop_training(tmp_path: Path) -> None:
    def after_train_iter(runner: Any, batch_idx: int, data_batch: Any, outputs: Any) -> None:
        runner.train_loop.stop_training = False
        assert not runner.train_loop.stop_training
        if runner.iter == 1:
            runner.train_loop.stop_training = True
            assert runner.train_loop.stop_training

    engine = engine_with(hook_with(after_train_iter=after_train_iter), run_dir=tmp_path)
    result = engine.train()
    assert (result.status, engine.progress.iteration) == ("stopped", 2)
    assert result.reason == "Theirs set train_loop.stop_training in after_train_iter"


def test_stopping_cannot_be_taken_back(tmp_path: Path) -> None:
    def before_train(runner: Any) -> None:
        runner.train_loop.stop_training = True
        runner.train_loop.stop_training = False

    said = refusal(engine_with(hook_with(before_train=before_train), run_dir=tmp_path).train)
    assert "withdrawing train_loop.stop_training has no counterpart" in said


def test_save_checkpoint(tmp_path: Path) -> None:
    def after_train_epoch(runner: Any) -> None:
        runner.save_checkpoint(runner.work_dir, f"mine_{runner.epoch}.pth", save_optimizer=False, by_epoch=False)

    engine_with(hook_with(after_train_epoch=after_train_epoch), max_epochs=1, run_dir=tmp_path).train()
    saved = load(tmp_path / "mine_0.pth")
    assert "state_dict" in saved
    assert "optimizer" not in saved


@pytest.mark.parametrize("point", ["after_run", "before_save_checkpoint"])
def test_no_checkpoint_can_be_asked_for_where_none_is_written(tmp_path: Path, point: str) -> None:
    hook = hook_with(**{point: lambda runner, **_: runner.save_checkpoint(runner.work_dir, "mine.pth")})
    said = refusal(engine_with(hook, CheckpointHook(), max_epochs=1, run_dir=tmp_path).train)
    assert f"mmengine's runner.save_checkpoint in {point} has no counterpart in hydraloop" in said
    assert "Request it at an earlier point" in said


def test_a_checkpoint_may_be_added_to_but_not_changed(tmp_path: Path) -> None:
    def adds(runner: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["theirs"] = {"seen": runner.iter}

    def replaces(runner: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {}

    hooks = (hook_with(before_save_checkpoint=adds), CheckpointHook())
    engine_with(*hooks, max_epochs=1, run_dir=tmp_path / "first").train()
    path = tmp_path / "first" / "checkpoints" / "epoch_1.pth"
    loaded: list[Any] = []
    hook = hook_with(after_load_checkpoint=lambda runner, checkpoint: loaded.append(checkpoint["theirs"]))
    engine_with(hook, max_epochs=1, resume=path, resume_strict=False, run_dir=tmp_path / "second").train()
    assert loaded == [{"seen": BATCHES}]

    hooks = (hook_with(before_save_checkpoint=replaces), CheckpointHook())
    said = refusal(engine_with(*hooks, max_epochs=1, run_dir=tmp_path / "third").train)
    assert "Theirs changes 'state_dict." in said


def _zeroed(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(value) for name, value in state.items()}


@pytest.mark.parametrize(
    ("change", "entry"),
    [
        (lambda checkpoint: checkpoint["state_dict"].pop("0.weight"), "state_dict.0.weight"),
        (lambda checkpoint: checkpoint["state_dict"].update(_zeroed(checkpoint["state_dict"])), "state_dict.0.weight"),
        (lambda checkpoint: checkpoint["state_dict"].update(extra=torch.zeros(1)), "state_dict.extra"),
        (lambda checkpoint: checkpoint["state_dict"]["0.bias"].zero_(), "state_dict.0.bias"),
        (lambda checkpoint: checkpoint.update(state_dict=_zeroed(checkpoint["state_dict"])), "state_dict.0.weight"),
        (lambda checkpoint: checkpoint["optimizer"]["param_groups"][0].update(lr=9.0), "optimizer.param_groups.0.lr"),
        (lambda checkpoint: checkpoint["optimizer"]["param_groups"].append({}), "optimizer.param_groups.1"),
        (lambda checkpoint: checkpoint["meta"].update(mine=1), "meta.mine"),
        (lambda checkpoint: checkpoint.pop("progress"), "progress"),
    ],
)
@pytest.mark.parametrize("point", ["before_save_checkpoint", "after_load_checkpoint"])
def test_no_entry_of_hydraloops_can_be_changed(
    tmp_path: Path, point: str, change: Callable[[dict[str, Any]], object], entry: str
) -> None:
    hook = hook_with(**{point: lambda runner, checkpoint: change(checkpoint)})
    options: dict[str, Any] = {}
    if point == "after_load_checkpoint":
        engine_with(CheckpointHook(), max_epochs=1, run_dir=tmp_path / "first").train()
        path = tmp_path / "first" / "checkpoints" / "epoch_1.pth"
        options = {"resume": path, "resume_strict": False}
    engine = engine_with(hook, CheckpointHook(), max_epochs=1, run_dir=tmp_path / "second", **options)
    said = refusal(engine.train)
    assert said.startswith(f"hooks.h0: Theirs changes {entry!r} of the checkpoint in {point}")
    assert not list((tmp_path / "second").glob("checkpoints/*.pth"))


def test_a_file_of_bare_weights_cannot_be_changed_either(tmp_path: Path) -> None:
    first = engine_with(run_dir=tmp_path / "first")
    torch.save(first.model.state_dict(), tmp_path / "weights.pth")
    hook = hook_with(after_load_checkpoint=lambda runner, checkpoint: checkpoint.update(_zeroed(checkpoint)))
    said = refusal(engine_with(hook, load_from=tmp_path / "weights.pth", run_dir=tmp_path / "second").train)
    assert "Theirs changes '0.weight' of the checkpoint in after_load_checkpoint" in said
    assert "change the model, or" in said


def test_what_one_hook_adds_the_next_may_have(tmp_path: Path) -> None:
    """Equal plain values, or a dict with equal entries, are not a change."""

    def same(runner: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = dict(checkpoint["state_dict"])
        checkpoint["meta"]["experiment_name"] = "".join(checkpoint["meta"].get("experiment_name", ""))
        checkpoint["theirs"] = [1]

    taken: list[Any] = []
    first = hook_with(
        before_save_checkpoint=same,
        after_load_checkpoint=lambda runner, checkpoint: taken.append(checkpoint.pop("theirs")),
    )
    second = hook_with(
        before_save_checkpoint=lambda runner, checkpoint: taken.append(checkpoint["theirs"]),
        after_load_checkpoint=lambda runner, checkpoint: taken.append("theirs" in checkpoint),
    )
    hooks = (first, second, CheckpointHook())
    options = {"experiment_name": "mine"}
    engine_with(*hooks, max_epochs=1, metadata=options, run_dir=tmp_path / "first").train()
    path = tmp_path / "first" / "checkpoints" / "epoch_1.pth"
    engine_with(*hooks, max_epochs=1, resume=path, run_dir=tmp_path / "second").train()
    assert taken == [[1], [1], False]


class Counts:
    """A hook with state."""

    def __init__(self) -> None:
        self.epochs = 0

    def after_train_epoch(self, runner: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


def test_its_state_is_resumed(tmp_path: Path) -> None:
    engine_with(MMEngineHook(Counts()), CheckpointHook(), max_epochs=2, run_dir=tmp_path / "first").train()
    again, path = Counts(), tmp_path / "first" / "checkpoints" / "epoch_2.pth"
    assert load(path)["hooks"]["h0"] == {"epochs": 2}
    engine_with(MMEngineHook(again), CheckpointHook(), resume=path, run_dir=tmp_path / "second").train()
    assert again.epochs == 3


def test_nothing_but_what_came_before_is_called_after_an_error(tmp_path: Path) -> None:
    writes = Writes()
    with pytest.raises(FloatingPointError):
        engine_with(MMEngineHook(writes), Stopper(fail_at=2), run_dir=tmp_path).train()
    assert writes.trace[-1] == "after_train_iter 1"


def test_what_the_runner_has_not_is_named_with_its_user_and_the_place(tmp_path: Path) -> None:
    def after_val_epoch(runner: Any, metrics: Any) -> None:
        assert not hasattr(runner, "visualizer")
        assert getattr(runner.train_loop, "iter_time", 7) == 7
        runner.optim_wrapper.update_params(None)

    said = refusal(engine_with(hook_with(after_val_epoch=after_val_epoch), run_dir=tmp_path).train)
    assert said.startswith("hooks.h0: mmengine's runner.optim_wrapper.update_params has no counterpart in hydraloop")
    assert "(used by Theirs in after_val_epoch)" in said


@pytest.mark.parametrize("name", ["model", "iter", "my_flag"])
def test_nothing_of_the_runner_can_be_replaced(tmp_path: Path, name: str) -> None:
    hook = hook_with(before_train=lambda runner: setattr(runner, name, 1))
    said = refusal(engine_with(hook, run_dir=tmp_path).train)
    assert f"setting mmengine's runner.{name} has no counterpart" in said


def test_meta_of_a_checkpoint_does_not_carry_over(tmp_path: Path) -> None:
    hook = hook_with(after_train_epoch=lambda runner: runner.save_checkpoint(".", "x.pth", meta={"epoch": 1}))
    said = refusal(engine_with(hook, run_dir=tmp_path).train)
    assert "meta of mmengine's runner.save_checkpoint has no counterpart" in said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Writes, "Writes.* is not a"),
        ("EmptyCacheHook", "'EmptyCacheHook' is not an mmengine hook"),
        ({"type": "EmptyCacheHook"}, "is not an mmengine hook"),
        (object(), "object has none of MMEngine's mount points"),
        (type("Old", (), {"before_epoch": print})(), "Old.before_epoch is not a mount point of MMEngine"),
    ],
)
def test_what_is_no_hook_is_refused(wrong: object, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("(", r"\(")) as error:
        MMEngineHook(wrong)
    assert error.value.key == "hook"


def test_it_may_be_named_in_a_config() -> None:
    assert ALLOWLIST.locate("hydraloop.compat.MMEngineHook", "hooks.theirs") is MMEngineHook
    assert issubclass(MMEngineHook, Hook)
    with pytest.raises(UserError, match="a config may not instantiate"):
        ALLOWLIST.locate("hydraloop.compat.stand_in.Context", "hooks.theirs")
