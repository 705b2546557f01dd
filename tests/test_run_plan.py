"""The plan of a run as text: other ranks get all of the config, and a file or a store gets no secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydraloop.plan import RunPlan
from hydraloop.processes.private import VARIABLE, Private
from hydraloop.safety.allowlist import Allowlist


def plan(tmp_path: Path, **config: Any) -> RunPlan:
    cfg: Any = OmegaConf.create(config)
    return RunPlan(cfg=cfg, run_dir=tmp_path, checkpoint=tmp_path / "a.pth", attempt=None, known=["a"], typed=["seed"])


def test_a_plan_is_the_same_after_it_was_text(tmp_path: Path) -> None:
    made = plan(tmp_path, seed=1, lr="1e-3", copy="${seed}", hooks={"a.b": {"list": [1, None, 0.5]}})
    found = RunPlan.from_json(made.to_json())
    assert found.cfg == {"seed": 1, "lr": "1e-3", "copy": 1, "hooks": {"a.b": {"list": [1, None, 0.5]}}}
    assert (found.run_dir, found.checkpoint, found.attempt) == (made.run_dir, made.checkpoint, made.attempt)
    assert (found.known, found.typed, found.verbose) == (made.known, made.typed, made.verbose)


def test_the_text_has_no_secret_and_the_ranks_of_this_machine_get_it_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELSEWHERE", "hunter2-env")
    mine = {"api_key": "${oc.env:ELSEWHERE}", "password": "hunter2-typed", "urls": ["a", "ab://me:hunter2@host"]}
    made = plan(tmp_path, hooks={"my.hook": mine})
    text = made.to_json()
    assert "hunter2" not in text
    assert "${oc.env:ELSEWHERE}" in text
    sender, receiver = Allowlist(), Allowlist()
    sender.trust(["timm"])
    monkeypatch.setattr("hydraloop.processes.private.ALLOWLIST", sender)
    variables = Private.of(made).variables()
    monkeypatch.delenv("ELSEWHERE")
    monkeypatch.setattr("hydraloop.processes.private.ALLOWLIST", receiver)
    found = Private(**json.loads(variables[VARIABLE])).added_to(RunPlan.from_json(text))
    assert found.cfg.hooks["my.hook"] == {**mine, "api_key": "hunter2-env"}
    assert receiver.packages == ["timm"]
    assert "timm" not in text
