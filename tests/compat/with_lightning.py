"""Real callbacks of Lightning in real runs; test_with_lightning.py starts this where lightning is installed."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    import lightning.pytorch.callbacks as theirs

from hydraloop.compat import LightningCallback
from hydraloop.compat.lightning_callback import INSTEAD, POINTS
from hydraloop.engine.checkpoint.initial_weights import Rules, initialise
from hydraloop.engine.hook import Hook
from hydraloop.hooks import CheckpointHook, LoggerHook, RuntimeInfoHook
from tests.compat.scripts import RISING, engine_with, refusal, run_all
from tests.hooks.tiny_runs import BATCHES, Stopper, batches, bits, model, same

EPOCHS = 4


class Decays(Hook):
    """Halves the learning rates every two iterations."""

    def after_train_iter(self, engine: Any, batch_idx: int, batch: Any, outputs: Any) -> None:
        for group in engine.optimizer.param_groups:
            group["lr"] /= 1 + batch_idx % 2


class Tracer(pl.Callback):
    """Records every method call, and what it reads there."""

    def __init__(self) -> None:
        self.trace: list[Any] = []

    def note(self, name: str, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        counted = [trainer.current_epoch, trainer.global_step, trainer.max_epochs]
        if name not in ("setup", "on_fit_start"):  # Lightning does not know yet
            counted.append(trainer.num_training_batches)
        stage = [trainer.training, trainer.validating, trainer.sanity_checking, trainer.should_stop]
        state = [str(trainer.state.fn.value if hasattr(trainer.state.fn, "value") else trainer.state.fn)]
        seen = [pl_module.current_epoch, pl_module.global_step, pl_module.training, torch.is_grad_enabled()]
        if name.startswith(("on_train_batch", "on_before", "on_after")):
            seen.append(trainer.is_last_batch)
        if name in ("on_train_epoch_end", "on_validation_end"):
            seen.append(round(float(trainer.callback_metrics.get("val_accuracy", -1.0)), 6))
        numbers = [argument for argument in arguments if isinstance(argument, int | str)]
        self.trace.append([name, *counted, *stage, *state, *seen, *numbers])


def _noting(name: str) -> Any:
    return lambda self, *arguments, **named: self.note(name, *arguments, *named.values())


_NOT_TRACED = ("on_save_checkpoint", "on_load_checkpoint", "on_exception")
for _name in POINTS:
    if _name not in _NOT_TRACED:
        setattr(Tracer, _name, _noting(_name))


class Model(pl.LightningModule):
    """The smallest model that Lightning trains; its metric has the given values, one for each validation."""

    def __init__(self, accuracy: Sequence[float] = RISING) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.accuracy = iter(accuracy)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.log("val_accuracy", next(self.accuracy), batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(callbacks: list[Any], accuracy: Sequence[float] = RISING, **options: Any) -> Any:
    """Lightning's own trainer after a run."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tempfile.mkdtemp(),
        **options,
    )
    loader = torch.utils.data.DataLoader
    trainer.fit(Model(accuracy), loader(batches(), batch_size=None), loader(batches(2), batch_size=None))
    return trainer


def traces() -> Any:
    """The same callback in Lightning's own trainer, and here: with all validations, some, and accumulation."""
    found = []
    for options, here in (
        ({}, {}),
        ({"check_val_every_n_epoch": 2}, {"val_interval": 2}),
        ({"accumulate_grad_batches": 3}, {"accumulate": 3}),
        ({"val_check_interval": 2}, {"val_interval": 2, "val_by_epoch": False}),
    ):
        in_theirs, in_ours = Tracer(), Tracer()
        trained([in_theirs], max_epochs=EPOCHS, **options)
        engine_with(LightningCallback(in_ours), max_epochs=EPOCHS, **here).train()
        found.append({"theirs": in_theirs.trace, "here": in_ours.trace})
    return found


