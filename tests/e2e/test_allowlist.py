"""Configs that would run something else than training are refused before anything is called or written."""

from __future__ import annotations

import pytest

from tests.e2e.projects import Project

MARK = "import pathlib\npathlib.Path('{}').touch()\n"
CALLBACK = """
from hydra.experimental.callback import Callback

class Mine(Callback):
    def on_run_start(self, config, **kwargs):
        print("the callback was called")
"""
EXPERIMENTS = {
    "hydra.callbacks.x._target_": (
        "hydra:\n  callbacks:\n    x:\n      _target_: runpy.run_path\n      path_name: evil.py\n"
    ),
    "hydra.job_logging.handlers.x.()": (
        "hydra:\n  job_logging:\n    handlers:\n      x:\n"
        '        "()": torch.load\n        f: evil.pt\n        weights_only: false\n'
    ),
    "hydra.hydra_logging.handlers.x.()": (
        'hydra:\n  hydra_logging:\n    handlers:\n      x:\n        "()": runpy.run_path\n        path_name: evil.py\n'
    ),
    "hooks.x._target_": (
        "hooks:\n  x:\n    _target_: hydraloop.data.bundled.find_data_file\n    name: passwd\n    root: /etc\n"
    ),
    "hooks.y._target_": "hooks:\n  y:\n    _target_: torch.profiler.ExecutionTraceObserver\n",
}


@pytest.mark.parametrize("key", EXPERIMENTS)
def test_refused(key: str, project: Project) -> None:
    project.write("evil.py", MARK.format("executed"))
    project.write("evil.pt", "")
    project.write("conf/experiment/evil.yaml", f"# @package _global_\n{EXPERIMENTS[key]}")
    done = project.train("experiment=evil", "engine.max_epochs=1")
    assert done.code != 0
    assert f"error: {key}: " in done.text
    assert "Traceback" not in done.text
    assert "executed" not in project.files
    if key.startswith("hydra."):
        assert done.code == 2
        assert not project.runs


def test_a_callback_of_the_projects_own_is_called(project: Project) -> None:
    project.write("my_project/callbacks.py", CALLBACK)
    done = project.train("+hydra.callbacks.mine._target_=my_project.callbacks.Mine", "debug=fast")
    assert done.code == 0, done.text
    assert "the callback was called" in done.text
