"""How ranks end, and which of them is to blame."""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist

from hydraloop import UserError
from hydraloop.launch.outcome import Kind, Outcome, RankError, Terminated, cause

GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


def raised(error: BaseException) -> BaseException:
    """The error, with a traceback."""
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
    assert Outcome.of(error, 1).kind == kind
    assert Outcome.of(error, 1, first=(1, "it was this one")).kind == kind
    told = Outcome.of(error, 1, first=(0, "ValueError: x")).kind
    assert told == (
        "signal"
        if isinstance(error, KeyboardInterrupt) and kind == "signal" and not isinstance(error, Terminated)
        else "consequence"
    )


def test_what_a_loss_led_to_is_a_loss() -> None:
    error = ValueError("the hook could not close")
    error.__context__ = RuntimeError(GLOO)
    assert Outcome.of(error, 0).kind == "lost"


def test_the_error_of_a_rank_keeps_its_traceback() -> None:
    outcome = Outcome.from_json(Outcome.of(raised(ValueError("x")), 1, trained=True).to_json())
    error = outcome.error()
    assert isinstance(error, RankError)
    assert str(error) == "rank 1: ValueError: x"
    assert "in raised" in error.trace
    assert outcome.trained


def test_a_mistake_is_the_same_mistake_again() -> None:
    error = Outcome.from_json(Outcome.of(UserError("p", key="k", remedy="r"), 1).to_json()).error()
    assert isinstance(error, UserError)
    assert (error.problem, error.key, error.remedy) == ("p", "k", "r")


def test_a_consequence_gives_the_other_ranks_error() -> None:
    assert str(Outcome.of(RuntimeError(GLOO), 0, first=(1, "ValueError: x")).error()) == "rank 1: ValueError: x"


def test_deaths() -> None:
    assert str(Outcome.of_death(1, -9, "rank1.log").error()) == "rank 1 was killed by SIGKILL (out of memory?)"
    assert str(Outcome.of_death(1, -6, "rank1.log").error()) == "rank 1 was killed by SIGABRT, see rank1.log"
    assert str(Outcome.of_death(1, 3, "a.log").error()) == "rank 1 ended with exit code 3 and left no error, see a.log"
    assert Outcome.of_death(1, -15, "").kind == "signal"


def test_done_is_no_error() -> None:
    assert Outcome(0, "done", value=0.5).error() is None
    assert cause([Outcome(0, "done"), Outcome(1, "done")]) is None


@pytest.mark.parametrize(
    "outcomes",
    [
        [Outcome(0, "lost", time=1), Outcome(1, "error", time=2)],
        [Outcome(0, "lost", time=1), Outcome(1, "died", time=2)],
        [Outcome(0, "signal", time=1), Outcome(1, "lost", time=2)],
        [Outcome(0, "consequence", time=1), Outcome(1, "signal", time=2)],
        [Outcome(0, "mistake", time=2), Outcome(1, "error", time=1)],
        [Outcome(0, "error", time=2), Outcome(1, "mistake", time=1)],
        [Outcome(0, "done"), Outcome(1, "lost", time=2)],
    ],
)
def test_the_cause_is_what_explains_best_then_what_was_first(outcomes: list[Outcome]) -> None:
    found = cause(outcomes)
    assert found is not None
    assert found.rank == 1
