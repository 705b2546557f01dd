"""Values of MMEngine's schedules: `python -m tests.compat.mmengine_schedules values.json`, where mmengine is installed.

`tests/optim/mmengine_values.json` has them; test_files_of_others.py compares that file with an installed mmengine.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

EPOCHS, STEPS_PER_EPOCH = 12, 5
STEPS = EPOCHS * STEPS_PER_EPOCH
LRS, MOMENTUM = (0.1, 0.02), 0.9
LOSSES = [1.0, 0.9, 0.95, 0.95, 0.95, 0.8, 0.81, 0.82, 0.83, 0.83, 0.7, 0.71]
"""Metrics of the validations after each epoch."""
SHOWN = (0, 1, 10, 29, 34, 35, 45, 59)
"""Iterations whose values are stored; of the others, only the sum."""

KINDS: dict[str, dict[str, Any]] = {
    "Constant": {"factor": 0.25},
    "Cosine": {"T_max": None, "eta_min": 0.001},
    "Exponential": {"gamma": 0.9},
    "Linear": {"start_factor": 0.2, "end_factor": 0.9},
    "MultiStep": {"milestones": [1, 3, 6], "gamma": 0.5},
    "Poly": {"power": 2.0, "eta_min": 0.001},
    "Step": {"step_size": 2, "gamma": 0.7},
    "ReduceOnPlateau": {"factor": 0.3, "patience": 1, "cooldown": 1, "min_value": 0.002},
}
LONGER = {"milestones": [4, 11, 20], "step_size": 7}
"""The lengths of those that count iterations."""


def single_cases() -> list[list[dict[str, Any]]]:
    """Each kind, of lr and momentum, in iterations, epochs and converted, with and without begin and end."""
    found = []
    for kind, param, unit, part in itertools.product(
        KINDS, ("lr", "momentum"), ("iterations", "epochs", "converted"), (False, True)
    ):
        if kind == "ReduceOnPlateau" and unit != "epochs":
            continue  # MMEngine has none
        begin_and_end = {"begin": 2, "end": 9} if unit != "iterations" else {"begin": 7, "end": 46}
        arguments = dict(KINDS[kind])
        if unit == "iterations":
            arguments |= {name: LONGER[name] for name in arguments.keys() & LONGER.keys()}
        found.append([{
            "kind": kind, "arguments": arguments, "param": param, "unit": unit,
            **(begin_and_end if part else {"begin": 0, "end": None}),
        }])  # fmt: skip
    return found


def sequences(count: int = 24) -> list[list[dict[str, Any]]]:
    """Random schedules one after another, of the lr, in iterations."""
    random.seed(0)
    found = []
    for _ in range(count):
        cuts = sorted(random.sample(range(4, STEPS - 4, 4), random.choice((1, 2))))
        stretches = itertools.pairwise([0, *cuts, STEPS])
        kinds = random.sample([kind for kind in KINDS if kind != "ReduceOnPlateau"], len(cuts) + 1)
        sequence = []
        for kind, (begin, end) in zip(kinds, stretches, strict=False):
            arguments = dict(KINDS[kind])
            if kind == "Cosine" and random.random() < 0.5:
                arguments["T_max"] = max(2, (end - begin) // 3)
            sequence.append(
                {"kind": kind, "arguments": arguments, "param": "lr", "unit": "iterations", "begin": begin, "end": end}
            )
        found.append(sequence)
    return found


def optimizer() -> torch.optim.Optimizer:
    """Two groups with different lrs."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in LRS]
    return torch.optim.SGD(groups, lr=0.1, momentum=MOMENTUM)


def shown(values: list[list[float]]) -> list[list[float]]:
    """Some of the values of each iteration, and the sum of all, of each group."""
    return [*[values[n] for n in SHOWN], [sum(column) for column in zip(*values, strict=True)]]


def theirs(case: list[dict[str, Any]]) -> list[list[float]]:
    """The values that MMEngine's schedules give in each iteration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mmengine.optim.scheduler.param_scheduler as module

        groups = optimizer()
        schedulers: list[Any] = []
        for entry in case:
            kind = "CosineAnnealing" if entry["kind"] == "Cosine" else entry["kind"]
            target = getattr(module, f"{kind}ParamScheduler")
            end = entry["end"] or (STEPS if entry["unit"] == "iterations" else EPOCHS)  # as the Runner sets it
            arguments = {"param_name": entry["param"], "begin": entry["begin"], "end": end, **entry["arguments"]}
            if entry["unit"] == "converted":
                make = target.build_iter_from_epoch
                schedulers.append(make(groups, by_epoch=True, epoch_length=STEPS_PER_EPOCH, **arguments))
            else:
                schedulers.append(target(groups, by_epoch=entry["unit"] == "epochs", **arguments))
        seen = []
        for n in range(1, STEPS + 1):
            seen.append([float(group[case[0]["param"]]) for group in groups.param_groups])
            groups.step()
            for scheduler in schedulers:
                if not scheduler.by_epoch or n % STEPS_PER_EPOCH == 0:
                    scheduler.step()
            if n % STEPS_PER_EPOCH == 0:
                for scheduler in schedulers:
                    if getattr(scheduler, "need_val_args", False):
                        scheduler.step({"loss": LOSSES[n // STEPS_PER_EPOCH - 1]})
        return seen


if __name__ == "__main__":
    cases = [{"case": case, "values": shown(theirs(case))} for case in (*single_cases(), *sequences())]
    lines = ",\n".join(json.dumps(case) for case in cases)
    Path(sys.argv[1]).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
