"""How a rank fails, and which failure is the cause of the others."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hydraloop.errors import Terminated, UserError
from hydraloop.files.result import describe
from hydraloop.files.secrets import remember
from hydraloop.launch.failure import Failure, Kind, RankError, cause

GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


def raised(error: BaseException) -> BaseException:
    """Return the error with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), "error"),
        (UserError("x"), "mistake"),
        (RuntimeError(GLOO), "lost"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
        (dist.DistNetworkError("x"), "lost"),
        (KeyboardInterrupt(), "signal"),
        (Terminated(signal.SIGTERM), "signal"),
        (SystemExit(3), "error"),
    ],
)
def test_kinds(error: BaseException, kind: Kind) -> None:
    assert Failure.of(error, 1).kind == kind
    assert Failure.of(error, 1, first=(1, "this rank")).kind == kind
    after_another = Failure.of(error, 1, first=(0, "ValueError: x")).kind
    assert after_another == ("signal" if type(error) is KeyboardInterrupt else "follows")


def test_an_error_after_a_lost_connection_counts_as_lost() -> None:
    error = ValueError("the hook could not close")
    error.__context__ = RuntimeError(GLOO)
    assert Failure.of(error, 0).kind == "lost"


@pytest.mark.parametrize("error", [ValueError("no hunter2-known"), UserError("x", remedy="Write hunter2-known.")])
def test_what_other_ranks_can_read_has_no_secret(error: Exception) -> None:
    remember({"api_key": "hunter2-known"})
    assert "hunter2" not in Failure.of(raised(error), 1).to_json()


def test_the_error_of_a_rank_keeps_its_traceback() -> None:
    outcome = Failure.from_json(Failure.of(raised(ValueError("x")), 1, trained=True).to_json())
    error = outcome.error()
    assert isinstance(error, RankError)
    assert str(error) == "rank 1: ValueError: x"
    assert "in raised" in error.trace
    assert outcome.trained


def test_a_rank_that_failed_later_reports_the_first_error() -> None:
    assert str(Failure.of(RuntimeError(GLOO), 0, first=(1, "ValueError: x")).error()) == "rank 1: ValueError: x"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Terminated(signal.SIGHUP)])
def test_a_rank_that_has_lost_an_interrupted_one_is_interrupted_too(error: KeyboardInterrupt) -> None:
    found = Failure.of(RuntimeError(GLOO), 0, first=(1, describe(error))).error()
    assert (type(found), str(found)) == (type(error), str(error))


def test_ranks_that_left_no_error() -> None:
    log = Path("a.log")
    assert str(Failure.of_exit(1, -9, log).error()) == "rank 1 was killed by SIGKILL (out of memory?)"
    assert str(Failure.of_exit(1, -6, log).error()) == "rank 1 crashed (SIGABRT), see a.log"
    assert str(Failure.of_exit(1, 3, log).error()) == "rank 1 ended with exit code 3 and left no error, see a.log"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        assert Failure.of_exit(1, -number, log).kind == "signal"
    errors = [Failure.of_exit(1, code, log).error() for code in (-9, -6, 3)]
    assert [getattr(error, "was_killed", None) for error in errors] == [True, False, False]


def test_torch_reads_a_failure_as_its_error_file(tmp_path: Path) -> None:
    failure = Failure.of(raised(ValueError("x")), 1, trained=True)
    failure.write(tmp_path / "error.json")
    found = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert (found.message, found.timestamp) == ("rank 1: ValueError: x", int(failure.timestamp))
    assert Failure(**found.error_file_data) == failure
    failure.write(tmp_path / "removed" / "error.json")  # the launching process has ended
    assert json.loads((tmp_path / "error.json").read_text())["trained"]


def test_another_signal_than_the_launcher_s_is_the_cause() -> None:
    lost, ended = Failure.of(RuntimeError(GLOO), 0), Failure.of(Terminated(signal.SIGTERM), 2)
    assert cause([lost, ended, Failure.of_exit(1, -signal.SIGHUP, Path("a.log"))]).number == signal.SIGHUP


@pytest.mark.parametrize(
    "kinds",
    [
        {"lost": 1, "error": 2},
        {"lost": 1, "killed": 2},
        {"signal": 1, "lost": 2},
        {"follows": 1, "signal": 2},
        {"mistake": 2, "error": 1},
        {"error": 2, "mistake": 1},
    ],
)
def test_the_cause_is_what_explains_best_then_what_was_first(kinds: dict[Kind, float]) -> None:
    found = cause(Failure(kind, "", time) for kind, time in kinds.items())
    assert found.kind == list(kinds)[1]
