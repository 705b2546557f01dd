"""The Tab key completes flags, commands, groups, keys and run directories; no code of a project runs for it."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hydraloop.cli import arguments
from hydraloop.cli.compose import opened
from hydraloop.cli.config_file_limits import leaves
from hydraloop.commands import dispatch
from hydraloop.commands.completion import answer
from hydraloop.commands.completion.known import known
from hydraloop.commands.parser import COMMANDS
from hydraloop.errors import UserError
from tests.e2e.projects import REPOSITORY, Project

BREAKS = " \t\n\"'><=;|&(:"
"""Bash's default of COMP_WORDBREAKS."""
Complete = Callable[..., list[str]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project that is the working directory, whose script must not be run, with two runs and a sweep."""
    made = Project.make(tmp_path / "project")
    made.write("train.py", "import hydraloop\nopen('was_run', 'w')\nhydraloop.main()\n")
    for folder in (
        "outputs/2026-01-01/10-00-00-ab",
        "outputs/2026-01-02/11-00-00-cd",
        "multirun/2026-01-03/12-00-00-ef",
    ):
        (made.path / folder).mkdir(parents=True)
    monkeypatch.chdir(made.path)
    return made


@pytest.fixture
def complete(project: Project, capsys: pytest.CaptureFixture[str]) -> Complete:
    """Returns the answer to a command line up to the cursor."""

    def answered(line: str, shell: str = "zsh", breaks: str = "") -> list[str]:
        answer.main(shell, line, breaks)
        return capsys.readouterr().out.split()

    return answered


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("python train.py --d", ["--dry-run"]),
        ("python train.py opt", ["optimizer.", "optimizer="]),
        (
            "python train.py optimizer=ad",
            ["optimizer=adafactor", "optimizer=adagrad", "optimizer=adam", "optimizer=adamw"],
        ),
        ("python train.py optimizer.wei", ["optimizer.weight_decay="]),
        ("python train.py optimizer=sgd optimizer.nes", ["optimizer.nesterov="]),
        ("python train.py hooks=ema,prof", ["hooks=ema,profiler"]),
        ("python train.py 'hooks=[ema,prof", ["hooks=[ema,profiler,", "hooks=[ema,profiler]"]),
        ("python train.py 'hooks=[ema]' hooks.", ["hooks.ema."]),
        ("python train.py --help hooks.em", ["hooks.ema", "hooks.empty_cache"]),
        ("python train.py -m optimizer=sgd,adam engine.max_e", ["engine.max_epochs="]),
        ("python train.py -m optimizer=sgd,adam optimizer.nes", ["optimizer.nesterov="]),
        ("python train.py optimizer={lr:1} optimizer.wei", ["optimizer.weight_decay="]),
        ("python train.py +hooks=wei", ["+hooks=weight_norm"]),
        ("python train.py model=sp", ["model=spiral_net"]),
        ("python train.py resume=outputs/2026-01-02", ["resume=outputs/2026-01-02/11-00-00-cd"]),
        ("python train.py resume out", ["outputs/2026-01-01/10-00-00-ab", "outputs/2026-01-02/11-00-00-cd"]),
        ("python -m hydraloop ev", ["evaluate"]),
        ("python -m hydraloop sweep.max_r", ["sweep.max_retries="]),
        ("hydraloop evaluate outputs/2026-01-01/", ["outputs/2026-01-01/10-00-00-ab"]),
        ("/some/bin/hydraloop evaluate outputs/run s", ["split="]),
        ("hydraloop evaluate outputs/run split=", ["split=test", "split=val"]),
        ("hydraloop status mul", ["multirun/2026-01-03/12-00-00-ef"]),
        ("hydraloop export --f", ["--format"]),
        ("python", []),
        ("python other.py ", []),
        ("python -m pytest ", []),
        ("python 'train.py ", []),
    ],
)
def test_what_can_follow(line: str, some: list[str], complete: Complete) -> None:
    assert complete(line) == some


def test_the_first_word_can_be_a_command_a_group_or_a_key(complete: Complete) -> None:
    found = complete("python -m hydraloop ")
    assert {*COMMANDS, "hooks=", "optimizer.", "seed="} <= {*found}
    assert "evaluate" not in complete("python train.py ")
    assert {"--pdb", "--multirun", "--cfg", "--config-name"} <= {*complete("python train.py -")}


def test_bash_replaces_only_what_follows_an_equals_sign_outside_of_quotes(complete: Complete) -> None:
    assert complete("python train.py optimizer=sg", "bash", BREAKS) == ["sgd"]
    assert complete("python train.py 'optimizer=sg", "bash", BREAKS) == ["optimizer=sgd"]
    assert complete("python train.py optimizer.weight", "bash", BREAKS) == ["optimizer.weight_decay="]


def test_no_code_of_a_project_runs_and_no_name_is_a_command(project: Project, complete: Complete) -> None:
    project.write("conf/hooks/$(touch hit).yaml", "_target_: hook.Mine")
    project.write("hydraloop/__init__.py", "open('was_run', 'w')")
    project.write("hook.py", "open('was_run', 'w')")
    assert all(re.fullmatch(r"[\w.=]+", one) for one in complete("python train.py hooks="))
    assert complete("python train.py optimizer=sg") == ["optimizer=sgd"]
    assert not {"was_run", "hit"} & project.files


def test_an_answer_is_as_new_as_the_files(project: Project, complete: Complete) -> None:
    assert complete("python train.py hooks=mi") == []
    project.write("conf/hooks/mine.yaml", "# @package hooks.mine\n_target_: hook.Mine\nfirst: 1")
    assert complete("python train.py hooks=mi") == ["hooks=mine"]
    assert complete("python train.py hooks=mine hooks.mine.") == ["hooks.mine.first="]
    project.write("conf/hooks/mine.yaml", "\ufeff# @package hooks.own\n_target_: hook.Mine\nsecond: 1")
    assert complete("python train.py hooks=mine hooks.own.") == ["hooks.own.second="]
    shutil.rmtree(project.path / "conf")
    assert complete("python -m hydraloop hoo") == []
    project.write("conf/config.yaml", "defaults: [hydraloop]\n")
    assert "hooks=" in complete("python -m hydraloop hoo")


@pytest.mark.parametrize(
    ("folder", "overrides"),
    [
        ("conf", []),
        ("conf", ["experiment=spirals", "debug=profile", "hooks=ema,profiler", "+hooks.mine.first=1"]),
        ("conf", ["experiment=diabetes", "scheduler=[linear,cosine]", "~debug"]),
        ("examples/gan/conf", ["optimizer@optimizer.generator=adamw"]),
        ("examples/distillation/conf", ["experiment=student", "optimizer=sgd", "default_hooks=[]"]),
        ("examples/starter/conf", ["hooks=[weight_norm]", "task=regression"]),
    ],
)
def test_the_keys_are_those_that_hydra_composes(folder: str, overrides: list[str]) -> None:
    with opened(REPOSITORY / folder, "config") as composer:
        lines, _ = arguments.with_hook_lists(overrides)
        config = OmegaConf.to_container(composer.compose(lines), resolve=False)
        groups = {group: composer.options(group) for group in composer.groups()}
    assert isinstance(config, dict)
    config.pop("hydra")
    keys = {f"{key}=" for name, node in config.items() for key, _ in leaves(node, str(name)) if "[" not in key}
    found = known("", [f"--config-path={REPOSITORY / folder}", *overrides])
    assert {*found["keys"]} == {key for key in keys if "._" not in key}
    assert found["groups"] == groups


def test_other_configs_of_a_script(project: Project, complete: Complete) -> None:
    (project.path / "conf").rename(project.path / "configs")
    (project.path / "configs" / "config.yaml").rename(project.path / "configs" / "main.yaml")
    project.write("train.py", "from hydraloop import main\nmain(config_path='configs', config_name='main')\n")
    project.write("configs/other.yaml", "defaults: [main, {override optimizer: sgd}, _self_]\n")
    assert complete("python train.py optimizer.nest") == []
    assert complete("python train.py -cn other optimizer.nest") == ["optimizer.nesterov="]
    assert complete("python train.py optimizer.wei") == ["optimizer.weight_decay="]


def test_a_config_with_a_mistake_leaves_flags_and_groups(project: Project, complete: Complete) -> None:
    project.write("conf/config.yaml", "defaults: [nope]\n")
    assert complete("python train.py --dry") == ["--dry-run"]
    assert complete("python train.py optimizer=sg") == ["optimizer=sgd"]


def test_an_answer_imports_nothing_of_hydra(project: Project) -> None:
    code = f"import runpy, sys; runpy.run_path({answer.__file__!r}, run_name='__main__'); print({{*sys.modules}})"
    line = [sys.executable, "-P", "-c", code, "zsh", "python train.py optimizer.wei"]
    key, modules = subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()
    assert key == "optimizer.weight_decay="
    assert not re.search(r"'(hydra|hydraloop|omegaconf|argparse)\b", modules)


def test_hydras_own_completion_is_one_message() -> None:
    with pytest.raises(UserError, match="Run: python -m hydraloop completion bash"):
        arguments.read(["-sc", "install=bash"])


STARTED = {
    # shell: (its arguments, its startup file, its prompt)
    "bash": (["--rcfile", "startup", "-i"], "startup", "PS1='READY '"),
    "zsh": (["-i"], ".zshrc", "PS1='READY '"),
    "fish": (["-i", "-C", "source startup"], "startup", "function fish_prompt; echo 'READY '; end"),
}


@pytest.mark.parametrize("shell", STARTED)
def test_in_a_terminal(shell: str, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """A real shell, in which each line is typed and completed with the Tab key."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    started, file, prompt = STARTED[shell]
    assert dispatch.run(["completion", shell]) == 0
    project.write(file, f"{capsys.readouterr().out}\n{prompt}\n")
    project.write("bin/hydraloop", "#!/bin/sh\n")
    project.write("bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for command in (project.path / "bin").iterdir():
        command.chmod(0o755)
    path = f"{project.path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {"HOME": str(project.path), "PATH": path, "TERM": "xterm"}
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(shell, [shell, *started], {**os.environ, **environment})
    try:
        _read(terminal, r"READY")
        for typed, shown in (
            ("python train.py optimizer.weig", r"weig\a?ht_decay="),
            ("A=1 python train.py optimizer=rms", r"rms\a?prop"),
            ("true; python -m hydraloop eval", r"eval\a?uate"),
            ("hydraloop pred", r"pred\a?ict"),
            ("python train.py 'hooks=[ema,prof", r"prof\a?iler"),
            ("python tra", r"tra\a?in\.py"),
        ):
            os.write(terminal, f"{typed}\t".encode())
            _read(terminal, shown)
            os.write(terminal, b"\x15")  # the line is deleted
    finally:
        os.close(terminal)
        os.kill(child, 9)
        os.waitpid(child, 0)


def _read(terminal: int, wanted: str) -> None:
    """Read what a terminal shows, until `wanted` has been shown."""
    text, end = "", time.monotonic() + 60
    while not re.search(wanted, text):
        assert time.monotonic() < end, text
        if select.select([terminal], [], [], 1)[0]:
            text += os.read(terminal, 4096).decode(errors="replace")
