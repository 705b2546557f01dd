"""What differs between two configs, and what a resumed run prints about it."""

from __future__ import annotations

from typing import Any

from hydraloop.files.changes import Change, differences, resumed

GIT = {"commit": "61afeaf0" * 5, "dirty": False}


def meta(config: str = "", git: dict[str, Any] | None = None, torch: str = "2.13.0") -> dict[str, Any]:
    return {"config": config, "git": git or {}, "versions": {"python": "3.11.2", "torch": torch}}


def test_differences_name_leaves_and_whole_nodes_that_one_side_has() -> None:
    old = {"a": {"b": 1, "c": True}, "hooks": {}, "gone": {"x": 1}, "same": [1, 2]}
    new = {"a": {"b": 2, "c": 1}, "hooks": {"ema": {"momentum": 0.1}}, "same": [1, 2]}
    assert [str(change) for change in differences(old, new)] == [
        "a.b: 1 -> 2",
        "a.c: true -> 1",
        'hooks.ema: (absent) -> {"momentum": 0.1}',
        'gone: {"x": 1} -> (absent)',
    ]
    assert list(differences({"a": None}, {"a": None})) == []
    assert str(Change("a", "x" * 100, None)) == f"a: {'x' * 79}… -> null"


def test_a_resumed_run_lists_what_takes_effect_and_why_the_rest_does_not() -> None:
    old = "{seed: 0, resume: null, data: {n: 1}, init: {prefix: null}, optimizer: {lr: 0.1, fused: auto}}"
    new = "{seed: 1, resume: auto, data: {n: 2}, init: {prefix: a.}, optimizer: {lr: 0.2, fused: false}}"
    assert resumed(meta(old), meta(new)) == [
        "seed: 0 -> 1; affects only the order and the draws of later samples: other random numbers continue from the "
        "checkpoint",
        "data.n: 1 -> 2",
        "init.prefix: null -> a.; no effect: the run continues with the weights of the checkpoint",
        "optimizer.lr: 0.1 -> 0.2; takes effect only if it is typed on the command line",
        "optimizer.fused: auto -> false",
    ]
    assert resumed(meta(old), meta(new), {"lr"})[3] == "optimizer.lr: 0.1 -> 0.2"
    assert resumed(meta(old), meta(old)) == []


def test_what_a_checkpoint_contains_does_not_control_the_terminal() -> None:
    assert resumed(meta('{name: "\\e]0;a\\a"}'), meta("{name: b}")) == ["name: \\x1b]0;a\\x07 -> b"]


def test_another_version_of_the_code_or_of_a_package_is_named() -> None:
    later = {"commit": "2b3c4d5e" * 5, "dirty": False}
    edited, edited_again = ({**GIT, "dirty": True, "patch": patch} for patch in ("0a", "0b"))
    assert resumed(meta(git=GIT, torch="2.12.0"), meta(git=later)) == [
        "code: commit 61afeaf061 -> 2b3c4d5e2b; see `git diff 61afeaf061 2b3c4d5e2b`",
        "torch: 2.12.0 -> 2.13.0",
    ]
    assert resumed(meta(git=GIT), meta(git=edited)) == [
        "code: no uncommitted changes -> uncommitted changes 0a, since commit 61afeaf061"
    ]
    assert len(resumed(meta(git=edited), meta(git=edited_again))) == 1
    assert resumed(meta(git=edited), meta(git=edited)) == []
    assert resumed(meta(), meta(git=GIT)) == resumed({}, meta(git=GIT)) == [], "an older checkpoint does not say"
