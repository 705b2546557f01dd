"""Configs that would run something else than training are refused before anything is called or written."""

from __future__ import annotations

from tests.e2e.projects import REPOSITORY, Project

MARK = "import pathlib\npathlib.Path('{}').touch()\n"
EXPERIMENTS = {
    "hydra.callbacks.x._target_": (
        "hydra:\n  callbacks:\n    x:\n      _target_: runpy.run_path\n      path_name: evil.py\n"
    ),
    "hydra.launcher._target_": "defaults:\n  - override /hydra/launcher: mine\n",
    "hooks.x._target_": (
        "hooks:\n  x:\n    _target_: hydraloop.data.in_memory.find_data_file\n    name: passwd\n    root: /etc\n"
    ),
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


def test_what_is_refused_leaves_nothing(project: Project) -> None:
    project.write("evil.py", MARK.format("executed"))
    project.write("conf/hydra/launcher/mine.yaml", "_target_: runpy.run_path\npath_name: evil.py\n")
    for number, (key, text) in enumerate(EXPERIMENTS.items()):
        project.write(f"conf/experiment/evil{number}.yaml", f"# @package _global_\n{text}")
        done = project.train(f"experiment=evil{number}", "engine.max_epochs=1")
        assert done.code == (2 if key.startswith(WITHOUT_A_RUN) else 1), key
        assert f"error: {key}: " in done.text
        assert "Traceback" not in done.text
    made = {"executed", "evil_trace.py", "evil_trace.json", "evil_traces", "torch_compile_debug"}
    assert not made & project.files
    assert (project.path / "conf" / "config.yaml").read_text() == (REPOSITORY / "conf" / "config.yaml").read_text()
    assert len(project.runs) == sum(not key.startswith(WITHOUT_A_RUN) for key in EXPERIMENTS)
