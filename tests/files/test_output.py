from __future__ import annotations

import json

import pytest

from hydraloop.files.terminal import print_json


def test_an_answer_in_json_has_no_nan_and_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"value": float("nan"), "typed": ["hooks.wandb.api_key=hunter2-0123456789"]})
    answer = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert answer == {"value": "nan", "typed": ["hooks.wandb.api_key=***"]}