def weights() -> Any:
    """Load a file of Lightning's own trainer, with hyperparameters of other classes; compare the weights."""
    trainer = trained([theirs.EarlyStopping("val_accuracy")], max_epochs=1)
    module, path = trainer.lightning_module, Path(tempfile.mkdtemp(), "a.ckpt")
    module.save_hyperparameters({"act": torch.nn.ReLU, "where": Path("data")})
    trainer.save_checkpoint(path)
    own = torch.nn.ModuleDict({"layer": torch.nn.Linear(3, 2)})
    initialise(own, path, Rules())
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    return {"same": same(own.state_dict(), module.state_dict()), "objects": len(unsafe)}


def early_stopping() -> Any:
    """The epoch at which it stops in Lightning's trainer, and here; by validation, and by epoch."""
    values = (0.1, 0.3, 0.32, 0.34, 0.9, 0.9)
    found = []
    for at_epoch_end in (None, False):
        options = {"monitor": "val_accuracy", "mode": "max", "patience": 2, "min_delta": 0.05}
        made = [theirs.EarlyStopping(**options, check_on_train_epoch_end=at_epoch_end) for _ in range(2)]
        trainer = trained([made[0]], values, max_epochs=6)
        engine = engine_with(LightningCallback(made[1]), accuracy=values, max_epochs=6)
        result = engine.train()
        found.append(
            {
                "theirs": [trainer.current_epoch, made[0].stopped_epoch, made[0].wait_count],
                "here": [engine.progress.epoch, made[1].stopped_epoch, made[1].wait_count],
                "status": result.status,
                "reason": result.reason,
            }
        )
    return found


def resumed() -> Any:
    """State of early stopping after two epochs, and in a new callback that resumes there."""

    def callback() -> Any:
        return theirs.EarlyStopping(monitor="val_accuracy", mode="max", patience=5)

    class Sees(theirs.EarlyStopping):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append([self.wait_count, float(self.best_score), trainer.current_epoch])

    seen: list[Any] = []
    folder = Path(tempfile.mkdtemp())
    hooks = (LightningCallback(callback()), CheckpointHook(), Stopper(stop_at=2 * BATCHES + 2))
    first = engine_with(*hooks, accuracy=(0.5, 0.4, 0.3, 0.2), run_dir=folder / "first", max_epochs=4)
    first.train()
    again = LightningCallback(Sees(monitor="val_accuracy", mode="max", patience=5))
    hooks = (again, CheckpointHook(), Stopper())
    resume = folder / "first" / "checkpoints" / "epoch_2.pth"
    engine_with(*hooks, accuracy=(0.1, 0.1, 0.1), run_dir=folder / "second", max_epochs=4, resume=resume).train()
    return {"seen": seen[0], "waited": again.wrapped.wait_count, "best": float(again.wrapped.best_score)}


def timer() -> Any:
    """The iteration at which a timer of a millisecond stops a long run."""
    found = []
    for interval in ("step", "epoch"):
        hook = LightningCallback(theirs.Timer(duration={"milliseconds": 1}, interval=interval))
        engine = engine_with(hook, accuracy=[0.0] * 999, max_epochs=500)
        result = engine.train()
        found.append({"status": result.status, "reason": result.reason, "rest": engine.progress.batch_in_epoch})
    return found


def lambdas() -> Any:
    """What a callback of plain functions saw, and what it logged."""
    seen: list[Any] = []

    def on_train_batch_end(trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("epoch", float(trainer.current_epoch))
        pl_module.log("loss", 1000 * outputs["loss"])
        pl_module.log("norm", torch.tensor(float(batch_idx)), prog_bar=True)
        trainer.logger.log_metrics({"twice": 2.0 * batch_idx}, step=trainer.global_step)
        if batch_idx == 0:
            with torch.no_grad():
                seen.append([sorted(outputs), list(pl_module(batch[0]).shape), pl_module.model is not None])

    engine = engine_with(
        LightningCallback(theirs.LambdaCallback(on_train_batch_end=on_train_batch_end)),
        RuntimeInfoHook(),
        LoggerHook(interval=BATCHES),
        max_epochs=1,
        val=False,
    )
    records: list[Any] = []
    engine.records.log_record = lambda record: records.append(dict(record))  # type: ignore[method-assign]  # a spy
    engine.train()
    return {
        "seen": seen,
        "record": {name: records[0].get(name) for name in ("norm", "twice", "epoch", "h0/epoch")},
        "logged": records[0]["h0/loss"] / records[0]["loss"],
    }


class Unfreezes(theirs.BaseFinetuning):
    """Freezes the first layer until the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.make_trainable(pl_module.model[0])
        self.seen.append([parameter.requires_grad for parameter in pl_module.model[0].parameters()])


def finetuning() -> Any:
    callback = Unfreezes()
    engine_with(LightningCallback(callback), max_epochs=2, val=False).train()
    return callback.seen


class AddsGroup(theirs.BaseFinetuning):
    """Gives the optimizer the first layer in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model[0], optimizer, lr=0.01)


