"""Real hooks of MMEngine in real runs; test_with_mmengine.py starts this where mmengine is installed."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's warnings about mmengine's use of it
    import mmengine.hooks as theirs
    from mmengine.evaluator import BaseMetric, Evaluator
    from mmengine.logging import MessageHub
    from mmengine.model import BaseModel
    from mmengine.optim import OptimWrapper
    from mmengine.runner import Runner

from hydraloop.compat import MMEngineHook
from hydraloop.compat.mmengine_hook import INSTEAD
from hydraloop.engine.checkpoint.initial_weights import Rules, initialise
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.settings import Settings
from hydraloop.hooks import CheckpointHook, LoggerHook, RuntimeInfoHook
from hydraloop.tasks import Task
from tests.compat.scripts import engine_with, refusal, run_all
from tests.hooks.tiny_runs import BATCHES, batches, same
from tests.ranks import on_ranks

EPOCHS = 2


class Tracer(theirs.Hook):  # type: ignore[misc]  # mmengine is not typed
    """Records every mount point except those of checkpoints, and what it reads there."""

    priority = "LOW"

    def __init__(self) -> None:
        self.trace: list[Any] = []

    def note(self, point: str, runner: Any, *seen: Any) -> None:
        loop = runner.train_loop
        due = [self.every_n_train_iters(runner, 3), self.every_n_epochs(runner, 2), self.is_last_train_iter(runner)]
        last = [self.is_last_train_epoch(runner), loop.stop_training, runner.max_iters, runner.max_epochs]
        counted = [runner.iter, runner.epoch, loop.iter, loop.epoch]
        within = point not in ("before_run", "before_train_epoch", "after_train", "after_run")
        training = within and runner.model.training
        self.trace.append([point, *counted, *due, *last, training, *seen])

    def _before_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        self.note(f"before {mode} iter", runner, batch_idx, self.end_of_epoch(runner.train_dataloader, batch_idx))

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        self.note("after_val_epoch", runner, sorted(metrics))

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.note("after_train_iter", runner, batch_idx, "loss" in outputs, self.every_n_inner_iters(batch_idx, 2))


def _noting(point: str) -> Any:
    return lambda self, runner: self.note(point, runner)


for _point in ("run", "train", "train_epoch", "val"):
    setattr(Tracer, f"before_{_point}", _noting(f"before_{_point}"))
    setattr(Tracer, f"after_{_point}", _noting(f"after_{_point}"))


class Model(BaseModel):  # type: ignore[misc]  # mmengine is not typed
    """The smallest model that mmengine trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, inputs: Any, targets: Any, mode: str = "tensor") -> Any:
        difference = (self.layer(inputs) - targets).square().mean()
        return {"loss": difference} if mode == "loss" else [difference]


class Accuracy(BaseMetric):  # type: ignore[misc]  # mmengine is not typed
    """A metric with two names."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(0)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"accuracy": 0.5, "loss": 0.5}


def loader(count: int) -> torch.utils.data.DataLoader[Any]:
    """The requested number of batches."""
    samples = [sample for inputs, targets in batches(count) for sample in zip(inputs, targets, strict=True)]
    return torch.utils.data.DataLoader(samples, batch_size=len(samples) // count)


def traces() -> Any:
    """The same hook in mmengine's own runner, and here."""
    tracer, here = Tracer(), Tracer()
    model = Model()
    runner = Runner(
        model=model,
        work_dir=tempfile.mkdtemp(),
        train_dataloader=loader(BATCHES),
        val_dataloader=loader(2),
        train_cfg={"by_epoch": True, "max_epochs": EPOCHS, "val_interval": 1},
        val_cfg={},
        val_evaluator=Evaluator(Accuracy()),
        optim_wrapper=OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)),
        default_hooks={"checkpoint": None, "logger": None},
        custom_hooks=[tracer],
        default_scope="mmengine",
        experiment_name="theirs",
    )
    runner.train()
    engine_with(MMEngineHook(here), max_epochs=EPOCHS).train()
    return {"theirs": tracer.trace, "here": here.trace}


def weights() -> Any:
    """Load a file of mmengine's own runner, with its message hub and the states of its hooks; compare the weights."""
    model = Model()
    folder = Path(tempfile.mkdtemp())
    Runner(
        model=model,
        work_dir=str(folder),
        train_dataloader=loader(BATCHES),
        train_cfg={"by_epoch": True, "max_epochs": 1},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.1}},
        param_scheduler=[{"type": "LinearLR", "start_factor": 0.1, "end": 2}],
        default_hooks={"logger": {"type": "LoggerHook", "interval": 1}},
        default_scope="mmengine",
        experiment_name="weights",
    ).train()
    own = nn.ModuleDict({"layer": nn.Linear(3, 2)})
    initialise(own, folder / "epoch_1.pth", Rules())
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(folder / "epoch_1.pth")
    return {"same": same(own.state_dict(), model.state_dict()), "objects": len(unsafe)}


def early_stopping() -> Any:
    hook = theirs.EarlyStoppingHook(monitor="accuracy", patience=2, min_delta=0.05)
    engine = engine_with(MMEngineHook(hook), accuracy=(0.1, 0.3, 0.32, 0.34, 0.9, 0.9), max_epochs=6)
    result = engine.train()
    return {"status": result.status, "epochs": engine.progress.epoch, "reason": result.reason}


