"""Some of the lines and mistakes of `client.py`, and its judgement. scripts/nightly.sh has all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.faults import mistakes
from tests.faults.client import Client, main


@pytest.mark.nightly
def test_a_client_of_the_json_writes_lines_and_repairs_mistakes() -> None:
    assert main(seed=5, lines=4, planted=6, every=5) == 0


def test_the_client_follows_the_commands_of_errors_and_no_others() -> None:
    answers = {
        "a": {"error": {"command": ["b"]}},
        "b": {"command": "dry-run"},
        "c": {"error": {"command": None}},
        "d": {"error": {"command": ["d"]}},
    }

    def ask(command: Sequence[str]) -> dict[str, Any]:
        return answers[command[0]] if len(command) == 1 else {"groups": {}}

    client = Client(ask, random.Random(0))
    ends = {name: client.repaired([name]) for name in answers}
    assert ends["a"] == ends["b"] == (["b"], None)
    assert ends["c"] == (["c"], {"command": None})
    assert ends["d"] == (["d"], {"command": ["d"]}), "it does not run for ever"


@pytest.mark.parametrize("kind", mistakes.KINDS)
def test_a_mistake_is_planted(kind: str) -> None:
    line = ["optimizer=sgd", "hooks=[ema,tta]", "hooks.ema.momentum=0.1", "engine.max_epochs=3"]
    wrongs = [mistakes.KINDS[kind](line, random.Random(number)) for number in range(9)]
    assert all(wrong and wrong != line for wrong in wrongs)
