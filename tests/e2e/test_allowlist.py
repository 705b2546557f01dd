"""Configs that would run something else than training are refused before anything is called or written."""

from __future__ import annotations

import os
import re

import pytest

from tests.e2e.projects import REPOSITORY, Done, Project

MARK = "import pathlib\npathlib.Path('{}').touch()\n"
VENDORED = """
import hydraloop

class MyHook(hydraloop.Hook):
    pass
"""
FROM_PYTHON = """
import json, re, sys
sys.path.append(sys.argv[1])
import hydraloop

def works(start):
    trusted = []
    for _ in range(3):
        try:
            start(trusted)
            return print("works with", *trusted)
        except hydraloop.UserError as error:
            found = re.search(r"hydraloop\\.(?:compose|build)\\(…, trusted=(\\[.*?\\])", error.remedy)
            trusted = json.loads(found[1])

works(lambda trusted: hydraloop.build(hydraloop.compose(["+hooks.x._target_=second.MyHook"]), trusted=trusted))
"""
EXPERIMENTS = {
    "hydra.callbacks.x._target_": (
        "hydra:\n  callbacks:\n    x:\n      _target_: runpy.run_path\n      path_name: evil.py\n"
    ),
    "hydra.launcher._target_": "defaults:\n  - override /hydra/launcher: mine\n",
    "hydra.job_logging.handlers.x.()": (
        "hydra:\n  job_logging:\n    handlers:\n      x:\n"
        '        "()": torch.load\n        f: evil.pt\n        weights_only: false\n'
    ),
    "hooks.x._target_": (
        "hooks:\n  x:\n    _target_: hydraloop.data.in_memory.find_data_file\n    name: passwd\n    root: /etc\n"
    ),
    "hooks.y._target_": "hooks:\n  y:\n    _target_: torch.profiler.ExecutionTraceObserver\n",
    "hydra.job.env_set.PATH": "hydra:\n  job:\n    env_set:\n      PATH: ${hydra.runtime.cwd}/evil\n",
    "hooks.profiler.json_trace_path": (
        "defaults:\n  - override /hooks: [profiler]\nhooks:\n  profiler:\n    profile_times: 1\n"
        "    json_trace_path: ${hydra:runtime.cwd}/evil_trace.py\n"
    ),
    "default_hooks.profiler.json_trace_path": (
        "default_hooks:\n  profiler:\n    _target_: hydraloop.hooks.ProfilerHook\n    profile_times: 1\n"
        "    json_trace_path: ../../../evil_trace.json\n"
    ),
    "hooks.of.mine.json_trace_path": (
        "hooks:\n  of.mine:\n    _target_: hydraloop.hooks.ProfilerHook\n    profile_times: 1\n"
        "    json_trace_path: ${hydra:runtime.cwd}/evil_trace.py\n"
    ),
    "hooks.profiler.on_trace_ready[0]._target_": (
        "defaults:\n  - override /hooks: [profiler]\nhooks:\n  profiler:\n    profile_times: 9\n    by_epoch: false\n"
        "    on_trace_ready:\n      - _target_: torch.profiler.profiler.tensorboard_trace_handler\n"
        "        dir_name: evil_traces\n"
    ),
    "engine.compile.options": "engine:\n  compile: {options: {trace.enabled: true}}\n",
}
WITHOUT_A_RUN = "hydra."
"""Start of the keys of which the mistake is found before there is a run directory."""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, dict[str, Done]]:
    """The outcome of each of EXPERIMENTS, in one process."""
    project = Project.make(tmp_path_factory.mktemp("evil") / "project")
    project.write("evil.py", MARK.format("executed"))
    project.write("evil.pt", "")
    project.write("conf/hydra/launcher/mine.yaml", "_target_: runpy.run_path\npath_name: evil.py\n")
    for number, text in enumerate(EXPERIMENTS.values()):
        project.write(f"conf/experiment/evil{number}.yaml", f"# @package _global_\n{text}")
    done = project.many([[f"experiment=evil{number}", "engine.max_epochs=1"] for number in range(len(EXPERIMENTS))])
    return project, dict(zip(EXPERIMENTS, done, strict=True))


@pytest.mark.parametrize("key", EXPERIMENTS)
def test_refused(key: str, refused: tuple[Project, dict[str, Done]]) -> None:
    done = refused[1][key]
    assert done.code == (2 if key.startswith(WITHOUT_A_RUN) else 1)
    assert f"error: {key}: " in done.text
    assert "Traceback" not in done.text


def test_what_is_refused_leaves_nothing(refused: tuple[Project, dict[str, Done]]) -> None:
    project, done = refused
    assert (
        not {"executed", "evil_log.py", "evil_trace.py", "evil_trace.json", "evil_traces", "torch_compile_debug"}
        & project.files
    )
    assert (project.path / "conf" / "config.yaml").read_text() == (REPOSITORY / "conf" / "config.yaml").read_text()
    assert len(project.runs) == sum(not key.startswith(WITHOUT_A_RUN) for key in done)


def test_the_search_path_imports_no_package_that_is_not_trusted(project: Project) -> None:
    config = (project.path / "conf" / "config.yaml").read_text()
    project.write("conf/config.yaml", f"{config}\nhydra:\n  searchpath: [pkg://this]\n")
    trains, shows = project.many([["debug=fast"], ["--cfg", "job"]])
    assert trains.code == shows.code == 2
    for done in (trains, shows):
        assert "error: hydra.searchpath: pkg://this is not a folder" in done.err
        assert "The Zen of Python" not in done.text
    assert not project.runs


@pytest.mark.slow  # some seconds, of a rare case
def test_following_the_remedies_works(project: Project) -> None:
    """For a class that its package re-exports: both packages must be trusted, and each is named by its own error."""
    for package in ("first", "second"):
        folder = project.path.parent / "elsewhere"
        (folder / package).mkdir(parents=True)
        (folder / f"{package}_vendored.py").write_text(VENDORED)
        (folder / package / "__init__.py").write_text(f"from {package}_vendored import *\n")
    path = f"{folder}{os.pathsep}{REPOSITORY}"
    script = (project.path / "train.py").read_text()
    assert "hydraloop.main()" in script
    for _ in range(2):
        done = project.train("+hooks.x._target_=first.MyHook", "debug=fast", PYTHONPATH=path)
        assert done.code == 1
        remedy = re.search(r"hydraloop\.main\(trusted=\[.*?\]\)", done.err)
        assert remedy, done.err
        project.write("train.py", script.replace("hydraloop.main()", remedy[0]))
    done = project.train("+hooks.x._target_=first.MyHook", "debug=fast", PYTHONPATH=path)
    assert done.code == 0, done.text
    project.write("script.py", FROM_PYTHON)
    done = project.python("script.py", str(folder))
    assert done.out.splitlines() == [
        "works with second second_vendored",  # each call has its own trust
    ], done.text
