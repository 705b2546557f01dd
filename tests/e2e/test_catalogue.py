"""Every row of the catalogue: its tests exist and its commands run. No option is left out. All hooks run together."""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import pairwise

import pytest
from hydra.core.config_store import ConfigStore

import hydraloop
from hydraloop.hooks import CLASSES
from hydraloop.schemas import stored
from tests.e2e.catalogue import TABLES, Command, markdown
from tests.e2e.projects import REPOSITORY, Done, Project, Run

ROWS = [row for rows in TABLES.values() for row in rows]
COMMANDS = list(dict.fromkeys(command for row in ROWS for command in row.commands))
TESTS = sorted({test for row in ROWS for test in row.tests})


def options(group: str) -> list[str]:
    """The built-in options of a group."""
    assert hydraloop.Hook  # importing hydraloop fills the store
    return sorted(name.removesuffix(".yaml") for name in ConfigStore.instance().list(group))


@cache
def functions(file: str) -> frozenset[str]:
    """The test functions of a file; methods with their class: `TestSome::test_that`."""
    tree = ast.parse((REPOSITORY / "tests" / file).read_text(encoding="utf-8"))
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        found |= {f"{cls.name}::{node.name}" for node in cls.body if isinstance(node, ast.FunctionDef)}
    return frozenset(found)


def test_every_row_has_a_command_and_tests_that_exist() -> None:
    assert [row.system for row in ROWS if not row.commands or not row.tests] == []
    assert [test for test in TESTS if not _exists(*test.split("::", 1))] == []


def _exists(file: str, function: str) -> bool:
    return function.rpartition("::")[2].startswith("test_") and function in functions(file)


@pytest.mark.parametrize("group", ["hooks", "default_hooks", "scheduler"])
def test_every_built_in_option_is_here(group: str) -> None:
    here = " ".join(f"{row.option} {' '.join(command.line for command in row.commands)}" for row in ROWS)
    assert [name for name in options(group) if not re.search(rf"\b{name}\b", here)] == []


def test_the_page_about_migrating_has_every_name_of_the_documents() -> None:
    migration = (REPOSITORY / "docs" / "how-to" / "migrating.md").read_text(encoding="utf-8")
    names = {name for row in ROWS for name in re.findall(r"\w+(?:Hook|Logger)\b", f"{row.source} {row.system}")}
    assert len(names) > 40
    assert sorted(name for name in names if f"`{name}" not in migration) == []


def test_the_table_has_a_line_for_each_row() -> None:
    assert len(re.findall(r"^\| (?!from )", markdown(), re.M)) == len(ROWS)


# The commands. -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[Command, tuple[Done, Run]]:
    """All commands, one after the other in one folder; each with its run."""
    project = Project.make(tmp_path_factory.mktemp("catalogue") / "project")
    runs = [_run_dir(command) or f"runs/{number}" for number, command in enumerate(COMMANDS)]
    lines = [
        [*command.line.split(), *([] if _run_dir(command) else [f"hydra.run.dir={run}"])]
        for command, run in zip(COMMANDS, runs, strict=True)
    ]
    came = zip(project.many(lines), [Run(project.path / run) for run in runs], strict=True)
    return dict(zip(COMMANDS, came, strict=True))


def _run_dir(command: Command) -> str | None:
    found = re.search(r"hydra\.run\.dir=(\S+)", command.line)
    return found[1] if found else None


@pytest.mark.slow  # a minute: fifty runs
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.line)
def test_the_command_runs_on_the_digits(command: Command, done: dict[Command, tuple[Done, Run]]) -> None:
    came, run = done[command]
    if command.refused is not None:
        assert came.code in (1, 2), came.text
        assert command.refused in came.err
        return
    assert came.code == 0, came.text
    if "--dry-run" not in command.line:
        assert run.result["status"] == ("stopped" if "early_stopping" in command.line else "finished")
        assert "failed at" not in run.log, "a hook that warns would hide its error"


# All at once. --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_hooks_at_once_train_the_digits_in_the_order_they_ask_for(project: Project) -> None:
    hooks = [name for name in options("hooks") if name != "npu_profiler"]  # which needs torch_npu
    augmented = ["data=digits_augmented"] if "digits_augmented" in options("data") else []
    required = ["hooks.freeze.modules=[features]", "hooks.freeze.epochs=1"]
    done = project.train(
        f"hooks=[{','.join(hooks)}]", *augmented, *required, "engine.max_epochs=2", "engine.verbose=true"
    )
    assert done.code == 0, done.text
    assert project.run.result["status"] == "finished"
    assert list(project.run.config.hooks) == hooks
    assert "failed at" not in done.text, "a hook that warns would hide its error"
    lines = re.findall(r"^  ((?:before|after|on)_\w+) +(\w+ \(\d+\).*)$", done.out, re.M)
    order = {point: re.findall(r"(\w+) \((\d+)\)", printed) for point, printed in lines}
    assert len(order) > 20
    assert {name for called in order.values() for name, _ in called} >= set(hooks)
    runs_after = {
        name: earlier
        for group in ("default_hooks", "hooks")
        for name, schema in stored(group)
        for earlier in CLASSES[schema._target_.removeprefix("hydraloop.hooks.")]["runs_after"]
    }
    assert runs_after
    for called in order.values():
        names = [name for name, _ in called]
        assert all(int(one) <= int(other) for (_, one), (_, other) in pairwise(called))
        for name, earlier in runs_after.items():
            if name in names and earlier in names:
                assert names.index(earlier) < names.index(name)
