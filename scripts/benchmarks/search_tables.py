"""Searches on recorded curves: 512 configurations of a task, each trained once in full.

    python scripts/benchmarks/search_tables.py train   [digits char_lm mlp] [--workers 2] [--count 512]
    python scripts/benchmarks/search_tables.py compare [digits char_lm mlp] [--seeds 200] [--best] [--syne-tune PYTHON]

`train` draws the configurations from a fixed seed and appends each finished curve to `tables/<task>.json.gz`. It can be
stopped and started again.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import logging
import math
import multiprocessing
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measure import ROOT, goal, row, table
from search_simulation import SEARCHES, TRIALS, Search, Tpe, iterations_until
from search_space import EPOCHS, SPACES, Config, Table, draw, entries, table_file

RANDOM, ASHA, SYNE_TUNE = "random search", "ASHA that continues", "ASHA of Syne Tune"
PEERS = (SYNE_TUNE, "Hyperband of Optuna", "TPE of Optuna")
USUAL = (
    *(f"engine.max_epochs={EPOCHS}", "engine.max_iters=null", "engine.val_interval=1", "engine.val_by_epoch=true"),
    *("engine.device=cpu", "engine.threads=1", "engine.test=false", "engine.sanity_val_steps=0"),
    *("default_hooks.checkpoint.interval=null", "default_hooks.checkpoint.save_last=false"),
    *("default_hooks.progress.enabled=false", "default_hooks.logger.interval=1000000"),
    "data.loader.eval_batch_size=512",
)
OVERRIDES: dict[str, tuple[str, ...]] = {
    "digits": ("engine.limit_train_batches=5",),
    "char_lm": (
        *("experiment=char_lm", "data.train.block_size=32", "data.train.megabytes=0.008", "data.val.megabytes=0.004"),
        *("task.model.layers=1", "task.model.heads=1", "engine.limit_train_batches=8"),
    ),
    "mlp": ("experiment=diabetes",),
}


def train(task: str, count: int, workers: int) -> None:
    """Train the configurations that have no curve yet. Each curve is appended to the file when it ends."""
    done = {entry["number"] for entry in entries(task)}
    missing = [job for job in enumerate(draw(task, count)) if job[0] not in done]
    with multiprocessing.get_context("spawn").Pool(workers) as pool, table_file(task).open("ab") as output:
        for entry in pool.imap_unordered(functools.partial(curve, task), missing):
            output.write(gzip.compress(f"{json.dumps(entry)}\n".encode()))
            output.flush()
    lines = "".join(f"{json.dumps(entry)}\n" for entry in entries(task))
    table_file(task).write_bytes(gzip.compress(lines.encode(), mtime=0))  # a quarter of the size


@functools.cache
def composed(task: str) -> Any:
    """Return the config of a task without the values of a configuration."""
    import hydraloop

    logging.disable(logging.INFO)  # no lines in the terminal
    return hydraloop.compose([*OVERRIDES[task], *USUAL], folder=ROOT)


def curve(task: str, job: tuple[int, Config]) -> dict[str, Any]:
    """Train a configuration in full. A loss that is not finite, or missing after a run has diverged, is None."""
    from omegaconf import OmegaConf

    import hydraloop

    number, config = job
    cfg = composed(task)
    for key, value in config.parameters.items():
        OmegaConf.update(cfg, key, value)
    with tempfile.TemporaryDirectory() as folder:
        engine = hydraloop.build(cfg, run_dir=Path(folder) / "run")
        try:
            engine.train()
        except hydraloop.UserError as error:
            if error.key != "engine.allow_nan":
                raise
        records = [record for record in hydraloop.records(Path(folder) / "run") if record["mode"] == "val"]
    assert records, "a validation after each epoch"
    per_epoch = records[0]["iteration"]
    losses = [float(f"{record['loss']:.5g}") for record in records]
    found = [loss if math.isfinite(loss) else None for loss in losses] + [None] * (EPOCHS - len(losses))
    return {"number": number, "parameters": config.parameters, "iterations": per_epoch, "losses": found}


def compare(task: str, options: argparse.Namespace) -> None:
    """Print how many iterations each search needs on a table until it reaches the target."""
    recorded = Table(task, best=options.best)
    print(f"\n{len(recorded.losses)} configurations, {options.seeds} seeds, ", end="")
    print(f"until a {'best' if options.best else 'last'} loss of {target_of(recorded, options.seeds):.5g}\n")
    table(task, "iterations, median (95 % interval)", "to random search", "arrived")
    medians: dict[str, float] = {}
    for name in SEARCHES:
        if name == SYNE_TUNE and not options.syne_tune:
            continue
        found = np.array(elsewhere(task, options) if name == SYNE_TUNE else reach(task, name, options))
        medians[name] = float(np.median(found))
        drawn = np.median(np.random.default_rng(0).choice(found, (2000, len(found))), 1)
        low, high = np.quantile(drawn, (0.025, 0.975), method="nearest")
        ratio, arrived = medians[name] / medians[RANDOM], np.isfinite(found).mean()
        row(name, f"{medians[name]:,.0f} ({low:,.0f} to {high:,.0f})", f"{ratio:.2f}", f"{arrived:.0%}")
    is_least = all(medians[ASHA] < medians[name] for name in PEERS if name in medians)
    print(f"\n{ASHA} needs fewer iterations than each peer: {'met' if is_least else 'NOT met'}")
    goal("its iterations to those of random search", [medians[ASHA] / medians[RANDOM]], most=0.33)


def target_of(recorded: Table, seeds: int) -> float:
    """Return the median of the lowest loss after the first trials of a random search."""
    ends = recorded.losses[:, -1]
    return float(np.median([np.nanmin(ends[Search(recorded, seed).order[:TRIALS]]) for seed in range(seeds)]))


def reach(task: str, name: str, options: argparse.Namespace) -> list[float]:
    """Return the iterations that a search needs until the target, for each seed."""
    recorded = Table(task, best=options.best)
    target = target_of(recorded, options.seeds)
    seeds = range(options.tpe_seeds if issubclass(SEARCHES[name], Tpe) else options.seeds)
    return [iterations_until(recorded, SEARCHES[name](recorded, seed), target) for seed in seeds]


def elsewhere(task: str, options: argparse.Namespace) -> list[float]:
    """Return what `reach` returns for Syne Tune, which is in another environment."""
    command = [options.syne_tune, __file__, "reach", task, f"--seeds={options.seeds}", *["--best"] * options.best]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    found: list[float] = json.loads(printed.splitlines()[-1])
    return found


def main() -> None:
    """Run the chosen part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("train", "compare", "reach"), help="reach: of Syne Tune, as JSON")
    parser.add_argument("tasks", nargs="*", default=[*SPACES], help="default: all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--count", type=int, default=512, help="configurations of a task")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--tpe-seeds", type=int, default=50, help="of TPE, which is slow")
    parser.add_argument("--best", action="store_true", help="the value of a trial is its best loss, not its last one")
    parser.add_argument("--syne-tune", metavar="PYTHON", help="interpreter of an environment with Syne Tune")
    options = parser.parse_args()
    for task in options.tasks:
        if options.command == "train":
            train(task, options.count, options.workers)
        elif options.command == "compare":
            compare(task, options)
        else:
            print(json.dumps(reach(task, SYNE_TUNE, options)))


if __name__ == "__main__":
    main()
