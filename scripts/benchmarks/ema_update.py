"""Cost of an EMA update: hydraloop's hook compared with a bare kernel and with the averages of other libraries.

    python scripts/benchmarks/ema_update.py [--rounds 31] [--threads 2]

There are two models: one with 25 million parameters in 160 tensors, limited by memory, and one with 160 tensors of 16
entries, limited by calls. "hydraloop" is what the engine's loop does for the average: its calls of after_train_iter
with the `ema` hook and default options. "the kernel" is one call of `torch._foreach_lerp_` on prepared lists. Each
variant averages the same model into separate averages:

* torch: `AveragedModel.update_parameters`, with `get_ema_multi_avg_fn`;
* mmengine: `ExponentialMovingAverage.update_parameters`, which always copies the buffers, too;
* Lightning: `EMAWeightAveraging.on_train_batch_end`, with a stand-in for the trainer's step counter.

The last two are measured if they can be imported; they are not dependencies. To install them next to hydraloop:

    python -m venv /tmp/peers
    python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
        > "$(/tmp/peers/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/hydraloop.pth"
    /tmp/peers/bin/pip install --no-deps mmengine==0.10.7 addict yapf termcolor platformdirs lightning==2.6.6
    /tmp/peers/bin/python -W ignore scripts/benchmarks/ema_update.py

Each round times every variant once, in rotating order. A figure is the median over the rounds, with minimum and
maximum. Ratios are computed for each round, so changes in the machine's speed have little effect.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.settings import Settings
from hydraloop.hooks import EMAHook
from hydraloop.optim.avoid_dynamo import avoid_dynamo_import
from hydraloop.tasks.task import Task

TENSORS = 160
MOMENTUM = 0.0002
KERNEL, OURS = "the kernel", "hydraloop"
MOST_OF_KERNEL, MOST_MICROSECONDS = 1.1, 70.0

Update = Callable[[], object]


def main() -> None:
    """Run the benchmark and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    avoid_dynamo_import()
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.threads} threads, ", end=""
    )
    print(f"{options.rounds} rounds; µs an update")

    large, absent = measure(Many(25_000_000 // TENSORS), rounds=options.rounds, updates=3)
    table("25 million parameters in 160 tensors", large, absent)
    ratios = [ours / kernel for ours, kernel in zip(large[OURS], large[KERNEL], strict=True)]
    goal("hydraloop / the kernel", ratios, MOST_OF_KERNEL, "{:.2f}")

    # Rounds of about a millisecond: most of them are not interrupted, even on a machine with other work.
    tiny, absent = measure(Many(16), rounds=20 * options.rounds, updates=20)
    table(f"160 tensors of 16 entries ({20 * options.rounds} rounds)", tiny, absent)
    goal("hydraloop, µs", tiny[OURS], MOST_MICROSECONDS, "{:.1f}")


class Many(nn.Module):
    """A model of 160 parameters of `size` entries each."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size)) for _ in range(TENSORS))


def measure(model: nn.Module, *, rounds: int, updates: int) -> tuple[dict[str, list[float]], list[str]]:
    """Return the microseconds per update of each variant, by round, and the variants that cannot be imported."""
    variants: dict[str, Update] = {
        KERNEL: by_kernel(model),
        OURS: by_hydraloop(model),
        "torch, AveragedModel": by_torch(model),
    }
    absent = []
    for name, build in {"mmengine": by_mmengine, "Lightning": by_lightning}.items():
        try:
            variants[name] = build(model)
        except ImportError:
            absent.append(name)
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(-1, rounds):  # the first round is a warm-up and not counted
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            update = variants[name]
            update()  # not timed: the caches contain the previous variant's values
            start = perf_counter()
            for _ in range(updates):
                update()
            if round_ >= 0:
                times[name].append((perf_counter() - start) / updates * 1e6)
    return times, absent


def by_kernel(model: nn.Module) -> Update:
    """The minimum: one call on prepared lists."""
    values = [parameter.detach() for parameter in model.parameters()]
    averages = [value.clone() for value in values]
    return lambda: torch._foreach_lerp_(averages, values, MOMENTUM)


def by_hydraloop(model: nn.Module) -> Update:
    """What the training loop does for the hook in each iteration with an optimizer step."""
    engine = Engine(
        task=Task(model, nn.functional.mse_loss),
        optimizer=torch.optim.SGD(model.parameters()),
        loaders=Loaders(train=[None]),
        hooks={"ema": EMAHook(momentum=MOMENTUM)},
        settings=Settings(device="cpu", test=False),
        run_dir=Path(tempfile.gettempdir()),
    )
    engine.calls.before_run()
    outputs = {"loss": torch.zeros(())}
    calls, progress = engine.calls, engine.progress
    engine.stepper.stepped = True

    def iteration() -> None:
        progress.complete_iteration(0, 1, stepped=True)
        calls.after_train_iter(0, None, outputs)

    iteration()  # the first update is a copy
    calls.before_train_epoch()
    return iteration


def by_torch(model: nn.Module) -> Update:
    """torch's average, in its fastest form."""
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(1 - MOMENTUM))
    averaged.update_parameters(model)  # the first update is a copy
    return lambda: averaged.update_parameters(model)


def by_mmengine(model: nn.Module) -> Update:
    """What MMEngine's EMAHook calls in each iteration."""
    from mmengine.model import ExponentialMovingAverage

    averaged = ExponentialMovingAverage(model, momentum=MOMENTUM)
    averaged.update_parameters(model)
    return lambda: averaged.update_parameters(model)


def by_lightning(model: nn.Module) -> Update:
    """Lightning's callback, called as its trainer does."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    callback = EMAWeightAveraging(device="cpu", decay=1 - MOMENTUM)
    trainer = SimpleNamespace(global_step=0)
    callback._average_model = AveragedModel(model, use_buffers=True, **callback._kwargs)  # as its setup() makes it
    no_batch: Tensor | None = None

    def iteration() -> None:
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, model, None, no_batch, 0)

    iteration()
    return iteration


def table(title: str, times: dict[str, list[float]], absent: list[str]) -> None:
    """Print one line for each variant, the kernel's first."""
    print(f"{title}")
    kernel = statistics.median(times[KERNEL])
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"  {name:<24} {_spread(values, '{:9.1f}')}  {middle / kernel:6.2f} x the kernel")
    for name in absent:
        print(f"  {name:<24} not installed here")


def goal(what: str, values: list[float], most: float, form: str) -> None:
    """Print a figure and its goal."""
    met = "met" if statistics.median(values) <= most else "NOT met"
    print(f"  {what:<24} {_spread(values, form)}  goal: at most {most:g}, {met}")


def _spread(values: list[float], form: str) -> str:
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"median {middle}  (min {low}, max {high})"


if __name__ == "__main__":
    main()
