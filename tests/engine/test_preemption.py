"""A run that is preempted saves and ends; the resumed run equals one that was never stopped."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hydraloop.data import build_loader
from hydraloop.engine import background_flag
from hydraloop.engine.distributed.comm import Distributed, Pending
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.hook_order import CallTable
from hydraloop.engine.progress import Progress
from hydraloop.engine.requests import Requests
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import Terminated
from hydraloop.hooks import CheckpointHook, EMAHook, TestTimeAugmentationHook
from hydraloop.tasks import Regression
from tests.engine.distributed.test_equality import dataset, network
from tests.helpers import Recorder, at, batches, differences, make_engine
from tests.ranks import on_ranks


def sends(point: str, iteration: int, *numbers: int, seconds: float = 0.0) -> Hook:
    """Make a hook that sends signals to this process at a mount point, in one iteration."""
    unsent = list(numbers)

    def send(engine: Engine) -> None:
        while unsent and engine.progress.iteration == iteration:
            os.kill(os.getpid(), unsent.pop(0))
            time.sleep(seconds)

    return at(point, send, nth=0)


@pytest.fixture
def handle() -> Iterator[Callable[[int, Callable[[int, FrameType | None], Any]], None]]:
    """Return a function that sets a signal handler until the end of the test."""
    before: dict[int, Any] = {}

    def install(number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        before[number] = signal.signal(number, handler)

    yield install
    for number, handler in before.items():
        signal.signal(number, handler)


def made(run_dir: Path, *own: Hook, **settings: Any) -> Engine:
    """Three epochs of seven iterations with EMA, validation and test."""
    run_dir.mkdir(exist_ok=True)
    hooks: dict[str, Hook] = {"ema": EMAHook(), "checkpoint": CheckpointHook(interval=1)}
    hooks |= {f"own {number}": hook for number, hook in enumerate(own)}
    train, val, test = batches(7), batches(3, seed=1), batches(2, seed=2)
    return make_engine(run_dir, hooks, train=train, val=val, test=test, **{"max_epochs": 3, **settings})


def saved(run_dir: Path) -> Path:
    folder = run_dir / "checkpoints"
    return folder / (folder / "last_checkpoint").read_text().strip()


def result(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return found


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("point", "iteration", "ends_at"),
    [("before_train_iter", 8, {1: 9, 3: 10}), ("before_val_iter", 14, {}), ("before_test_iter", 21, {})],
)
def test_a_preempted_run_equals_one_that_was_not(
    tmp_path: Path, point: str, iteration: int, ends_at: dict[int, int], accumulate: int
) -> None:
    whole = made(tmp_path / "whole", accumulate=accumulate)
    whole.train()
    first = made(tmp_path / "parts", sends(point, iteration, signal.SIGTERM), accumulate=accumulate)
    found = first.train()
    assert (found.status, found.reason, found.error) == ("interrupted", "preempted by SIGTERM", None)
    assert found.progress["iteration"] == ends_at.get(accumulate, iteration)
    assert found.test_metrics == {}
    second = made(tmp_path / "parts", accumulate=accumulate, resume=saved(tmp_path / "parts"))
    assert second.train().status == "finished"
    assert second.requests.preempted_by is None
    assert list(differences(second.model.state_dict(), whole.model.state_dict())) == []
    assert list(differences(second.hooks["ema"].state_dict(), whole.hooks["ema"].state_dict())) == []
    assert (second.metrics, second.evaluator.test_metrics) == (whole.metrics, whole.evaluator.test_metrics)


def test_nothing_is_validated_or_tested_after_it(tmp_path: Path) -> None:
    recorder = Recorder()
    engine = made(tmp_path, sends("before_train_iter", 5, signal.SIGUSR1), recorder)
    engine.train()
    assert not [point for point in recorder.trace if "_val" in point or "_test" in point]
    assert recorder.trace[-1] == "after_run"
    assert engine.checkpoints.last_checkpoint == tmp_path / "checkpoints/iter_6.pth"
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert engine.train().status == "finished", "it can be used again"


def test_a_python_handler_is_called_once_the_run_has_saved(tmp_path: Path, handle: Callable[..., None]) -> None:
    seen: list[tuple[int, str]] = []
    handle(signal.SIGUSR2, lambda number, frame: seen.append((number, result(tmp_path)["status"])))
    engine = made(tmp_path, sends("before_train_iter", 5, signal.SIGUSR2, signal.SIGTERM))
    assert engine.train().reason == "preempted by SIGUSR2"
    assert seen == [(signal.SIGUSR2, "interrupted")]


def test_ctrl_c_saves_before_it_is_raised(tmp_path: Path) -> None:
    engine = made(tmp_path, sends("before_train_iter", 5, signal.SIGINT, signal.SIGINT))  # the second is a copy
    with pytest.raises(KeyboardInterrupt):
        engine.train()
    assert saved(tmp_path).name == "iter_6.pth"
    assert (result(tmp_path)["status"], result(tmp_path)["reason"]) == ("interrupted", "interrupted by Ctrl-C")


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    engine = made(tmp_path, sends("before_train_iter", 5, signal.SIGTERM, signal.SIGINT, seconds=0.6))
    with pytest.raises(KeyboardInterrupt):
        engine.train()
    assert not (tmp_path / "checkpoints/iter_6.pth").exists()
    assert result(tmp_path)["error"] == "interrupted by Ctrl-C (SIGINT)"


def test_a_signal_in_the_last_batch_of_the_test_leaves_it(tmp_path: Path) -> None:
    engine = made(tmp_path, sends("before_test_iter", 21, signal.SIGTERM), limit_test_batches=1)
    found = engine.train()
    assert (found.status, found.test_metrics) == ("interrupted", {})


def test_a_signal_before_tta_tries_a_step_does_not_fail(tmp_path: Path) -> None:
    class Early(Hook):
        def at_position(self, engine: Engine) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    hooks = {"early": Early(), "tta": TestTimeAugmentationHook(transforms=["identity"])}
    found = make_engine(tmp_path, hooks, test=batches(2)).train()
    assert (found.status, found.reason, found.progress["iteration"]) == ("interrupted", "preempted by SIGTERM", 0)


def test_a_signal_after_the_test_does_not_preempt(tmp_path: Path) -> None:
    assert made(tmp_path, sends("after_test", 21, signal.SIGTERM)).train().status == "finished"


def test_a_signal_at_the_end_goes_to_the_earlier_handler(tmp_path: Path, handle: Callable[..., None]) -> None:
    seen: list[int] = []
    handle(signal.SIGTERM, lambda number, frame: seen.append(number))
    assert made(tmp_path, sends("after_run", 21, signal.SIGTERM)).train().status == "finished"
    assert seen == [signal.SIGTERM]


class AnotherFails(Distributed):
    """Another rank fails at the end of the run, where no rank waits for the others."""

    def first_failure(self) -> tuple[int, str] | None:
        return 1, "ValueError: a closing hook"


def test_a_preempted_rank_says_that_another_one_has_failed(tmp_path: Path) -> None:
    made(tmp_path, sends("before_train_iter", 1, signal.SIGTERM), distributed=AnotherFails()).train()
    assert [result(tmp_path)[key] for key in ("status", "reason", "error")] == [
        "failed", None, "rank 1: ValueError: a closing hook",
    ]  # fmt: skip


def test_ignored_signals_stay_ignored(tmp_path: Path, handle: Callable[..., None]) -> None:
    handle(signal.SIGUSR1, signal.SIG_IGN)
    assert made(tmp_path, sends("before_train_iter", 5, signal.SIGUSR1)).train().status == "finished"


def test_a_forked_process_is_ended_by_a_signal(tmp_path: Path) -> None:
    codes: list[int] = []

    class Forks(Hook):
        def before_train_epoch(self, engine: Engine) -> None:
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            time.sleep(0.05)
            os.kill(child, signal.SIGUSR1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert make_engine(tmp_path, {"forks": Forks()}).train().status == "finished"
    assert codes == [-signal.SIGUSR1]


def test_without_a_checkpoint_hook_a_signal_ends_the_run_and_the_log_says_that_its_end_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(tmp_path, {"sends": sends("before_train_iter", 1, signal.SIGTERM)})
    with pytest.raises(Terminated):
        engine.train()
    assert [result(tmp_path)[key] for key in ("status", "error")] == ["interrupted", "interrupted by SIGTERM"]
    assert "the run has no checkpoint hook: the end of training is lost" in caplog.text


@pytest.mark.parametrize(("point", "iteration", "lost"), [("before_train_iter", 8, "iter_9"),
                                                          ("before_test_iter", 21, "epoch_3")])  # fmt: skip
def test_a_run_is_not_preempted_if_its_end_cannot_be_written(
    tmp_path: Path, point: str, iteration: int, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = made(tmp_path, sends(point, iteration, signal.SIGINT))
    (tmp_path / "checkpoints" / f"{lost}.pth" / "in the way").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        engine.train()
    assert [result(tmp_path)[key] for key in ("error", "reason")] == ["interrupted by Ctrl-C (SIGINT)", None]
    assert f"{lost}.pth could not be written: the end of training is lost" in caplog.text


# Several ranks. ------------------------------------------------------------------------------------------------------


def _preempted_on(distributed: Distributed, run_dir: str, rank: int) -> dict[str, Any]:
    """Train an epoch of 4 global batches and validate 24 of them; one rank asks before the third batch of these."""
    task = Regression(network(), torch.nn.MSELoss())
    part = {"rank": distributed.rank, "world_size": distributed.world_size, "batch_size": 2}
    seen: list[int] = []

    class Asks(Hook):
        def before_val_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
            seen.append(batch_idx)
            if batch_idx == 2 and distributed.rank == rank:
                engine.requests.preempt("a test")

    engine = make_engine(
        Path(run_dir),
        {"asks": Asks(), "checkpoint": CheckpointHook(interval=1)},
        train=build_loader(dataset(16), shuffle=True, **part),
        val=build_loader(dataset(96), shuffle=False, **part),
        task=task,
        distributed=distributed,
        max_epochs=2,
    )
    result = engine.train()
    at = engine.progress
    return {"result": (result.status, result.reason), "at": (at.iteration, at.last_validation), "batches": len(seen)}


def test_ranks_leave_a_validation_together(tmp_path: Path) -> None:
    one, other = on_ranks(2, _preempted_on, str(tmp_path), 1)
    assert one == other
    assert one["result"] == ("interrupted", "preempted by a test")
    assert one["at"] == (4, 0)
    assert 3 <= one["batches"] < 24


def _tested_on(distributed: Distributed, run_dir: str, case: dict[str, Any]) -> dict[str, Any]:
    """Train an epoch, and test 12 global batches; one rank gets SIGTERM. Then resume."""
    part = {"rank": distributed.rank, "world_size": distributed.world_size, "batch_size": 2}

    class Stops(Hook):
        def after_train_epoch(self, engine: Engine) -> None:
            engine.request_stop("a test", agreed=True)

    class Signals(Hook):
        def before_test_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
            time.sleep(0.01)
            if batch_idx == case["batch"] and distributed.rank == case["rank"]:
                os.kill(os.getpid(), signal.SIGTERM)

    def run(resume: Path | None, hooks: dict[str, Hook]) -> tuple[str, str | None, int]:
        task = Regression(network(), torch.nn.MSELoss())
        test: Any = build_loader(dataset(48), shuffle=False, **part)
        engine = make_engine(
            Path(run_dir),
            {"checkpoint": CheckpointHook(interval=1), **hooks},
            train=build_loader(dataset(64), shuffle=True, **part),
            test=list(test) if case["is_custom"] else test,
            task=task,
            distributed=distributed,
            max_epochs=1 + case["stops"],
            resume=resume,
        )
        result = engine.train()
        return result.status, result.reason, len(result.test_metrics)

    hooks: dict[str, Hook] = {"stops": Stops()} if case["stops"] else {}
    first = run(None, {"signals": Signals(), **hooks})
    return {"first": first, "second": run(saved(Path(run_dir)), hooks)}


@pytest.mark.parametrize(
    ("rank", "batch", "is_custom", "stops"),
    [
        (0, 3, False, False),
        (1, 11, False, False),
        (1, 3, False, True),
        (0, 11, True, False),
        (1, 3, True, False),
    ],
)
def test_a_signal_to_one_rank_leaves_a_test(
    rank: int, batch: int, is_custom: bool, stops: bool, tmp_path: Path
) -> None:
    case = {"rank": rank, "batch": batch, "is_custom": is_custom, "stops": stops}
    one, other = on_ranks(2, _tested_on, str(tmp_path), case)
    assert one == other
    assert one["first"] == ("interrupted", "preempted by SIGTERM", 0)
    assert one["second"] == ("finished", None, 1)


@pytest.mark.parametrize(("seconds", "interval"), [(0.01, 10), (2.0, 2), (60.0, 1)])
def test_ranks_exchange_at_least_every_5_seconds(
    monkeypatch: pytest.MonkeyPatch, seconds: float, interval: int
) -> None:
    class Two(Distributed):
        world_size = 2

        def start_max(self, values: torch.Tensor) -> Pending:
            exchanged.append(progress.iteration)
            return Pending()

    now = 0.0
    monkeypatch.setattr(background_flag, "perf_counter", lambda: now)
    exchanged: list[int] = []
    progress, nothing_is_saved = Progress(), cast("Any", None)
    run: Any = SimpleNamespace(settings=Settings(), ranks=Two(), calls=CallTable(None, {}), progress=progress)
    requests = Requests(run, lambda: nothing_is_saved)
    for iteration in range(1, 60):
        now += seconds
        progress.complete_iteration(iteration - 1, 1, stepped=True)
        requests.save_or_stop_if_agreed()
    assert exchanged[:2] == [1, 2], "until the time of an iteration is known"
    assert {later - earlier for earlier, later in itertools.pairwise(exchanged[3:])} == {interval}
