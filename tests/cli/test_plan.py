from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import hydraloop
from hydraloop.config import checks
from hydraloop.config.dry_run import format_plan
from hydraloop.config.hook_checks import slots_of
from hydraloop.engine.hook_order import by_mount_point
from tests.config.composed import REPOSITORY, composer

MINE = "+hooks.mine._target_"
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
    cfg = hydraloop.compose(lines, folder=REPOSITORY)
    assert slots_of(cfg) == hydraloop.build(cfg, run_dir=tmp_path).calls.slots


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


def test_what_the_plan_says() -> None:
    """Hooks without a schema, what is missing, and values that can be resolved before the job."""
    with composer() as opened:

        def plan(line: str) -> str:
            return format_plan(checks.compose_job([line], opened))

        (hook,) = [
            line for line in plan(f"{MINE}=my_project.hooks.MyHook").splitlines() if "class not imported" in line
        ]
        assert hook.endswith("mine (50)")
        said = "default_hooks is empty: this run writes no records (metrics.jsonl) and no checkpoints"
        without = plan("default_hooks=[]")
        assert f"\n{said}; to write them, select logger and checkpoint in default_hooks\n" in without
        assert "\nhydra:" not in without
        assert without.splitlines()[0] == "# The composed config"
        assert "lr: 1.0e-08" in plan("optimizer.lr=${optimizer.eps}")
        only_the_job_knows = "${hydra:runtime.output_dir}/x.pth"
        assert f"load_from: {only_the_job_knows}" in plan(f"load_from={only_the_job_knows}")


@pytest.mark.parametrize("directory", ["null", "${hydra:runtime.output_dir}"])
def test_the_plan_has_no_secret(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOT_A_NAME", "hunter2-0123")
    lines = ["+hooks.mine.api_key=${oc.env:NOT_A_NAME}", "+hooks.mine.pwd=hunter2-4567"]
    with composer() as opened:
        cfg = checks.compose_job([*lines, "+hooks.mine._target_=a.B", f"load_from={directory}"], opened)
        text = format_plan(cfg)
    assert "hunter2" not in text
    assert "    pwd: '***'" in text


def test_an_order_that_breaks_runs_after_is_refused() -> None:
    with composer() as opened:
        with pytest.raises(hydraloop.UserError, match="must run after"):
            checks.compose_job(["default_hooks.checkpoint.priority=20"], opened)
        with pytest.raises(hydraloop.UserError, match="must run after"):
            checks.compose_job(["hooks=[ema]", "hooks.ema.priority=LOWEST"], opened)
