"""Searches on recorded curves: 512 configurations of a task, each trained once in full.

    python scripts/benchmarks/search_tables.py train digits|char_lm|mlp [--workers 2] [--count 512]
    python scripts/benchmarks/search_tables.py compare [--seeds 200] [tasks …]

`train` draws the configurations from a fixed seed and appends each finished curve to `tables/<task>.jsonl`, so that it
can be stopped and started again. When all are there, they become `tables/<task>.json.gz`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gzip
import json
import logging
import math
import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measure import ROOT, goal, row, table
from search_simulation import SEARCHES, TRIALS, Search, iterations_until
from search_space import EPOCHS, FOLDER, SPACES, Table, draw

ASHA, SYNE_TUNE = "ASHA that continues", "ASHA of Syne Tune"
PEERS = (SYNE_TUNE, "Hyperband of Optuna", "TPE of Optuna")
USUAL = (
    *(f"engine.max_epochs={EPOCHS}", "engine.max_iters=null", "engine.val_interval=1", "engine.val_by_epoch=true"),
    *("engine.device=cpu", "engine.threads=1", "engine.test=false", "engine.sanity_val_steps=0"),
    *("default_hooks.checkpoint.interval=null", "default_hooks.checkpoint.save_last=false"),
    *("default_hooks.progress.enabled=false", "default_hooks.logger.interval=1000000"),
    "data.loader.eval_batch_size=512",
)
OVERRIDES: dict[str, tuple[str, ...]] = {
    "digits": (),
    "char_lm": (
        *("experiment=char_lm", "data.train.block_size=32", "data.train.megabytes=0.012", "data.val.megabytes=0.01"),
        *("task.model.heads=2", "scheduler.linear.end=20"),
    ),
    "mlp": ("experiment=diabetes",),
}


def train(task: str, count: int, workers: int) -> None:
    """Train the configurations that have no curve yet."""
    file = FOLDER / f"{task}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    done = {json.loads(line)["number"] for line in lines}
    missing = [job for job in enumerate(draw(task, count)) if job[0] not in done]
    FOLDER.mkdir(exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(workers) as pool, file.open("a", encoding="utf-8") as output:
        for entry in pool.imap_unordered(functools.partial(curve, task), missing):
            lines.append(json.dumps(entry))
            print(lines[-1], file=output, flush=True)
    lines.sort(key=lambda line: int(json.loads(line)["number"]))
    (FOLDER / f"{task}.json.gz").write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))


@functools.cache
def composed(task: str) -> Any:
    """Return the config of a task without the values of a configuration."""
    import hydraloop

    logging.disable(logging.INFO)  # no lines in the terminal
    return hydraloop.compose([*OVERRIDES[task], *USUAL], folder=ROOT)


def curve(task: str, job: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    """Train a configuration in full. A loss that is not finite, or missing after a run has diverged, is None."""
    from omegaconf import OmegaConf

    import hydraloop

    number, parameters = job
    cfg = copy.deepcopy(composed(task))
    for key, value in parameters.items():
        OmegaConf.update(cfg, key, value)
    with tempfile.TemporaryDirectory() as folder:
        engine = hydraloop.build(cfg, run_dir=Path(folder) / "run")
        per_epoch = len(engine.batches.loaders.train)
        try:
            engine.train()
        except hydraloop.UserError as error:
            if error.key != "engine.allow_nan":
                raise
        records = [record for record in hydraloop.records(Path(folder) / "run") if record["mode"] == "val"]
    losses = [float(f"{record['loss']:.5g}") for record in records]
    found = [loss if math.isfinite(loss) else None for loss in losses] + [None] * (EPOCHS - len(losses))
    return {"number": number, "parameters": parameters, "iterations": per_epoch, "losses": found}


def compare(task: str, seeds: int, syne_tune: str) -> None:
    """Print how many iterations each search needs on a table until it reaches the target."""
    target = float(np.median([random_best(Table(task), seed) for seed in range(seeds)]))
    print(f"\n{task}: until a validation loss of {target:.4g}, {seeds} seeds\n")
    table(f"{task}", "iterations, median (95 % interval)", "to random search", "arrived")
    medians: dict[str, float] = {}
    for name in SEARCHES:
        if name == SYNE_TUNE and not syne_tune:
            continue
        python = syne_tune if name == SYNE_TUNE else sys.executable
        command = [python, __file__, "reach", task, name, f"{target}", f"--seeds={seeds}"]
        found = np.array(
            json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()[-1])
        )
        drawn = np.random.default_rng(0).choice(found, (2000, seeds))
        low, high = (np.quantile(np.median(drawn, 1), share, method="nearest") for share in (0.025, 0.975))
        medians[name] = float(np.median(found))
        ratio = medians[name] / medians["random search"]
        row(
            name,
            f"{medians[name]:,.0f} ({low:,.0f} to {high:,.0f})",
            f"{ratio:.2f}",
            f"{np.isfinite(found).mean():.0%}",
        )
    ours = medians.pop(ASHA)
    fewer = all(ours < medians[name] for name in PEERS if name in medians)
    goal("\nASHA that continues to random search", [ours / medians["random search"]], most=1 / 3)
    print(f"fewer iterations than each peer: {'met' if fewer else 'NOT met'}", flush=True)


def random_best(recorded: Table, seed: int) -> float:
    """Return the lowest loss of the first trials of a random search."""
    return float(np.nanmin(recorded.losses[Search(recorded, seed).order[:TRIALS]]))


def main() -> None:
    """Run the chosen part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train the configurations of a task that have no curve yet")
    training.add_argument("task", choices=sorted(SPACES))
    training.add_argument("--workers", type=int, default=2)
    training.add_argument("--count", type=int, default=512)
    comparing = commands.add_parser("compare", help="compare searches on the tables")
    comparing.add_argument("tasks", nargs="*", choices=[*SPACES, []], default=[*SPACES])
    comparing.add_argument("--syne-tune", default="", metavar="PYTHON", help="interpreter of an environment with it")
    reaching = commands.add_parser("reach", help="print the iterations of one search, for each seed")
    reaching.add_argument("task", choices=sorted(SPACES))
    reaching.add_argument("search", choices=list(SEARCHES))
    reaching.add_argument("target", type=float)
    for command in (comparing, reaching):
        command.add_argument("--seeds", type=int, default=200)
    options = parser.parse_args()
    if options.command == "train":
        train(options.task, options.count, options.workers)
    elif options.command == "compare":
        for task in options.tasks:
            compare(task, options.seeds, options.syne_tune)
    else:
        recorded, search = Table(options.task), SEARCHES[options.search]
        found = [iterations_until(recorded, search(recorded, seed), options.target) for seed in range(options.seeds)]
        print(json.dumps(found))


if __name__ == "__main__":
    main()
