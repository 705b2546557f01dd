"""Overhead of the loop: hydraloop compared with the same work written by hand, interleaved in one process.

    python scripts/benchmarks/loop_overhead.py [--rounds 31] [--iterations 500]

The model is a 32-64-10 MLP with batches of 16, one thread and AdamW. "bare" has no hooks. It is compared with a loop of
forward, loss, backward, step and zero_grad, with the same optimizer. "usual" has the default hooks, a record every 50
iterations, a schedule in each iteration, gradient clipping and EMA. It is compared with two loops that do the same: one
with torch's usual parts (AdamW, AveragedModel, clip_grad_norm_, LambdaLR), and one with fused AdamW and
torch._foreach_lerp_ on prepared lists.

Each round times every variant once, in rotating order. A variant's figure is the median over the rounds, with minimum
and maximum. Differences and ratios are computed for each round, so changes in the machine's speed have little effect.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import IO

import torch
from torch import Tensor, nn

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.settings import Settings
from hydraloop.hooks import (
    CheckpointHook,
    DistSamplerSeedHook,
    EMAHook,
    GradClipHook,
    IterTimerHook,
    LoggerHook,
    ParamSchedulerHook,
    ProgressHook,
    RuntimeInfoHook,
)
from hydraloop.optim import Function, Schedule
from hydraloop.optim.avoid_dynamo import avoid_dynamo_import
from hydraloop.tasks import Classification

Batches = list[tuple[Tensor, Tensor]]
RECORD_EVERY = 50
MAX_NORM = 1.0
MOMENTUM = 0.0002


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--iterations", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)  # no lines in the terminal
    avoid_dynamo_import()
    batches = [(torch.randn(16, 32), torch.randint(0, 10, (16,))) for _ in range(options.iterations)]

    variants: dict[str, Callable[[Batches], float]] = {
        "bare, by hand": bare_by_hand,
        "bare, hydraloop": bare_hydraloop,
        "usual, by hand": usual_by_hand,
        "usual, by hand, fused": usual_by_hand_fused,
        "usual, hydraloop": usual_hydraloop,
    }
    names = list(variants)
    for name in names:  # a warm-up, not counted
        variants[name](batches[:300])
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(options.rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            times[name].append(variants[name](batches) / options.iterations * 1e6)

    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread, ", end="")
    print(f"{options.rounds} rounds of {options.iterations} iterations; µs an iteration")
    for name in names:
        print(f"  {name:<24} {_spread(times[name], '{:7.1f}')}")
    compare("bare: hydraloop - by hand", "µs", 5.0, times["bare, hydraloop"], times["bare, by hand"], difference)
    compare("usual: hydraloop / by hand", "", 0.65, times["usual, hydraloop"], times["usual, by hand"], ratio)
    compare(
        "usual: hydraloop - by hand, fused",
        "µs",
        10.0,
        times["usual, hydraloop"],
        times["usual, by hand, fused"],
        difference,
    )


def compare(
    name: str, unit: str, limit: float, ours: list[float], theirs: list[float], how: Callable[[float, float], float]
) -> None:
    """Print a comparison round by round, and its goal."""
    values = [how(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    met = "met" if statistics.median(values) <= limit else "NOT met"
    print(f"  {name:<34} {_spread(values, '{:6.2f}')} {unit:<3} goal: at most {limit:g}, {met}")


def difference(mine: float, other: float) -> float:
    """Return the difference in µs per iteration."""
    return mine - other


def ratio(mine: float, other: float) -> float:
    """Return the ratio of the times."""
    return mine / other


def _spread(values: list[float], form: str) -> str:
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"median {middle}  (min {low}, max {high})"


# The work. -----------------------------------------------------------------------------------------------------------


def new_model() -> nn.Sequential:
    """Return a model with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def bare_by_hand(batches: Batches) -> float:
    """Return the seconds of the loop."""
    model, criterion = new_model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters())
    start = perf_counter()
    for inputs, targets in batches:
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return perf_counter() - start


def bare_hydraloop(batches: Batches) -> float:
    """Return the seconds of the loop, from before_train_epoch to after_train_epoch."""
    model = new_model()
    return _train(model, torch.optim.AdamW(model.parameters()), batches, {}, {})


