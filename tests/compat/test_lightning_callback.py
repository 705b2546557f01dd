"""LightningCallback with objects that have a callback's methods; with real callbacks: test_with_lightning.py."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydraloop.compat import LightningCallback
from hydraloop.compat.lightning_callback import ALWAYS, POINTS
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.hook_order import mount_points_of
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.optimizers.optimizer_set import OptimizerSet
from hydraloop.engine.settings import Settings
from hydraloop.errors import UserError
from hydraloop.hooks import CheckpointHook, LoggerHook, RuntimeInfoHook
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.tasks import Task
from tests.compat.scripts import engine_with, refusal
from tests.helpers import logged
from tests.hooks.tiny_runs import BATCHES, Stopper, batches, load, model
from tests.ranks import on_ranks


class Writes:
    """Records each call, with the numbers and names among its arguments."""

    def __init__(self) -> None:
        self.trace: list[str] = []


def _writing(name: str) -> Callable[..., None]:
    def method(self: Writes, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        assert pl_module.trainer is trainer
        shown = [str(argument) for argument in arguments if isinstance(argument, int | str | BaseException)]
        self.trace.append(" ".join((name, *shown)))

    return method


for _name in POINTS:
    setattr(Writes, _name, _writing(_name))


def callback_with(**methods: Callable[..., Any]) -> LightningCallback:
    """A hook whose object has these methods, without self."""
    theirs = type("Theirs", (), {name: staticmethod(method) for name, method in methods.items()})
    return LightningCallback(theirs())


TRAINING = [
    "on_train_epoch_start",
    *(
        entry
        for batch_idx in range(BATCHES)
        for entry in (
            f"on_train_batch_start {batch_idx}",
            "on_after_backward",
            "on_before_optimizer_step",
            f"on_train_batch_end {batch_idx}",
        )
    ),
]
BEGIN, END = ["setup fit", "on_fit_start", "on_train_start"], ["on_train_end", "on_fit_end", "teardown fit"]


def evaluation(kind: str) -> list[str]:
    return [
        f"on_{kind}_start",
        f"on_{kind}_epoch_start",
        *(f"on_{kind}_batch_{when} {batch_idx}" for batch_idx in range(2) for when in ("start", "end")),
        f"on_{kind}_epoch_end",
        f"on_{kind}_end",
    ]


def test_a_run_with_a_test(tmp_path: Path) -> None:
    writes = Writes()
    engine_with(LightningCallback(writes), max_epochs=1, test=True, run_dir=tmp_path).train()
    tested = ["setup test", *evaluation("test"), "teardown test"]
    assert writes.trace == [*BEGIN, *TRAINING, *evaluation("validation"), "on_train_epoch_end", *END, *tested]


def test_without_validation_an_epoch_ends_at_once(tmp_path: Path) -> None:
    writes = Writes()
    engine_with(LightningCallback(writes), max_epochs=1, val=False, run_dir=tmp_path).train()
    assert writes.trace == [*BEGIN, *TRAINING, "on_train_epoch_end", *END]


def test_an_epoch_ends_once_where_a_stop_brings_a_validation(tmp_path: Path) -> None:
    ended: list[int] = []

    def on_train_epoch_end(trainer: Any, pl_module: Any) -> None:
        ended.append(trainer.current_epoch)
        trainer.should_stop = trainer.current_epoch == 1

    engine = engine_with(
        callback_with(on_train_epoch_end=on_train_epoch_end), max_epochs=4, val_interval=4, run_dir=tmp_path
    )
    result = engine.train()
    assert ended == [0, 1]
    assert (result.status, engine.progress.epoch) == ("stopped", 2)
    assert result.reason == "Theirs set trainer.should_stop in on_train_epoch_end"


def test_a_validation_and_a_test_on_their_own(tmp_path: Path) -> None:
    writes = Writes()
    engine = engine_with(LightningCallback(writes), test=True, run_dir=tmp_path)
    engine.validate()
    engine.test()
    validated = ["setup validate", *evaluation("validation"), "teardown validate"]
    assert writes.trace == [*validated, "setup test", *evaluation("test"), "teardown test"]


def test_after_an_error_only_on_exception_is_called(tmp_path: Path) -> None:
    writes = Writes()
    with pytest.raises(FloatingPointError):
        engine_with(LightningCallback(writes), Stopper(fail_at=2), run_dir=tmp_path).train()
    assert writes.trace[-2:] == ["on_train_batch_end 1", "on_exception told to"]


def test_only_what_the_object_has_is_a_mount_point() -> None:
    hook = callback_with(on_train_epoch_start=print, helper=print)
    assert set(mount_points_of(hook.overrides)) == {*ALWAYS, "before_train_epoch"}
    assert not hook.overrides("state_dict")
    assert "lightning" not in sys.modules


class Counts:
    """A callback with state and an entry in checkpoints, and the order in which it gets them back."""

    def __init__(self) -> None:
        self.epochs = 0
        self.order: list[str] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.order.append(f"setup {stage}")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.order.append(f"epoch {trainer.current_epoch}")
        self.epochs += 1

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["theirs"] = {"epoch": trainer.current_epoch}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.order.append(f"loaded {checkpoint['theirs']['epoch']}")

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.order.append("state")
        self.epochs = state["epochs"]


def test_state_and_entries_are_resumed_after_setup(tmp_path: Path) -> None:
    engine_with(LightningCallback(Counts()), CheckpointHook(), max_epochs=2, run_dir=tmp_path / "first").train()
    path, again = tmp_path / "first" / "checkpoints" / "epoch_2.pth", Counts()
    assert load(path)["hooks"]["h0"] == {"epochs": 2}
    assert load(path)["theirs"] == {"epoch": 1}
    engine_with(LightningCallback(again), CheckpointHook(), resume=path, run_dir=tmp_path / "second").train()
    assert again.order == ["setup fit", "loaded 1", "state", "epoch 2"]
    assert again.epochs == 3


def test_weights_alone_are_no_checkpoint_to_the_callback(tmp_path: Path) -> None:
    engine_with(LightningCallback(Counts()), CheckpointHook(), max_epochs=1, run_dir=tmp_path / "first").train()
    path, again = tmp_path / "first" / "checkpoints" / "epoch_1.pth", Counts()
    hooks = (LightningCallback(again), CheckpointHook())
    engine_with(*hooks, load_from=path, max_epochs=1, run_dir=tmp_path / "second").train()
    assert again.order == ["setup fit", "epoch 0"]


def test_an_epoch_begun_by_another_process_does_not_start_again(tmp_path: Path) -> None:
    hooks = (CheckpointHook(interval=1, by_epoch=False), Stopper(stop_at=BATCHES + 2))
    engine_with(*hooks, run_dir=tmp_path / "first", val=False).train()
    resume = tmp_path / "first" / "checkpoints" / f"iter_{BATCHES + 2}.pth"
    writes = Writes()
    hooks = (LightningCallback(writes), Stopper())
    options = {"resume": resume, "resume_strict": False, "val": False, "max_epochs": 2}
    engine_with(*hooks, run_dir=tmp_path / "second", **options).train()
    assert writes.trace[:5] == [
        "setup fit",
        "on_load_checkpoint",
        "on_fit_start",
        "on_train_start",
        "on_train_batch_start 2",
    ]
    assert writes.trace.count("on_train_epoch_end") == 1


def test_a_checkpoints_own_entries_stay(tmp_path: Path) -> None:
    hook = callback_with(on_save_checkpoint=lambda trainer, module, checkpoint: checkpoint.pop("optimizer"))
    said = refusal(engine_with(hook, CheckpointHook(), max_epochs=1, run_dir=tmp_path).train)
    assert "Theirs changes 'optimizer' of the checkpoint in on_save_checkpoint" in said


def test_nothing_of_a_loaded_checkpoint_can_be_changed(tmp_path: Path) -> None:
    engine_with(CheckpointHook(), max_epochs=1, run_dir=tmp_path / "first").train()
    hook = callback_with(on_load_checkpoint=lambda trainer, module, checkpoint: checkpoint["state_dict"].clear())
    resume = tmp_path / "first" / "checkpoints" / "epoch_1.pth"
    said = refusal(engine_with(hook, resume=resume, resume_strict=False, run_dir=tmp_path / "second").train)
    assert "Theirs changes 'state_dict.0.weight' of the checkpoint in on_load_checkpoint" in said


class BaseFinetuning:
    """Has the name of Lightning's class, and changes the optimizer's groups in the same way."""

    def __init__(self, *, unfreezes_at: int) -> None:
        self.unfreezes_at = unfreezes_at
        self.groups: list[dict[str, Any]] = []
        self.resumed = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.resumed:
            parameters = dict(pl_module.named_parameters())
            trainer.optimizers[0].param_groups = [
                {**group, "params": [parameters[name] for name in group["params"]]} for group in self.groups
            ]

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        optimizer = trainer.optimizers[0]
        if trainer.current_epoch == self.unfreezes_at:
            optimizer.add_param_group({"params": list(pl_module.model[0].parameters())})
        if not self.groups:
            names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
            self.groups = [
                {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
                for group in optimizer.param_groups
            ]

    def state_dict(self) -> dict[str, Any]:
        return {"groups": self.groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resumed, self.groups = True, state["groups"]


def unfreezing(run_dir: Path, *, several: bool = False, at: int = 9, **options: Any) -> Engine:
    """An engine whose optimizer gets the first layer from the callback. Another may have the last one."""
    net = model()
    own = [p for name, p in net.named_parameters() if name[0] not in ("03" if several else "0")]
    optimizer: Any = torch.optim.SGD(own, lr=0.1, momentum=0.9)
    if several:
        optimizer = OptimizerSet({"main": optimizer, "last": torch.optim.AdamW(net[3].parameters())})
    hooks = (LightningCallback(BaseFinetuning(unfreezes_at=at)), CheckpointHook())
    return engine_with(*hooks, net=net, optimizer=optimizer, run_dir=run_dir, **options)


@pytest.mark.parametrize("several", [False, True])
def test_a_run_is_not_resumed_after_a_callback_has_unfrozen_parameters(tmp_path: Path, several: bool) -> None:
    options: dict[str, Any] = {"several": several, "at": 1, "max_epochs": 2}
    unfreezing(tmp_path / "first", **options).train()
    before, after = (tmp_path / "first" / "checkpoints" / f"epoch_{epoch}.pth" for epoch in (1, 2))
    said = refusal(unfreezing(tmp_path / "second", **options, resume=after).train)
    numbers = "3 parameter groups, but it starts with 2" if several else "2 parameter groups, but it starts with 1"
    assert said.startswith(f"resume: in {after} the optimizer has {numbers}")
    assert "resumed after BaseFinetuning has unfrozen parameters" in said
    assert unfreezing(tmp_path / "third", **options, resume=before).train().status == "finished"


def test_a_callback_gets_all_optimizers(tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    def on_train_start(trainer: Any, pl_module: Any) -> None:
        found["optimizers"] = [trainer.optimizers, pl_module.optimizers()]

    def on_before_optimizer_step(trainer: Any, pl_module: Any, optimizer: Any) -> None:
        found["stepping"] = optimizer

    engine = unfreezing(tmp_path, several=True, max_epochs=1)
    hook = callback_with(on_train_start=on_train_start, on_before_optimizer_step=on_before_optimizer_step)
    again = engine_with(hook, net=engine.model, optimizer=engine.optimizer, run_dir=tmp_path, max_epochs=1)
    again.train()
    assert found["optimizers"] == [list(engine.optimizers.values())] * 2
    assert found["stepping"] is engine.optimizer


def test_what_the_optimizer_was_resumed_with_stays_over_on_fit_start(tmp_path: Path) -> None:
    class Halves(Hook):
        def after_train_epoch(self, engine: Engine) -> None:
            engine.optimizer.param_groups[0]["lr"] /= 2

    first = engine_with(
        LightningCallback(BaseFinetuning(unfreezes_at=9)),
        Halves(),
        CheckpointHook(),
        max_epochs=1,
        run_dir=tmp_path / "first",
    )
    first.train()
    path = tmp_path / "first" / "checkpoints" / "epoch_1.pth"
    again = engine_with(
        LightningCallback(BaseFinetuning(unfreezes_at=9)),
        max_epochs=2,
        resume=path,
        resume_strict=False,
        run_dir=tmp_path / "second",
    )
    again.train()
    assert again.optimizer.param_groups[0]["lr"] == 0.05


def test_evaluation_mode_and_no_gradients_around_an_evaluation(tmp_path: Path) -> None:
    seen: list[tuple[bool, bool]] = []
    names = [f"on_{kind}_{when}" for kind in ("validation", "test") for when in ("start", "epoch_end", "end")]

    def note(trainer: Any, pl_module: Any) -> None:
        assert trainer.evaluating
        assert not trainer.training
        assert trainer.testing != trainer.validating
        seen.append((pl_module.model[1].training, torch.is_grad_enabled()))

    engine = engine_with(callback_with(**dict.fromkeys(names, note)), max_epochs=1, test=True, run_dir=tmp_path)
    engine.train()
    assert seen == [(False, False)] * 6
    assert engine.model[1].training  # type: ignore[index]  # a Sequential


def test_what_the_trainer_has(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    expected: dict[str, Any] = {}

    def on_train_start(trainer: Any, pl_module: Any) -> None:
        loaders = engine.loaders
        expected.update(
            max_epochs=1,
            max_steps=2,
            num_training_batches=BATCHES,
            num_val_batches=[2],
            num_test_batches=[2],
            predicting=False,
            sanity_checking=False,
            optimizers=[engine.optimizer],
            train_dataloader=loaders.train,
            val_dataloaders=loaders.val,
            test_dataloaders=loaders.test,
            callbacks=[hook.wrapped],
            default_root_dir=str(tmp_path),
            log_dir=str(tmp_path),
            is_global_zero=True,
            global_rank=0,
            local_rank=0,
            world_size=1,
            accumulate_grad_batches=2,
            check_val_every_n_epoch=2,
            val_check_interval=1.0,
            fast_dev_run=False,
        )
        found.update({name: getattr(trainer, name) for name in expected})
        strategy, state = trainer.strategy, trainer.state
        found["state"] = [state.fn, state.stage, state.status]
        found["strategy"] = [
            strategy.root_device,
            strategy.reduce_boolean_decision(True),
            strategy.reduce_boolean_decision(False, all=False),
            strategy.broadcast({"a": 1}),
            strategy.barrier("here"),
        ]
        assert trainer.model is trainer.lightning_module is pl_module
        assert trainer.loggers == [trainer.logger]
        assert trainer.logged_metrics is trainer.callback_metrics

    hook = callback_with(on_train_start=on_train_start)
    engine = engine_with(hook, max_iters=3, accumulate=2, test=True, val_interval=2, run_dir=tmp_path)
    engine.train()
    expected["state"] = ["fit", "train", "running"]
    expected["strategy"] = [torch.device("cpu"), True, False, {"a": 1}, None]
    assert found == expected


class Waits(Distributed):
    """Counts barriers."""

    def __init__(self) -> None:
        self.waited = 0

    def barrier(self) -> None:
        self.waited += 1


def test_the_barrier(tmp_path: Path) -> None:
    engine = engine_with(
        callback_with(on_fit_start=lambda trainer, module: trainer.strategy.barrier()), run_dir=tmp_path
    )
    object.__setattr__(engine.run, "ranks", Waits())
    engine.train()
    assert engine.distributed.waited == 1


def decisions(distributed: Distributed, run_dir: str) -> list[Any]:
    """Return the decisions of all ranks, and where the run stops after rank 1 requested it."""
    heard: list[Any] = []

    def on_train_epoch_end(trainer: Any, pl_module: Any) -> None:
        strategy, first = trainer.strategy, trainer.global_rank == 0
        heard.append([strategy.reduce_boolean_decision(first), strategy.reduce_boolean_decision(first, all=False)])
        heard.append([strategy.broadcast(trainer.global_rank), trainer.is_global_zero, trainer.world_size])
        trainer.should_stop = not first

    net = nn.Linear(3, 2)
    engine = Engine(
        task=Task(net, nn.functional.mse_loss),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loaders=Loaders(train=batches()),
        hooks={"h0": callback_with(on_train_epoch_end=on_train_epoch_end)},
        settings=Settings(max_epochs=3, device="cpu"),
        run_dir=Path(run_dir),
        distributed=distributed,
    )
    engine.train()
    return [*heard, engine.progress.epoch]


@pytest.mark.slow
def test_ranks_decide_together(tmp_path: Path) -> None:
    first, second = on_ranks(2, decisions, str(tmp_path))
    assert first == [[False, True], [0, True, 2], 1]
    assert second == [[False, True], [0, False, 2], 1]


def test_two_callbacks_share_a_trainer_and_see_their_own_stage_end(tmp_path: Path) -> None:
    seen: list[Any] = []

    def teardown(trainer: Any, pl_module: Any, stage: str) -> None:
        seen.append((id(trainer), trainer.state.fn, stage))

    engine = engine_with(
        callback_with(teardown=teardown), callback_with(teardown=teardown), test=True, run_dir=tmp_path
    )
    engine.train()
    assert [entry[1:] for entry in seen] == [("fit", "fit")] * 2 + [("test", "test")] * 2
    assert len({entry[0] for entry in seen}) == 1


def test_metrics(tmp_path: Path) -> None:
    seen: list[Any] = []

    def note(trainer: Any, pl_module: Any) -> None:
        metrics = trainer.callback_metrics
        seen.append([metrics[name].item() for name in sorted(metrics) if "accuracy" in name])
        assert "val_loss" in metrics

    hook = callback_with(on_validation_end=note, on_test_end=note)
    engine_with(hook, accuracy=(0.25, 0.5), max_epochs=1, test=True, run_dir=tmp_path).train()
    assert seen == [[0.25, 0.25], [0.25, 0.5, 0.25]]


def test_what_is_logged_in_training_is_in_the_record(tmp_path: Path) -> None:
    def on_train_batch_end(trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("mine", torch.tensor([float(batch_idx)]), on_step=True, prog_bar=True)
        pl_module.log_dict({"other": 2.0})
        pl_module.logger.log_metrics({"third": torch.tensor(3.0)}, step=1)
        assert trainer.callback_metrics["mine"].item() == batch_idx

    def on_validation_epoch_end(trainer: Any, pl_module: Any) -> None:
        pl_module.log("val_mine", 7.0)
        assert trainer.callback_metrics["val_mine"] == 7.0

    hook = callback_with(on_train_batch_end=on_train_batch_end, on_validation_epoch_end=on_validation_epoch_end)
    engine_with(hook, LoggerHook(interval=BATCHES), max_epochs=2, run_dir=tmp_path).train()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(record["mine"], record["other"], record["third"]) for record in records if record["mode"] == "train"] == [
        (1.5, 2.0, 3.0)
    ] * 2
    assert not any("val_mine" in record for record in records)


class LogsItself:
    """Uses `self.log`, in several ways."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("mine", outputs["loss"])  # type: ignore[attr-defined]  # attached by Lightning


