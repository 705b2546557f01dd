"""`python -m hydraloop replay`: any iteration of a run, with what an independent hook has seen in it."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import hydraloop
from hydraloop.commands import parser
from hydraloop.commands.on_ranks import RankCommand, prepare
from hydraloop.commands.replay import _redirect
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.safety.allowlist import ALLOWLIST
from tests.config.composed import REPOSITORY
from tests.helpers import logged
from tests.marks import nightly, slow
from tests.ranks import on_ranks

POINTS = "tests.faults.in_project.Points"
LINES = (
    *("engine.max_epochs=2", "engine.accumulate=3", "engine.test=false", "engine.device=cpu", "hooks=[ema]"),
    *("~optimizer", "+optimizer@optimizer.body=adamw", "+optimizer@optimizer.head=sgd", "optimizer.head.match=head.*"),
    *(f"data.{split}={{_target_: {POINTS}, samples: 76}}" for split in ("train", "val")),
    *("data=base", "data.loader.batch_size=4", "~model", "++task.model._target_=tests.faults.in_project.Model"),
    *("default_hooks.logger.interval=1", "default_hooks.grad_clip.max_norm=1"),
    *("default_hooks.checkpoint.by_epoch=false", "default_hooks.checkpoint.interval=7"),
    "+hooks.ledger._target_=tests.faults.in_project.Ledger",
)
"""19 iterations in an epoch, in windows of 3: the sample draws, the model has dropout and batch norm."""


@pytest.fixture(autouse=True)
def _trusted() -> None:
    trust()


def trust() -> None:
    """As the command does in the repository with `--trusted tests`."""
    ALLOWLIST.trust_folder(REPOSITORY)
    ALLOWLIST.trust(["tests"])


def train(run_dir: Path, *lines: str, distributed: Distributed | None = None) -> Path:
    """Train in this process; `hooks.ledger` writes the samples of each iteration into the run directory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    given = [*LINES, f"+hooks.ledger.path={run_dir / 'ledger'}", *lines]
    cfg = hydraloop.compose(given, folder=REPOSITORY, trusted=["tests"])
    hydraloop.build(cfg, run_dir=run_dir, distributed=distributed).train()
    return run_dir


def prepared(run_dir: Path, iteration: int, *overrides: str) -> RankCommand:
    return prepare(parser.read(["replay", str(run_dir), f"iteration={iteration}", *overrides]))


def replayed(run_dir: Path, iteration: int, *overrides: str, ranks: Distributed | None = None) -> dict[str, Any]:
    """Replay an iteration, and check that it is equal to the run, which is not changed."""
    before = files(run_dir)
    replay = prepared(run_dir, iteration, *overrides)
    text = replay.run(ranks or Distributed())
    assert (replay.differs, files(run_dir)) == (False, before)
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check(run_dir: Path, found: dict[str, Any], *, every: int = 1, length: int = 19) -> None:
    """Compare with the records of the run, and with what its hook has seen."""
    at = found["iteration"]
    assert (found["epoch"] - 1, found["batch"]) == divmod(at - 1, length)
    seen = [json.loads(line) for line in (run_dir / "ledger").read_text().splitlines()]
    mine = {one["rank"]: one["samples"] for one in seen if one["iteration"] == at}
    assert [rank["samples"] for rank in found["ranks"]] == [mine[rank] for rank in sorted(mine)]
    records = {one["iteration"]: one for one in logged(run_dir / "metrics.jsonl") if one["mode"] == "train"}
    if every == 1:
        assert sum(rank["loss"] for rank in found["ranks"]) / len(found["ranks"]) == records[at]["loss"]
        if "grad_norm" in records[at]:
            assert found["grad_norm"] == records[at]["grad_norm"]
    if found["record"] is not None:
        of_run = records[found["record"]["iteration"]]
        assert found["record"]["train/loss"] == of_run["loss"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("replay") / "run")


@pytest.mark.parametrize("iteration", [8, 20])
def test_an_iteration_is_the_one_of_the_run(run: Path, iteration: int) -> None:
    """Inside a window, and the first one of an epoch, whose validation is missing in the checkpoint."""
    check(run, replayed(run, iteration))


def begins(run_dir: Path, *iterations: int) -> dict[int, str]:
    """Return where replays of iterations begin."""
    sources = {at: prepared(run_dir, at).source for at in iterations}
    return {at: source.partition(" (")[0].rpartition("/")[2] for at, source in sources.items()}