def finetuning_resumed() -> Any:
    """Resumed before the epoch in which it unfreezes, with a lr that has changed, and after it."""

    def engine(run_dir: Path, *hooks: Any, **options: Any) -> Any:
        net = model()
        optimizer = torch.optim.SGD([p for name, p in net.named_parameters() if name[0] != "0"], lr=0.1, momentum=0.9)
        hooks = (LightningCallback(AddsGroup()), CheckpointHook(), Decays())
        return engine_with(*hooks, net=net, optimizer=optimizer, max_epochs=3, run_dir=run_dir, **options)

    folder = Path(tempfile.mkdtemp())
    first = engine(folder / "first")
    first.train()
    before, after = (folder / "first" / "checkpoints" / f"epoch_{epoch}.pth" for epoch in (1, 2))
    again = engine(folder / "second", resume=before)
    again.train()
    return {
        "groups": [len(each.optimizer.param_groups) for each in (first, again)],
        "same": same(bits(first.model), bits(again.model)),
        "refused": refusal(engine(folder / "third", resume=after).train),
    }


def spikes() -> Any:
    """An exploding loss ends the run."""
    data = batches()
    data[-1] = (data[-1][0], data[-1][1] * 1e12)
    hook = LightningCallback(theirs.SpikeDetection(mode="min", window=2, warmup=1, atol=1.0))
    try:
        engine_with(hook, train=data, max_epochs=2, val=False).train()
    except Exception as error:
        return type(error).__name__
    return "nothing was raised"


def refused() -> Any:
    """Messages for Lightning's own callbacks that are rejected, by name."""
    names = [name for name in theirs.__all__ if name not in ("Callback", "Checkpoint")]
    made = {name: object.__new__(getattr(theirs, name)) for name in names}
    messages = {name: refusal(lambda hook=hook: LightningCallback(hook)) for name, hook in made.items()}
    return {"messages": messages, "known": sorted(INSTEAD)}


class Looks(pl.Callback):
    """Uses an attribute that is not supported."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert getattr(trainer, "datamodule", None) is None
        trainer.fit_loop.epoch_loop.batch_progress.reset()


class Predicts(pl.Callback):
    """Has methods without a mount point."""

    def __init__(self) -> None:
        self.called = 0

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        raise AssertionError

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        raise AssertionError

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.called += 1


class LogsItself(pl.Callback):
    """Uses what Lightning's trainer attaches to it."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("mine", 1.0)


def unmapped() -> Any:
    ignoring = Predicts()
    engine = engine_with(LightningCallback(LogsItself()), LoggerHook(interval=BATCHES), max_epochs=2)
    engine.train()
    logs = [json.loads(line).get("mine") for line in (engine.run_dir / "metrics.jsonl").open(encoding="utf-8")]
    engine_with(LightningCallback(ignoring, ignore=["on_predict_start", "on_before_zero_grad"]), max_epochs=1).train()
    return {
        "used": refusal(engine_with(LightningCallback(Looks())).train),
        "logs": logs,
        "predicts": refusal(lambda: LightningCallback(Predicts())),
        "ignored": ignoring.called,
    }


if __name__ == "__main__":
    run_all(
        [
            traces,
            weights,
            early_stopping,
            resumed,
            timer,
            lambdas,
            finetuning,
            finetuning_resumed,
            spikes,
            refused,
            unmapped,
        ]
    )