class LogsInAHelper(LogsItself):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        self._note({"mine": 1.0})

    def _note(self, numbers: dict[str, float]) -> None:
        send = lambda: self.log_dict(numbers)  # type: ignore[attr-defined]  # noqa: E731  # hidden in a lambda on purpose
        send()


class LogsByItsBase(LogsItself):
    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)


class HasALog(LogsItself):
    """Has its own `log`."""

    def __init__(self) -> None:
        self.logged = 0

    def log(self, name: str, value: Any) -> None:
        self.logged += 1


@pytest.mark.parametrize("kind", [LogsItself, LogsInAHelper, LogsByItsBase])
def test_a_callback_logs_by_itself(kind: type, tmp_path: Path) -> None:
    """Lightning's trainer gives its callbacks the same methods."""
    hooks = (LightningCallback(kind()), LoggerHook(interval=BATCHES))
    engine_with(*hooks, max_epochs=1, val=False, run_dir=tmp_path).train()
    (record,) = logged(tmp_path / "metrics.jsonl")
    assert record["mine"] > 0


def test_a_log_of_its_own_stays(tmp_path: Path) -> None:
    own = HasALog()
    engine_with(LightningCallback(own), max_epochs=1, run_dir=tmp_path).train()
    assert own.logged == BATCHES