def test_it_begins_at_the_newest_undamaged_checkpoint_before(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert begins(run, 9, 10, 38) == {9: "from the beginning", 10: "iter_9.pth", 38: "iter_37.pth"}
    other = Path(shutil.copytree(run, tmp_path / "other"))
    (other / "checkpoints" / "iter_15.pth").unlink()
    with (other / "checkpoints" / "iter_22.pth").open("r+b") as file:
        file.seek(2000)
        file.write(b"damaged")
    assert begins(other, 23) == {23: "iter_9.pth"}
    assert "iter_22.pth is damaged" in caplog.text
    # `resume=…/iter_9.pth`: the later files are those of a part that is given up.
    (other / "checkpoints" / "last_checkpoint").write_text("iter_9.pth")
    assert begins(other, 38) == {38: "iter_9.pth"}


def test_a_difference_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    text = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(re.sub(r'("iteration": 24,.*"loss": )[\d.]+', r"\g<1>2.5", text))
    replay = prepared(other, 23)
    found = json.loads(replay.run(Distributed()))
    assert (replay.differs, found["record"]["iteration"]) == (True, 23)
    said = capsys.readouterr().err
    assert said.startswith("the records differ, first at iteration 24, mode train: train/loss: 2.5 -> "), said


# Many iterations, of many kinds of runs. ------------------------------------------------------------------------------

KINDS: dict[str, tuple[str, ...]] = {
    "deleted checkpoints": ("default_hooks.checkpoint.max_keep_ckpts=1", "default_hooks.logger.interval=4"),
    "epochs, best": ("default_hooks.checkpoint={by_epoch: true, interval: 1, save_best: loss}",),
    "two workers": ("data.loader.num_workers=2",),
    "fp16": ("precision=fp16", "precision.init_scale=1e30", "engine.accumulate=1"),
    "bf16": ("precision=bf16", "engine.accumulate=2", "default_hooks.grad_clip.max_norm=null"),
}


@pytest.mark.nightly  # 50 iterations: 20 s of a processor
@pytest.mark.parametrize("kind", KINDS)
def test_random_iterations_of_many_kinds(kind: str, tmp_path: Path) -> None:
    run_dir = train(tmp_path / "run", *KINDS[kind])
    for iteration in random.Random(kind).choices(range(1, 39), k=10):
        check(run_dir, replayed(run_dir, iteration), every=4 if kind == "deleted checkpoints" else 1)


@pytest.mark.slow
def test_a_resumed_run_is_replayed_with_the_options_of_each_part(tmp_path: Path) -> None:
    """Schedules have another length, and another momentum was typed."""
    run_dir = train(tmp_path / "run", "engine.max_epochs=1")
    train(run_dir, f"resume={run_dir}", "optimizer.head.momentum=0.5")
    for iteration in (12, 20, 38):
        check(run_dir, replayed(run_dir, iteration))
    (run_dir / "checkpoints" / "iter_38.pth").unlink()
    check(run_dir, replayed(run_dir, 38))


def replayed_on(distributed: Distributed, run_dir: Path, iterations: list[int]) -> list[dict[str, Any]]:
    train(run_dir, "data.loader.batch_size=3", distributed=distributed)
    distributed.barrier()
    trust()
    return [replayed(run_dir, iteration, ranks=distributed) for iteration in iterations]


@pytest.mark.parametrize("strategy", [slow("ddp"), nightly("fsdp2")])
def test_ranks(strategy: str, tmp_path: Path) -> None:
    """Batches of 6 samples; of the last of an epoch, with 4, each rank has 2."""
    for found in on_ranks(2, replayed_on, tmp_path / "run", [1, 8, 13, 20, 26], strategy=strategy)[0]:
        check(tmp_path / "run", found, length=13)
        assert len(found["ranks"]) == 2
    assert prepared(tmp_path / "run", 8).processes == 2


def test_custom_hooks_write_to_no_run_directory(tmp_path: Path) -> None:
    """The run was moved or copied since, or its hook has a path from the working directory of the training."""
    run_dir, folder, old = tmp_path / "moved", tmp_path / "folder", "/project/outputs/run"
    (run_dir / ".hydra").mkdir(parents=True)
    runtime = {"output_dir": old, "cwd": "/project"}
    OmegaConf.save({"hydra": {"runtime": runtime}}, run_dir / ".hydra" / "hydra.yaml")
    given = [f"{run_dir}/a", f"file://{old}/a", "outputs/run/a", "./outputs/run", f"{old}_2/a", "/outputs/run"]
    hooks = OmegaConf.create({"mine": {"paths": given}})
    _redirect(hooks, run_dir, folder)
    expected = [f"{folder}/a", f"file://{folder}/a", f"{folder}/a", f"{folder}", f"{old}_2/a", "/outputs/run"]
    assert hooks.mine.paths == expected
