"""Arguments of a project's own classes are typed without a plus, as options of hydraloop are. No code of it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf

from hydraloop.commands.train import check_command
from hydraloop.config import arguments
from hydraloop.config.checks import Draft
from hydraloop.config.compose import opened
from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST, IN_MAIN
from hydraloop.sweeps.check_sweep import SweepDraft
from tests.e2e.projects import Project

OWN = '''
import nothing_of_this_name
from dataclasses import dataclass
from hydraloop import Hook
from other import Imported

class Mine(Hook):
    """Counts things.

    More about it.
    """
    def __init__(self, every: "int | None" = None, *, names: list[str], rate=0.5) -> None: ...

@dataclass(frozen=True)
class Fields:
    """Has fields."""
    depth: int
    width: int = 3

class Anything:
    def __init__(self, **options): ...

class Inherits(Mine): ...

def made(size, seed=0): ...
'''
Checked = Callable[..., Draft]


@pytest.fixture
def check(tmp_path: Path) -> Iterator[Checked]:
    """Returns what the command lines of a project with own classes train."""
    project = Project.make(tmp_path / "project")
    project.write("own.py", OWN)
    project.write("conf/hooks/mine.yaml", "# @package hooks.mine\n_target_: own.Mine\nrate: 2\n")
    for name in ("Fields", "Anything", "Inherits", "Imported", "made"):
        project.write(f"conf/hooks/{name}.yaml", f"# @package hooks.{name}\n_target_: own.{name}\n")
    project.write("conf/data/mine.yaml", "# @package data\ntrain: {_target_: own.made}\nval: null\n")
    project.write("conf/model/mine.yaml", "# @package task.model\n_target_: own.Fields\n")

    with ALLOWLIST.trusting(project.path, [], IN_MAIN), opened(project.path / "conf", "config") as composer:
        yield lambda *words: check_command(arguments.read(words), composer)


def values(cfg: DictConfig, *keys: str) -> list[object]:
    return [OmegaConf.select(cfg, key) for key in keys]


def test_arguments_that_the_file_lacks_are_typed_without_a_plus(check: Checked) -> None:
    """All of them at once, beside an option of the file and one of hydraloop."""
    cfg = check(
        "hooks=[mine]",
        "model=mine",
        "data=mine",
        *("hooks.mine.every=3", "hooks.mine.rate=4", "hooks.mine.priority=HIGH", "hooks.mine.on_error=warn"),
        *("task.model.depth=5", "data.train.size=6", "engine.max_epochs=7"),
    ).cfg
    assert values(cfg.hooks.mine, "every", "rate", "priority", "on_error") == [3, 4, "HIGH", "warn"]
    assert values(cfg, "task.model.depth", "data.train.size", "engine.max_epochs") == [5, 6, 7]


def test_an_own_class_that_is_typed_has_its_arguments_in_any_order(check: Checked) -> None:
    cfg = check("hooks.own.priority=30", "hooks.own.names=[a]", "+hooks.own._target_=own.Mine").cfg
    assert values(cfg.hooks.own, "priority", "names") == [30, ["a"]]


def test_the_jobs_of_a_sweep_have_such_arguments_as_values_and_as_constants(check: Checked) -> None:
    draft = check("-m", "hooks=[mine]", "hooks.mine.priority=10,20", "hooks.mine.names=[a]", "hooks.mine.every=1,2")
    assert isinstance(draft, SweepDraft)
    cfgs = [draft.grid.compose(lines) for lines in draft.jobs.listed]
    found = [values(cfg.hooks.mine, "priority", "every", "names") for cfg in cfgs]
    assert found == [[10, 1, ["a"]], [10, 2, ["a"]], [20, 1, ["a"]], [20, 2, ["a"]]]


def test_every_name_passes_if_the_source_does_not_say_the_arguments(check: Checked) -> None:
    for name in ("Anything", "Inherits", "Imported"):
        assert values(check(f"hooks=[{name}]", f"hooks.{name}.some=1").cfg.hooks[name], "some") == [1]


@pytest.mark.parametrize("command", [["seed=1"], ["hooks=[mine]", "hooks.mine.rate=3"]])
def test_commands_without_such_arguments_compose_once(
    command: list[str], check: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    compose = hydra.compose
    monkeypatch.setattr(hydra, "compose", lambda *args, **named: calls.append(args) or compose(*args, **named))
    check(*command)
    assert len(calls) == 1
    check("hooks=[mine]", "hooks.mine.every=1", "hooks.mine.priority=2")
    assert len(calls) == 3


NEAR = {
    # words: the nearest argument
    "hooks=[mine] hooks.mine.nmes=[a]": "Did you mean hooks.mine.names?",
    "hooks=[mine] hooks.mine.priorty=HIGH": "Did you mean hooks.mine.priority?",
    "-m model=mine task.model.widht=1,2": "Did you mean task.model.width?",
    "data=mine data.train.seeed=1": "Did you mean data.train.seed?",
    f"+hooks.x._target_={'a' * 300}.B hooks.x.every=1": "--help hooks.x lists the options.",
    "hooks=[mine] hooks.mine.unlike=1": "--help hooks.mine lists the options.$",
}


def test_another_name_is_one_message_with_the_nearest_argument(check: Checked) -> None:
    for line, near in NEAR.items():
        words = line.split()
        key = words[-1].partition("=")[0]
        with pytest.raises(UserError, match=f"^{key}: there is no such key.*\n  {near}"):
            check(*words)