def test_an_attribute_error_of_its_own_stays_one(tmp_path: Path) -> None:
    def on_train_batch_end(trainer: Any, *arguments: Any) -> None:
        raise AttributeError("mine", name="log", obj=arguments)

    with pytest.raises(AttributeError, match="mine"):
        engine_with(callback_with(on_train_batch_end=on_train_batch_end), max_epochs=1, run_dir=tmp_path).train()


class TwoLosses(Task):
    """Returns a second loss."""

    def forward(self, batch: Any) -> dict[str, Any]:
        outputs = super().forward(batch)
        return {**outputs, "aux_loss": outputs["loss"].detach() * 0 + 1}


def test_hydraloops_own_numbers_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def on_train_batch_end(trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("epoch", float(trainer.current_epoch))
        pl_module.log_dict({"aux_loss": 8.0, "my_loss": 9.0})
        trainer.logger.log_metrics({"grad_norm": 7.0})
        assert trainer.callback_metrics["epoch"] == 0.0

    hook = callback_with(on_train_batch_end=on_train_batch_end)
    net = model()
    engine = Engine(
        task=TwoLosses(net, nn.functional.mse_loss),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loaders=Loaders(train=batches()),
        hooks={"info": RuntimeInfoHook(), "logger": LoggerHook(interval=2), "theirs": hook},
        settings=Settings(max_epochs=1, device="cpu"),
        run_dir=tmp_path,
    )
    with caplog.at_level(logging.WARNING):
        engine.train()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(record["epoch"], record["aux_loss"]) for record in records] == [(1, 1.0), (1, 1.0)]
    assert "grad_norm" not in records[1]
    names = ("theirs/epoch", "theirs/aux_loss", "theirs/grad_norm", "my_loss")
    assert [records[1][name] for name in names] == [0.0, 8.0, 7.0, 9.0]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert said[0] == (
        "hooks.theirs: Theirs logs 'epoch', a name that hydraloop uses; in the records it is 'theirs/epoch'"
    )


