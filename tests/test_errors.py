from __future__ import annotations

import pickle

import pytest

from hydraloop.errors import UserError, close_names, meant, suggestion


def test_the_message_has_key_problem_and_remedy() -> None:
    error = UserError("1.5 is not a number of workers", key="data.loader.num_workers", remedy="Use 0 for none.")
    assert str(error) == "data.loader.num_workers: 1.5 is not a number of workers\n  Use 0 for none."
    assert str(UserError("it does not compose")) == "it does not compose"


def test_a_message_with_text_of_a_file_does_not_control_the_terminal() -> None:
    error = UserError("no \x1b[1mentry\x1b[0m \x1b]0;a\x07", key="a\x9bb", remedy="Use `a\u202eb`.\n\tOr ü…")
    assert str(error) == "a\\x9bb: no entry \\x1b]0;a\\x07\n  Use `a\\u202eb`.\n\tOr ü…"


def test_it_survives_being_sent_between_processes() -> None:
    error = UserError("a", key="b", remedy="c")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(again), again.problem, again.key, again.remedy) == (UserError, "a", "b", "c")
    assert str(again) == str(error)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("emaa", ["ema", "profiler"], ["ema"]),
        ("EMA", ["ema", "profiler"], ["ema"]),
        ("hihg", ["HIGH", "LOW"], ["HIGH"]),
        ("xyz", ["ema", "profiler"], []),
        ("ema", [], []),
    ],
)
def test_close_names(name: str, known: list[str], expected: list[str]) -> None:
    assert close_names(name, known) == expected


def test_close_names_are_best_first_and_limited() -> None:
    known = ["momentum", "momentums", "moment", "momenta"]
    assert close_names("momentum", known, most=2) == ["momentum", "momentums"]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("lr", ["optimizer.lr"]),
        ("optimizr.lr", ["optimizer.lr"]),
        ("epochs", ["engine.max_epochs"]),
        ("workers", ["data.loader.num_workers"]),
        ("name", ["experiment_name"]),
        ("train.batch_sise", ["data.loader.batch_size"]),
        ("hoks", ["hooks"]),
        ("hook.ema.priority", ["hooks.ema.priority"]),
        ("sed", ["seed"]),
        ("priority", []),
        ("val_every", []),
        ("cuda", []),
        ("task.workers", ["data.loader.num_workers"]),
    ],
)
def test_the_key_that_is_meant(key: str, expected: list[str]) -> None:
    hooks = [f"hooks.{name}.priority" for name in ("ema", "tta", "freeze", "logger")]
    data = ["data", "data.loader.num_workers", "data.loader.batch_size"]
    data += ["seed", *(f"data.{name}.seed" for name in ("train", "val", "test"))]
    other = ["optimizer.lr", "optimizer.every", "engine.max_epochs", "sweep.max_workers", "experiment_name", "hooks"]
    assert meant(key, [*hooks, *data, *other]) == expected


def test_suggestions() -> None:
    assert suggestion("emaa", ["ema", "profiler"]) == "Did you mean ema?"
    assert suggestion("xyz", ["profiler", "ema"]) == "Known: ema, profiler."
    assert suggestion("xyz", []) == "No name is known."
    assert suggestion("aab", iter(["aaa", "aac"])) == "Did you mean aac or aaa?"
