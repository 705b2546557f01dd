"""Overhead of hydraloop on a language model: `experiment=char_lm` compared with the same work written by hand.

    python scripts/benchmarks/char_lm.py ddp  [--rounds 15] [--iterations 20] [overrides …]
    python scripts/benchmarks/char_lm.py bf16 [--rounds 15] [--iterations 20] [overrides …]
    python scripts/benchmarks/char_lm.py gpu  [--rounds 15] [--iterations 100] [overrides …]

`ddp` runs 2 processes on the CPU with gloo, each with half of the cores. `bf16` runs one process with one thread and
autocast. `gpu` runs bf16 and torch.compile on a GPU, with the experiment's small model and with one of the size of
GPT-2. Without a GPU, it prints that it is skipped.

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
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from benchmark_hooks import Interleaved
from char_lm_by_hand import ByHand
from measure import ROOT, environment, goal, machine, ratios, spread

import hydraloop

PROCESSES = 2
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
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // processes))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    subprocess.run([sys.executable, *launcher, *sys.argv], env=environment(OMP_NUM_THREADS=threads), check=True)


def measure(case: Case, rounds: int, iterations: int, overrides: Sequence[str]) -> None:
    """Compare the two, and print the result on rank 0."""
    added = [
        "+hooks.interleaved._target_=benchmark_hooks.Interleaved",
        f"+hooks.interleaved.length={iterations}",
        f"+hooks.interleaved.rounds={rounds}",
        f"engine.max_iters={iterations * (rounds + 1) + 1}",
    ]
    cfg = hydraloop.compose([*USUAL, *case.overrides, *overrides, *added], folder=ROOT, trusted=["benchmark_hooks"])
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w") as file:
        engine = hydraloop.build(cfg, run_dir=Path(folder))
        by_hand = ByHand(cfg, engine.device, file)
        interleaved = cast(Interleaved, engine.hooks["interleaved"])
        interleaved.other = by_hand.run
        engine.train()
        if engine.distributed.is_main:
            block, batch = cfg.data.train.block_size, cfg.data.loader.batch_size
            tokens = iterations * batch * block * engine.distributed.world_size
            report(case, interleaved, tokens, iterations)
            log = Path(folder) / "metrics.jsonl"  # missing if the run is too short for a record
            records = (
                [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
            )
            for record in records:
                if record["iteration"] == by_hand.iteration:
                    print(f"loss at the end: by hand {by_hand.loss:.3f}, hydraloop {record['loss']:.3f}")
        engine.distributed.close()


def report(case: Case, interleaved: Interleaved, tokens: int, iterations: int) -> None:
    """Print the figures.

    Args:
        case: the setting.
        interleaved: the rounds of both.
        tokens: tokens in a round, on all ranks.
        iterations: iterations in a round.
    """
    ours, theirs = interleaved.ours, interleaved.theirs
    print(f"{case.name}: {machine()}, torch {torch.__version__}, threads {torch.get_num_threads()}, ", end="")
    print(f"{len(ours)} rounds of {iterations} iterations; tokens a second")
    for name, rounds in (("by hand", theirs), ("hydraloop", ours)):
        print(f"{name}: {spread([tokens / seconds for seconds in rounds], 0)}")
    goal("ratio", ratios(theirs, ours), least=case.goal, digits=3)


if __name__ == "__main__":
    main()
