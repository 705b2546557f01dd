"""Overhead of hydraloop on a language model: `experiment=char_lm` compared with the same work written by hand.

    python scripts/benchmarks/char_lm.py ddp  [--rounds 15] [--iterations 20] [overrides …]
    python scripts/benchmarks/char_lm.py bf16 [--rounds 15] [--iterations 20] [overrides …]
    python scripts/benchmarks/char_lm.py gpu  [--rounds 15] [--iterations 100] [overrides …]

`ddp` runs 2 processes on the CPU with gloo, each with half of the cores. `bf16` runs one process with one thread and
autocast. `gpu` runs bf16 and torch.compile on a GPU, with the experiment's small model and with one of the size of
GPT-2, and then some iterations in which CUDA raises at each host sync between two records. Without a GPU, it prints
that it is skipped.

hydraloop is built from the config with all default hooks, but without checkpoints at an interval and without lines in
the terminal. The loop by hand (`char_lm_by_hand.py`) has the same model, data, optimizer, schedule and clipping, and
writes a record to a file every 10 iterations. Both run in the same processes: a hook times rounds of the engine's loop
and runs a round by hand after each. The order of the two alternates. Ratios are computed for each round, so changes in
the machine's speed have little effect.

On a machine with other work, many short rounds are more precise: `--rounds 150 --iterations 2`.

Further arguments are overrides of the config, for both: `engine.threads=1`, `data.loader.batch_size=32`.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from benchmark_hooks import Interleaved, NoSyncs, Records
from char_lm_by_hand import ByHand

import hydraloop
from hydraloop.engine.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
CHECKED = 50
"""Iterations on a GPU in which host syncs between records raise."""

USUAL = (
    "experiment=char_lm",
    "engine.val_interval=null",
    "engine.test=false",
    "default_hooks.checkpoint.interval=null",
    "default_hooks.checkpoint.save_last=false",
)
ON_GPU = ("precision=bf16", "engine.compile=true", "engine.device=cuda")
GPT2 = (
    "task.model.layers=12",
    "task.model.width=768",
    "task.model.heads=12",
    "data.train.block_size=1024",
    "data.loader.batch_size=32",
    "optimizer.lr=6e-4",
)


@dataclass(frozen=True)
class Case:
    """A setting in which hydraloop is compared."""

    name: str
    goal: float
    """Lowest throughput of hydraloop that meets the goal, relative to the loop by hand."""
    overrides: tuple[str, ...]


CASES = {
    "ddp": (Case(f"DDP, {PROCESSES} processes, gloo, fp32", 0.97, ("engine.device=cpu",)),),
    # One thread: several would wait for each other by spinning, so other work on the machine would distort the result.
    "bf16": (
        Case(
            "one process on the CPU, bf16 autocast", 0.98, ("precision=bf16", "engine.device=cpu", "engine.threads=1")
        ),
    ),
    "gpu": (
        Case("bf16, compiled", 0.99, ON_GPU),
        Case("bf16, compiled, as large as GPT-2", 0.99, (*ON_GPU, *GPT2)),
    ),
}


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=sorted(CASES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=None, help="iterations of a round; default 20, on a GPU 100")
    parser.add_argument("overrides", nargs="*", help="overrides of the config, for both")
    options = parser.parse_intermixed_args()
    iterations = options.iterations or (100 if options.mode == "gpu" else 20)
    if options.mode == "gpu" and not torch.cuda.is_available():
        print("skipped: this comparison needs a GPU, and torch finds none")
    elif options.mode == "ddp" and "RANK" not in os.environ:
        launch(PROCESSES)
    else:
        logging.disable(logging.INFO)  # no lines in the terminal
        for case in CASES[options.mode]:
            measure(case, options.rounds, iterations, options.overrides)


def launch(processes: int) -> None:
    """Start this script again with the same arguments in several processes."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="char_lm",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        local_addr="127.0.0.1",
        monitor_interval=0.1,
    )
    elastic_launch(config, sys.executable)(*sys.argv)


