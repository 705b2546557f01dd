"""`--pdb`: the debugger opens where an error of a run was raised, and nowhere else."""

from __future__ import annotations

import pytest

from tests.e2e.projects import Project
from tests.marks import nightly, slow

QUICK = ("--pdb", "engine.max_epochs=1", "+hooks.broken._target_=broken.Broken")
BROKEN = """
from hydraloop import Hook, UserError

class Broken(Hook):
    def __init__(self, at="train", how="bug"):
        self.how = how
        if at == "build":
            self._fail(40)

    def after_train_iter(self, engine, batch_idx, batch, outputs):
        self._fail(40)

    def after_run(self, engine):
        print("closed after", type(engine.error).__name__)

    def _fail(self, secret):
        if self.how == "mistake":
            raise UserError("on purpose", key="hooks.broken")
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "led to a mistake":
            try:
                raise ValueError("on purpose")
            except ValueError as error:
                raise UserError("on purpose", key="hooks.broken") from error
        raise ValueError("on purpose")
"""
ASKS = "p 'secret', secret + 2\nq\n"


@pytest.fixture
def broken(project: Project) -> Project:
    project.write("broken.py", BROKEN)
    return project


@pytest.mark.parametrize(
    "options", [slow([]), nightly(["+hooks.broken.at=build"]), nightly(["+hooks.broken.how=led to a mistake"])]
)
def test_it_opens_where_an_error_was_raised(broken: Project, options: list[str]) -> None:
    done = broken.python("train.py", *QUICK, *options, stdin=ASKS)
    assert "('secret', 42)" in done.out
    assert "_fail" in done.out.partition("('secret', 42)")[0]
    assert done.code == 1
    assert broken.run.result["status"] == "failed"
    if "+hooks.broken.at=build" not in options:
        assert done.out.index("closed after") < done.out.index("(Pdb)"), "the run is closed before"


@pytest.mark.parametrize(("how", "code"), [slow("mistake", 1), nightly("interrupt", 130)])
def test_it_does_not_open_after_a_mistake_or_an_interruption(broken: Project, how: str, code: int) -> None:
    done = broken.python("train.py", *QUICK, f"+hooks.broken.how={how}", stdin=ASKS)
    assert "Pdb" not in done.text
    assert done.code == code


def test_it_does_not_open_after_a_mistake_in_the_config(project: Project) -> None:
    done = project.python("train.py", "--pdb", "optimizer.lrr=1", stdin=ASKS)
    assert "Pdb" not in done.text
    assert (done.code, "Did you mean optimizer.lr" in done.err) == (2, True)


@pytest.mark.parametrize("line", ["-m seed=1,2", "distributed.nproc_per_node=2 engine.device=cpu"])
def test_a_sweep_and_several_processes_are_refused(project: Project, line: str) -> None:
    before = project.files
    done = project.train("--pdb", *line.split())
    assert done.code == 2
    assert done.err.startswith("error: --pdb: the debugger stops one")
    assert project.files == before