def empty_cache() -> Any:
    """How often it emptied the cache of a simulated GPU."""
    calls: list[str] = []
    names = vars(theirs.empty_cache_hook)
    real = torch.cuda.empty_cache, names["is_cuda_available"]
    torch.cuda.empty_cache, names["is_cuda_available"] = lambda: calls.append("emptied"), lambda: True
    try:
        engine_with(MMEngineHook(theirs.EmptyCacheHook(after_epoch=True)), max_epochs=3, val=False).train()
    finally:
        torch.cuda.empty_cache, names["is_cuda_available"] = real
    return len(calls)


def sync_buffers() -> Any:
    """A buffer that is 0 on one rank and 1 on the other, after an epoch."""
    return on_ranks(2, buffer_of, tempfile.mkdtemp())


class Differ(Hook):
    """Gives each rank another value of the buffer."""

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        engine.model.seen.fill_(float(engine.distributed.rank))


def buffer_of(distributed: Distributed, run_dir: str) -> float:
    net = torch.nn.Linear(3, 2)
    net.register_buffer("seen", torch.zeros(()))
    engine = Engine(
        task=Task(net, torch.nn.functional.mse_loss),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loaders=Loaders(train=batches()),
        hooks={"differ": Differ(), "h0": MMEngineHook(theirs.SyncBuffersHook())},
        settings=Settings(max_epochs=1, device="cpu"),
        run_dir=Path(run_dir),
        distributed=distributed,
    )
    engine.train()
    return float(net.seen)


def iter_timer() -> Any:
    """The names of its scalars in the records of the logger hook."""
    engine = engine_with(RuntimeInfoHook(), LoggerHook(interval=2), MMEngineHook(theirs.IterTimerHook()), max_epochs=1)
    engine.train()
    lines = (engine.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [sorted(name for name in json.loads(line) if name.startswith(("train/", "val/"))) for line in lines]


class Sums(theirs.Hook):  # type: ignore[misc]  # mmengine is not typed
    """Puts sums with their counts into the hub."""

    def __init__(self) -> None:
        self.current: list[float] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        sum_into(runner.message_hub, batch_idx)
        self.current.append(float(runner.message_hub.get_scalar("train/mine").current()))


def sum_into(hub: Any, batch_idx: int) -> None:
    hub.update_scalar("train/mine", 10.0 + batch_idx, count=1 + batch_idx)


def counted() -> Any:
    """The values and the mean of a scalar with counts, in mmengine's own hub, and here."""
    hub, current = MessageHub("mine"), []
    for batch_idx in range(BATCHES):
        sum_into(hub, batch_idx)
        current.append(float(hub.get_scalar("train/mine").current()))
    hook = Sums()
    engine = engine_with(LoggerHook(interval=BATCHES), MMEngineHook(hook), max_epochs=1, val=False)
    engine.train()
    record = json.loads((engine.run_dir / "metrics.jsonl").read_text(encoding="utf-8"))
    return {
        "theirs": [current, float(hub.get_scalar("train/mine").mean())],
        "here": [hook.current, record["train/mine"]],
    }


class Revises(theirs.Hook):  # type: ignore[misc]  # mmengine is not typed
    """Changes weights before mmengine loads them into the model."""

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: torch.zeros_like(value) for name, value in checkpoint["state_dict"].items()}


def revised() -> Any:
    folder = Path(tempfile.mkdtemp())
    engine_with(CheckpointHook(), max_epochs=1, run_dir=folder).train()
    return refusal(engine_with(MMEngineHook(Revises()), load_from=folder / "checkpoints" / "epoch_1.pth").train)


def sampler_seed() -> Any:
    """The epochs that it gave the sampler."""
    told: list[int] = []

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    data = batches()
    loader = torch.utils.data.DataLoader(data, batch_size=None, sampler=Sampler(data))
    engine_with(MMEngineHook(theirs.DistSamplerSeedHook()), train=loader, max_epochs=3).train()
    return told


def profiler() -> Any:
    path = Path(tempfile.mkdtemp()) / "trace.json"
    hook = theirs.ProfilerHook(by_epoch=False, profile_times=2, json_trace_path=str(path))
    engine_with(MMEngineHook(hook), max_epochs=1).train()
    return "traceEvents" in json.loads(path.read_text(encoding="utf-8"))


def refused() -> Any:
    """Messages for mmengine's own hooks that are rejected, by name."""
    made = {
        name: object.__new__(getattr(theirs, name))  # some cannot be made without their accelerator
        for name in theirs.__all__
        if name != "Hook"
    }
    messages = {name: refusal(lambda hook=hook: MMEngineHook(hook)) for name, hook in made.items()}
    return {"messages": messages, "known": sorted(INSTEAD)}


class Looks(theirs.Hook):  # type: ignore[misc]  # mmengine is not typed
    """Uses an attribute that is not supported."""

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        assert getattr(runner, "visualizer", None) is None
        assert not hasattr(runner, "param_schedulers")
        runner.visualizer.add_scalar("accuracy", metrics["accuracy"])


class Replaces(theirs.Hook):  # type: ignore[misc]  # mmengine is not typed
    """Puts another model into the run."""

    def before_train(self, runner: Any) -> None:
        runner.model = torch.nn.Linear(1, 1)


class Averages(theirs.EMAHook):  # type: ignore[misc]  # mmengine is not typed
    """Derived from a hook that is not supported."""


def unmapped() -> Any:
    return {
        "used": refusal(engine_with(MMEngineHook(Looks())).train),
        "replaced": refusal(engine_with(MMEngineHook(Replaces())).train),
        "derived": refusal(lambda: MMEngineHook(Averages())),
    }


if __name__ == "__main__":
    run_all(
        [
            traces,
            weights,
            early_stopping,
            empty_cache,
            sync_buffers,
            iter_timer,
            counted,
            revised,
            sampler_seed,
            profiler,
            refused,
            unmapped,
        ]
    )