def test_what_the_module_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def on_train_batch_start(trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        inputs, _ = batch
        assert pl_module.model is engine.model
        assert list(map(id, pl_module.parameters())) == list(map(id, engine.model.parameters()))
        assert pl_module(inputs).shape == pl_module.forward(inputs).shape == (4, 2)
        assert (pl_module.device, pl_module.global_rank) == (torch.device("cpu"), 0)
        assert (pl_module.current_epoch, pl_module.global_step) == (0, batch_idx)
        assert pl_module.automatic_optimization
        assert pl_module.optimizers() is engine.optimizer
        assert trainer.is_last_batch == (batch_idx == BATCHES - 1)
        pl_module.strong = pl_module.strong + 1
        pl_module.print("batch", batch_idx)

    engine = engine_with(callback_with(on_train_batch_start=on_train_batch_start), max_epochs=1, run_dir=tmp_path)
    engine.task.strong = 0
    engine.train()
    assert engine.task.strong == BATCHES
    assert "batch 3" in capsys.readouterr().out


def test_save_checkpoint(tmp_path: Path) -> None:
    def on_train_epoch_end(trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(tmp_path / "whole.pth")
        trainer.save_checkpoint(str(tmp_path / "weights.pth"), weights_only=True)

    engine_with(callback_with(on_train_epoch_end=on_train_epoch_end), max_epochs=1, run_dir=tmp_path).train()
    assert "optimizer" in load(tmp_path / "whole.pth")
    assert "optimizer" not in load(tmp_path / "weights.pth")


@pytest.mark.parametrize("name", ["teardown", "on_exception", "on_save_checkpoint"])
def test_no_checkpoint_can_be_asked_for_where_none_is_written(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    hook = callback_with(**{name: lambda trainer, *_: trainer.save_checkpoint(tmp_path / "mine.pth")})
    hooks = (hook, CheckpointHook(), Stopper(fail_at=1 if name == "on_exception" else 0))
    with pytest.raises((UserError, FloatingPointError)) as raised:
        engine_with(*hooks, max_epochs=1, run_dir=tmp_path).train()
    said = str(raised.value) + caplog.text
    assert f"lightning's trainer.save_checkpoint in {name} has no counterpart in hydraloop" in said


def fails_with(tmp_path: Path, act: Callable[[Any, Any], Any]) -> str:
    return refusal(engine_with(callback_with(on_train_start=act), run_dir=tmp_path).train)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda trainer, module: trainer.fit_loop, "lightning's trainer.fit_loop"),
        (lambda trainer, module: trainer.strategy.model, "lightning's trainer.strategy.model"),
        (lambda trainer, module: trainer.logger.experiment, "lightning's trainer.logger.experiment"),
        (lambda trainer, module: trainer.strategy.broadcast(1, src=1), "trainer.strategy.broadcast from rank 1"),
        (lambda trainer, module: module.hparams, "lightning's pl_module.hparams"),
        (lambda trainer, module: setattr(trainer, "max_epochs", 9), "setting lightning's trainer.max_epochs"),
        (lambda trainer, module: setattr(module, "model", nn.Linear(1, 1)), "setting lightning's pl_module.model"),
        (lambda trainer, module: setattr(module, "unknown", 1), "setting lightning's pl_module.unknown"),
    ],
)
def test_what_has_no_counterpart_is_named(tmp_path: Path, act: Callable[[Any, Any], Any], said: str) -> None:
    assert f"{said} has no counterpart in hydraloop (used by Theirs in on_train_start)" in fails_with(tmp_path, act)


def test_stopping_cannot_be_taken_back(tmp_path: Path) -> None:
    def act(trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = False
        trainer.should_stop = True
        assert trainer.should_stop
        trainer.should_stop = False

    assert "withdrawing trainer.should_stop has no counterpart" in fails_with(tmp_path, act)


def test_methods_without_a_mount_point_are_refused_unless_ignored() -> None:
    theirs = type("Theirs", (), {"on_predict_end": print, "on_before_backward": print, "setup": print})()
    with pytest.raises(UserError, match="Theirs has on_predict_end, on_before_backward") as error:
        LightningCallback(theirs)
    assert "ignore=[on_predict_end,on_before_backward]" in str(error.value)
    assert LightningCallback(theirs, ignore=["on_predict_end", "on_before_backward"]).wrapped is theirs


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Writes, "Writes.* is not a"),
        (None, "None is not a Lightning callback"),
        (object(), "object has no method of a callback"),
    ],
)
def test_what_is_no_callback_is_refused(wrong: object, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        LightningCallback(wrong)
    assert error.value.key == "callback"


def test_it_may_be_named_in_a_config() -> None:
    assert ALLOWLIST.locate("hydraloop.compat.LightningCallback", "hooks.theirs") is LightningCallback
