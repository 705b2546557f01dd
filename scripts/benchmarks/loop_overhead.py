"""Overhead of the loop: hydraloop compared with the same work written by hand, interleaved in one process.

    python scripts/benchmarks/loop_overhead.py [--rounds 31] [--iterations 500]

The model is a 32-64-10 MLP with batches of 16, one thread and AdamW. "bare" has no hooks. It is compared with a loop of
forward, loss, backward, step and zero_grad, with the same optimizer. "usual" has the default hooks, a record every 50
iterations, a schedule in each iteration, gradient clipping and EMA. It is compared with two loops that do the same: one
with torch's usual parts (AdamW, AveragedModel, clip_grad_norm_, LambdaLR), and one with fused AdamW and
torch._foreach_lerp_ on prepared lists.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from measure import differences, goal, interleaved, machine, parser, ratios, row, spread, table
from torch import Tensor, nn

from hydraloop import hooks
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run_parts import Settings
from hydraloop.optim import Function, Schedule
from hydraloop.optim.avoid_dynamo import avoid_dynamo_import
from hydraloop.tasks import Classification

Batches = Sequence[tuple[Tensor, Tensor]]
RECORD_EVERY = 50
MAX_NORM = 1.0
MOMENTUM = 0.0002


def main() -> None:
    """Run the benchmark and print the table."""
    options = parser(__doc__, rounds=31, iterations=500).parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)  # no lines in the terminal
    avoid_dynamo_import()
    batches = [(torch.randn(16, 32), torch.randint(0, 10, (16,))) for _ in range(options.iterations)]
    loops = {
        "bare, by hand": bare_by_hand,
        "bare, hydraloop": bare_hydraloop,
        "usual, by hand": usual_by_hand,
        "usual, by hand, fused": usual_by_hand_fused,
        "usual, hydraloop": usual_hydraloop,
    }
    times = interleaved({name: partial(microseconds, loop, batches) for name, loop in loops.items()}, options.rounds)
    print(f"{machine()}, torch {torch.__version__}, one thread, {options.rounds} rounds\n")
    table("", "µs an iteration, median (min to max)")
    for name, values in times.items():
        row(name, spread(values, 1))
    bare, usual = times["bare, hydraloop"], times["usual, hydraloop"]
    print()
    goal("bare: hydraloop - by hand, µs", differences(bare, times["bare, by hand"]), most=5)
    goal("usual: hydraloop / by hand", ratios(usual, times["usual, by hand"]), most=0.65)
    goal("usual: hydraloop - by hand, fused, µs", differences(usual, times["usual, by hand, fused"]), most=10)


def microseconds(loop: Callable[[Batches], float], batches: Batches) -> float:
    """Return the time of an iteration of a loop."""
    return loop(batches) / len(batches) * 1e6


def new_model() -> nn.Sequential:
    """Return a model with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def bare_by_hand(batches: Iterable[Any]) -> float:
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
    model = new_model()
    moving_average = torch.optim.swa_utils.get_ema_multi_avg_fn(1 - MOMENTUM)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=moving_average)
    return _usual(model, torch.optim.AdamW(model.parameters()), partial(average.update_parameters, model), batches)


def usual_by_hand_fused(batches: Batches) -> float:
    """Return the seconds of a loop with fused AdamW and torch._foreach_lerp_ on prepared lists."""
    model = new_model()
    parameters = [parameter.detach() for parameter in model.parameters()]
    averages = [parameter.clone() for parameter in parameters]
    average = partial(torch._foreach_lerp_, averages, parameters, MOMENTUM)
    return _usual(model, torch.optim.AdamW(model.parameters(), fused=True), average, batches)


def _usual(
    model: nn.Module, optimizer: torch.optim.Optimizer, update_average: Callable[[], object], batches: Batches
) -> float:
    criterion = nn.CrossEntropyLoss()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _factor)
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
            update_average()
            total, norms = total + loss.detach(), norms + norm
            if iteration % RECORD_EVERY == 0:
                now = perf_counter()
                record = {
                    "iteration": iteration,
                    "lr": optimizer.param_groups[0]["lr"],
                    "time": (now - then) / RECORD_EVERY,
                    "loss": total.item() / RECORD_EVERY,
                    "grad_norm": norms.item() / RECORD_EVERY,
                }
                print(json.dumps(record), file=file, flush=True)
                total, norms, then = torch.zeros(()), torch.zeros(()), now
        return perf_counter() - start


class _Factor(Function):
    """The schedule of the loops by hand."""

    def value(self, k: int, length: int, value: float, initial: float) -> float:
        """Return the value times the factor."""
        return value * _factor(k)


def _factor(step: int) -> float:
    return 0.9999**step


def usual_hydraloop(batches: Batches) -> float:
    """Return the seconds with the default hooks and EMA, as `build` makes them with fused: auto."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    usual: dict[str, Hook] = {
        "runtime_info": hooks.RuntimeInfoHook(),
        "timer": hooks.IterTimerHook(),
        "sampler_seed": hooks.DistSamplerSeedHook(),
        "grad_clip": hooks.GradClipHook(max_norm=MAX_NORM),
        "logger": hooks.LoggerHook(interval=RECORD_EVERY),
        "param_scheduler": hooks.ParamSchedulerHook(),
        "checkpoint": hooks.CheckpointHook(),
        "progress": hooks.ProgressHook(),
        "ema": hooks.EMAHook(momentum=MOMENTUM),
    }
    return _train(model, optimizer, batches, usual, {"factor": Schedule("factor", _Factor(), optimizer)})


class Clock(Hook):
    """Times the loop alone, from the beginning of the first iteration to the end of the last one."""

    priority = 0

    def __init__(self) -> None:
        self.seconds = 0.0

    def before_train_epoch(self, engine: Engine) -> None:
        """Start."""
        self.seconds -= perf_counter()

    def after_train_epoch(self, engine: Engine) -> None:
        """Stop."""
        self.seconds += perf_counter()


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    added: dict[str, Hook],
    schedules: dict[str, Schedule],
) -> float:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            task=Classification(model=model, loss=nn.CrossEntropyLoss(), metrics={}),
            optimizer=optimizer,
            loaders=Loaders(train=batches),
            hooks={"clock": clock, **added},
            schedules=schedules,
            settings=Settings(max_epochs=1, test=False, device="cpu"),
            run_dir=Path(folder),
        )
        engine.train()
    return clock.seconds


if __name__ == "__main__":
    main()