def usual_by_hand(batches: Batches) -> float:
    """Return the seconds of a loop with torch's usual parts."""
    model, criterion = new_model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _factor)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(1 - MOMENTUM)
    )
    with tempfile.TemporaryFile("w") as file:
        total = norms = torch.zeros(())
        start = then = perf_counter()
        for iteration, (inputs, targets) in enumerate(batches, start=1):
            loss = criterion(model(inputs), targets)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            average.update_parameters(model)
            total, norms = total + loss.detach(), norms + norm
            if iteration % RECORD_EVERY == 0:
                now = perf_counter()
                _write(file, iteration, optimizer, total, norms, now - then)
                total, norms, then = torch.zeros(()), torch.zeros(()), now
        return perf_counter() - start


def usual_by_hand_fused(batches: Batches) -> float:
    """Return the seconds of a loop with fused AdamW and torch._foreach_lerp_ on prepared lists."""
    model, criterion = new_model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _factor)
    parameters = [parameter.detach() for parameter in model.parameters()]
    averages = [parameter.clone() for parameter in parameters]
    with tempfile.TemporaryFile("w") as file:
        total = norms = torch.zeros(())
        start = then = perf_counter()
        for iteration, (inputs, targets) in enumerate(batches, start=1):
            loss = criterion(model(inputs), targets)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            torch._foreach_lerp_(averages, parameters, MOMENTUM)
            total, norms = total + loss.detach(), norms + norm
            if iteration % RECORD_EVERY == 0:
                now = perf_counter()
                _write(file, iteration, optimizer, total, norms, now - then)
                total, norms, then = torch.zeros(()), torch.zeros(()), now
        return perf_counter() - start


class _Factor(Function):
    """The schedule of the loops by hand."""

    def value(self, k: int, length: int, value: float, initial: float) -> float:
        """Return the value times the factor."""
        return value * _factor(k)


def usual_hydraloop(batches: Batches) -> float:
    """Return the seconds with the default hooks and EMA, as `build` makes them with fused: auto."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = Schedule("factor", _Factor(), optimizer)
    hooks: dict[str, Hook] = {
        "runtime_info": RuntimeInfoHook(),
        "timer": IterTimerHook(),
        "sampler_seed": DistSamplerSeedHook(),
        "grad_clip": GradClipHook(max_norm=MAX_NORM),
        "logger": LoggerHook(interval=RECORD_EVERY),
        "param_scheduler": ParamSchedulerHook(),
        "checkpoint": CheckpointHook(),
        "progress": ProgressHook(),
        "ema": EMAHook(momentum=MOMENTUM),
    }
    return _train(model, optimizer, batches, hooks, {"factor": schedule})


class _Clock(Hook):
    """Times the loop alone, from the beginning of the first iteration to the end of the last one."""

    priority = 0

    def __init__(self) -> None:
        self.start = self.seconds = 0.0

    def before_train_epoch(self, engine: Engine) -> None:
        self.start = perf_counter()

    def after_train_epoch(self, engine: Engine) -> None:
        self.seconds = perf_counter() - self.start


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    hooks: dict[str, Hook],
    schedules: dict[str, Schedule],
) -> float:
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            task=Classification(model=model, loss=nn.CrossEntropyLoss(), metrics={}),
            optimizer=optimizer,
            loaders=Loaders(train=batches),
            hooks={"clock": clock, **hooks},
            schedules=schedules,
            settings=Settings(max_epochs=1, test=False, device="cpu"),
            run_dir=Path(folder),
        )
        engine.train()
    return clock.seconds


def _factor(step: int) -> float:
    return 0.9999**step


def _write(
    file: IO[str], iteration: int, optimizer: torch.optim.Optimizer, total: Tensor, norms: Tensor, seconds: float
) -> None:
    record = {
        "iteration": iteration,
        "lr": optimizer.param_groups[0]["lr"],
        "time": seconds / RECORD_EVERY,
        "loss": total.item() / RECORD_EVERY,
        "grad_norm": norms.item() / RECORD_EVERY,
    }
    print(json.dumps(record), file=file, flush=True)


if __name__ == "__main__":
    main()
