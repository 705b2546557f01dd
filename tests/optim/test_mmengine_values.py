"""The values of MMEngine 0.10.7's schedules: single ones of each kind, and sequences that do not overlap.

`mmengine_values.json` is written by tests/compat/mmengine_schedules.py; test_files_of_others.py checks it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hydraloop.optim
from tests.compat import mmengine_schedules as case_data
from tests.optim.scheduled import of, run

STORED = json.loads(Path(__file__).with_name("mmengine_values.json").read_text(encoding="utf-8"))


def ours(case: list[dict[str, Any]]) -> list[list[float]]:
    """Hydraloop's values in each iteration."""
    optimizer = case_data.optimizer()
    schedules = []
    for number, entry in enumerate(case):
        arguments = dict(entry["arguments"])
        plateau = entry["kind"] == "ReduceOnPlateau"
        if plateau:
            arguments["min_lr"] = arguments.pop("min_value")
        kind = "Plateau" if plateau else entry["kind"]
        if kind == "Step":
            kind, size = "MultiStep", arguments.pop("step_size")
            arguments["milestones"] = range(size, case_data.STEPS, size)
        function = getattr(hydraloop.optim, kind)(**arguments)
        when = {"by_epoch": entry["unit"] != "iterations", "convert_to_iter_based": entry["unit"] == "converted"}
        monitor = "loss" if plateau else None
        fields = {name: entry[name] for name in ("param", "begin", "end")}
        schedules.append(of(f"s{number}", function, optimizer, monitor=monitor, **fields, **when))
    key = case[0]["param"]
    return run(optimizer, schedules, case_data.STEPS - 1, key=key, losses=case_data.LOSSES)


@pytest.mark.parametrize(
    "stored", STORED, ids=lambda stored: "-".join(f"{entry['kind']}-{entry['unit']}" for entry in stored["case"])
)
def test_the_values_are_mmengines(stored: dict[str, Any]) -> None:
    found = ours(stored["case"])
    for here, there in zip(case_data.shown(found), stored["values"], strict=True):
        assert here == pytest.approx(there, rel=1e-12, abs=1e-12)


def test_all_kinds_are_compared() -> None:
    single = [stored["case"][0] for stored in STORED if len(stored["case"]) == 1]
    assert len(single) >= 88
    assert {entry["kind"] for entry in single} == set(case_data.KINDS)
