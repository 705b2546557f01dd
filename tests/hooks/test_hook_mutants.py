"""The script that removes the hooks' methods tells tests that fail from tests that pass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "hook_mutants.py"

HOOK = '''
class Base:
    def before_train(self, engine):
        engine.append("base")


class Mine(Base):
    """A hook."""

    def after_train(self, engine):
        """Say so."""
        engine.append("mine")
'''
NOTICES = """
from hydraloop.hooks.mine import Mine


def test_both() -> None:
    engine = []
    hook = Mine()
    hook.before_train(engine)
    hook.after_train(engine)
    assert engine == ["base", "mine"]
"""
DOES_NOT = NOTICES.replace('assert engine == ["base", "mine"]', "assert engine is not None")


@pytest.fixture(scope="module")
def mutants() -> Iterator[Any]:
    """The script as a module."""
    yield load_script("hook_mutants")
    del sys.modules["hook_mutants"]


def repository(path: Path, tests: str) -> Path:
    """One with one hook and its tests."""
    for name, text in (
        ("hydraloop/hooks/mine.py", HOOK),
        ("hydraloop/__init__.py", ""),
        ("hydraloop/hooks/__init__.py", ""),
        ("tests/hooks/test_mine.py", tests),
        ("pyproject.toml", ""),
    ):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")
    return path


def target(mutants: Any) -> Any:
    return mutants.Target(
        "mine", "hydraloop.hooks.mine", "Mine", ("before_train", "after_train"), ("tests/hooks/test_mine.py",)
    )


def test_a_method_is_emptied_and_an_inherited_one_overridden(mutants: Any) -> None:
    space: dict[str, Any] = {}
    exec(mutated := mutants.mutated(HOOK, "Mine", ("before_train", "after_train")), space)
    engine: list[str] = []
    space["Mine"]().before_train(engine)
    space["Mine"]().after_train(engine)
    assert engine == []
    space["Base"]().before_train(engine)
    assert engine == ["base"], "a method of another class is unchanged"
    assert "before_train(self, *args" in mutated


@pytest.mark.slow
def test_tests_that_do_not_notice_let_it_survive(mutants: Any, tmp_path: Path) -> None:
    outcome = mutants.run(repository(tmp_path, DOES_NOT), target(mutants), ("after_train",))
    assert outcome.passed
    assert "**survives**" in mutants.row(outcome)


def test_every_hook_is_a_target_with_all_its_methods(mutants: Any) -> None:
    from hydraloop.hooks import CLASSES

    found = {one.option: one for one in mutants.targets([])}
    assert {one.cls for one in found.values()} == CLASSES.keys()
    assert {"state_dict", "load_state_dict", "after_train_iter"} <= set(found["ema"].methods)
    assert all(one.tests for one in found.values()), "each hook has tests"
    with pytest.raises(SystemExit, match="no such hook: nonsense"):
        mutants.targets(["nonsense"])


@pytest.mark.nightly
def test_no_mutant_of_any_hook_survives() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 survived" in done.stdout
