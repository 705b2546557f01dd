"""What hydraloop costs on a language model: `experiment=char_lm` against the same work written by hand.

    python scripts/benchmarks/char_lm.py ddp  [--rounds 15] [--iterations 20] [overrides …]
    python scripts/benchmarks/char_lm.py bf16 [--rounds 15] [--iterations 20] [overrides …]
    python scripts/benchmarks/char_lm.py gpu  [--rounds 15] [--iterations 100] [overrides …]

`ddp`: 2 processes on the CPU, gloo, each with its part of the cores. `bf16`: one process, one thread, autocast. `gpu`:
bf16 and torch.compile on a GPU, once with the experiment's own small model and once with one of the size of GPT-2; then
some iterations in which CUDA raises at any host sync between two records. Without a GPU it says so and does nothing.

hydraloop is built from the config and has all its default hooks; the checkpoints' interval and the terminal's lines are
off. The loop by hand (`char_lm_by_hand.py`) has the same model, data, optimizer, schedule, clipping, and a record in a
file every 10 iterations. Both live in the same processes: rounds of the engine's own loop are timed by a hook, which
runs a round by hand in between, and which of the two comes first alternates. Ratios are taken round by round, so that a
drift of the machine's speed drops out.

Where the machine has other work, many short rounds tell more: `--rounds 150 --iterations 2`.

More arguments are overrides of the config, for both: `engine.threads=1`, `data.loader.batch_size=32`.
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
"""Iterations without a host sync between records, on a GPU."""

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
    """Something to compare."""

    name: str
    goal: float
    """Of hydraloop's throughput, by hand being 1."""
    overrides: tuple[str, ...]


CASES = {
    "ddp": (Case(f"DDP, {PROCESSES} processes, gloo, fp32", 0.97, ("engine.device=cpu",)),),
    # One thread: several wait for each other by spinning, so that other work on the machine would be all one measures.
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
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=sorted(CASES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=None, help="of a round; 20, on a GPU 100")
    parser.add_argument("overrides", nargs="*", help="of the config, for both")
    options = parser.parse_intermixed_args()
    iterations = options.iterations or (100 if options.mode == "gpu" else 20)
    if options.mode == "gpu" and not torch.cuda.is_available():
        print("skipped: torch finds no GPU on this machine, and bf16 with compile is compared on one")
    elif options.mode == "ddp" and "RANK" not in os.environ:
        launch(PROCESSES)
    else:
        logging.disable(logging.INFO)  # the terminal's lines; the loop by hand writes its record to a file, too
        for case in CASES[options.mode]:
            measure(case, options.rounds, iterations, options.overrides)


def launch(processes: int) -> None:
    """Start this script again with the same arguments, as so many ranks."""
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
    """Compare, and print what came of it on rank 0."""
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
        tokens: of a round, on all ranks.
        iterations: of a round.
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
