from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import hydraloop
from hydraloop.config import checks
from hydraloop.config.dry_run import format_plan
from hydraloop.config.hook_checks import slots_of
from hydraloop.engine.call_table import by_mount_point
from tests.config.composed import REPOSITORY, composer

SELECTIONS = [
    [],
    ["hooks=[ema,profiler]"],
    ["hooks=[profiler,ema]", "hooks.ema.priority=HIGH", "hooks.profiler.priority=45"],
    ["hooks=[ema]", "hooks.ema.priority=10"],
    ["default_hooks=[checkpoint,logger,timer]"],
    ["default_hooks=[]"],
    ["default_hooks.checkpoint=null", "~default_hooks.logger", "default_hooks.timer.priority=50"],
    ["default_hooks.progress.priority=0", "scheduler=[]"],
    ["experiment=diabetes", "hooks=[ema]"],
    ["default_hooks.sampler_seed=null"],
]


@pytest.mark.parametrize("lines", SELECTIONS, ids=" ".join)
def test_the_plan_is_the_order_of_the_engine(lines: Sequence[str], tmp_path: Path) -> None:
    with composer() as opened:
        cfg = checks.compose_job(lines, opened)
        planned = slots_of(cfg)
    engine = hydraloop.build(hydraloop.compose(lines, folder=REPOSITORY), run_dir=tmp_path)
    assert planned == engine.calls.slots


def test_the_order_by_hand() -> None:
    with composer() as opened:
        slots = slots_of(checks.compose_job(["hooks=[ema,profiler]"], opened))
    assert [(slot.name, slot.priority) for slot in slots] == [
        ("runtime_info", 10),
        ("grad_clip", 40),
        ("timer", 50),
        ("sampler_seed", 50),
        ("ema", 50),
        ("logger", 60),
        ("param_scheduler", 70),
        ("checkpoint", 90),
        ("profiler", 90),
        ("progress", 100),
    ]
    called = [slot.name for slot in by_mount_point(slots)["after_train_iter"]]
    assert called.index("timer") < called.index("ema") < called.index("checkpoint") < called.index("profiler")


def test_a_hook_without_a_schema_stands_apart() -> None:
    with composer() as opened:
        text = format_plan(checks.compose_job(["+hooks.mine._target_=my_project.hooks.MyHook"], opened))
    assert "class not imported" in text
    line = next(line for line in text.splitlines() if "class not imported" in line)
    assert line.endswith("mine (50)")


def test_the_plan_says_what_is_missing() -> None:
    with composer() as opened:
        text = format_plan(checks.compose_job(["default_hooks=[]"], opened))
    line = "default_hooks is empty: this run writes no records (metrics.jsonl) and no checkpoints"
    assert f"\n{line}; to write them, select logger and checkpoint in default_hooks\n" in text


def test_the_plan_resolves_what_can_be_resolved_before_the_job() -> None:
    with composer() as opened:
        cfg = checks.compose_job(["optimizer.lr=${optimizer.eps}"], opened)
        assert "lr: 1.0e-08" in format_plan(cfg)
        cfg = checks.compose_job(["load_from=${hydra:runtime.output_dir}/x.pth"], opened)
        assert "load_from: ${hydra:runtime.output_dir}/x.pth" in format_plan(cfg)


@pytest.mark.parametrize("directory", ["null", "${hydra:runtime.output_dir}"])
def test_the_plan_has_no_secret(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOT_A_NAME", "hunter2-0123")
    lines = ["+hooks.mine.api_key=${oc.env:NOT_A_NAME}", "+hooks.mine.pwd=hunter2-4567"]
    with composer() as opened:
        cfg = checks.compose_job([*lines, "+hooks.mine._target_=a.B", f"load_from={directory}"], opened)
        text = format_plan(cfg)
    assert "hunter2" not in text
    assert "    pwd: '***'" in text


def test_the_plan_has_no_node_of_hydras() -> None:
    with composer() as opened:
        text = format_plan(checks.compose_job([], opened))
    assert "\nhydra:" not in text
    assert text.splitlines()[0] == "# The composed config"


def test_an_order_that_breaks_runs_after_is_refused() -> None:
    with composer() as opened:
        with pytest.raises(hydraloop.UserError, match="must run after"):
            checks.compose_job(["default_hooks.checkpoint.priority=20"], opened)
        with pytest.raises(hydraloop.UserError, match="must run after"):
            checks.compose_job(["hooks=[ema]", "hooks.ema.priority=LOWEST"], opened)