def measure(case: Case, rounds: int, iterations: int, overrides: Sequence[str]) -> None:
    """Compare the two, and print the result on rank 0."""
    timed = iterations * (rounds + 1) + 1
    on_gpu = "engine.device=cuda" in case.overrides
    added = [
        "+hooks.interleaved._target_=benchmark_hooks.Interleaved",
        f"+hooks.interleaved.length={iterations}",
        f"+hooks.interleaved.rounds={rounds}",
        "+hooks.records._target_=benchmark_hooks.Records",
        f"engine.max_iters={timed + CHECKED * on_gpu}",
    ]
    if on_gpu:
        added += [
            "+hooks.no_syncs._target_=benchmark_hooks.NoSyncs",
            f"+hooks.no_syncs.begin={timed}",
            "+hooks.no_syncs.record_every=${default_hooks.logger.interval}",
        ]
    cfg = hydraloop.compose([*USUAL, *case.overrides, *overrides, *added], folder=ROOT, trusted=["benchmark_hooks"])
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w") as file:
        engine = hydraloop.build(cfg, run_dir=Path(folder))
        by_hand = ByHand(cfg, engine.device, file)
        cast(Interleaved, engine.hooks["interleaved"]).other = by_hand.run
        engine.train()
        if engine.distributed.is_main:
            block, batch = cfg.data.train.block_size, cfg.data.loader.batch_size
            tokens = iterations * batch * block * engine.distributed.world_size
            report(case, engine, by_hand, tokens, iterations)
        engine.distributed.close()


def report(case: Case, engine: Engine, by_hand: ByHand, tokens: int, iterations: int) -> None:
    """Print the table.

    Args:
        case: the setting.
        engine: hydraloop's engine, after training.
        by_hand: the loop by hand.
        tokens: tokens in a round, on all ranks.
        iterations: iterations in a round.
    """
    interleaved = cast(Interleaved, engine.hooks["interleaved"])
    rounds = list(zip(interleaved.ours, interleaved.theirs, strict=True))
    device = platform.processor() or platform.machine()
    if engine.device.type == "cuda":
        device = torch.cuda.get_device_name(engine.device)
    print(f"{case.name}: {device}, torch {torch.__version__}, threads {torch.get_num_threads()}, ", end="")
    print(f"{len(rounds)} rounds of {iterations} iterations; tokens a second")
    print(f"  by hand     {_spread([tokens / theirs.time for _, theirs in rounds], '{:9,.0f}')}")
    print(f"  hydraloop   {_spread([tokens / ours.time for ours, _ in rounds], '{:9,.0f}')}")
    ratios = [theirs.time / ours.time for ours, theirs in rounds]
    met = "met" if statistics.median(ratios) >= case.goal else "NOT met"
    print(f"  ratio       {_spread(ratios, '{:9.3f}')}  goal: at least {case.goal:g}, {met}")
    if engine.device.type == "cpu":
        print(f"  by CPU time {_spread([theirs.cpu / ours.cpu for ours, theirs in rounds], '{:9.3f}')}  of rank 0")
    records = cast(Records, engine.hooks["records"]).records
    losses = {record["iteration"]: record["loss"] for record in records}
    if by_hand.iteration in losses:
        print(f"  loss        by hand {by_hand.loss:.3f}, hydraloop {losses[by_hand.iteration]:.3f}, at the end")
    # The last one of each round: it has no pause in it.
    mfus = [record["mfu"] for record in records if "mfu" in record and record["iteration"] % iterations == 0]
    if mfus:
        print(f"  mfu         {_spread(mfus, '{:9.3f}')}  in hydraloop's records")
    if "no_syncs" in engine.hooks:
        checked = cast(NoSyncs, engine.hooks["no_syncs"]).checked
        print(f"  host syncs between records: none in {checked} iterations (they would have raised)")


def _spread(values: list[float], form: str) -> str:
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"median {middle}  (min {low}, max {high})"


if __name__ == "__main__":
    main()
