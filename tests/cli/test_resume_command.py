"""The config of `resume <run>`. e2e/test_resume.py continues runs; commands/test_mistakes.py has the mistakes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hydraloop.commands.resume import check_resume
from hydraloop.config.checks import Draft
from hydraloop.config.compose import opened
from hydraloop.config.saved_config import NAME
from hydraloop.engine.checkpoint.format import write
from hydraloop.errors import UserError
from hydraloop.launch.python_interface import compose
from tests.e2e.projects import REPOSITORY


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was started from the command line, without checkpoints."""
    path = tmp_path_factory.mktemp("run")
    (path / ".hydra").mkdir()
    lines = [
        "hooks=[ema]",
        "+my.mine=${engine.max_epochs}",
        "engine.max_epochs=3",
        "resume_strict=false",
        "engine.pause_after=2",
    ]
    cfg = compose(lines, folder=REPOSITORY)
    (path / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    (path / ".hydra" / "hydra.yaml").touch()
    return path


def check(*words: str) -> Draft:
    with opened(REPOSITORY / "conf", NAME) as composer:
        return check_resume(Path(words[0]), words[1:], composer)


def test_the_saved_config_is_changed_by_what_is_typed(run: Path) -> None:
    command = check(str(run), "engine.max_epochs=4", "hooks.ema=null", "hydra.verbose=true")
    assert (command.cfg.resume, command.cfg.my.mine, command.cfg.hooks.ema) == (str(run), 4, None)
    assert command.cfg.hydra.verbose is True
    assert command.typed == ("engine.max_epochs", "hooks.ema", "hydra.verbose")
    assert command.cfg.resume_strict, "false is for the start that it was typed for"
    assert not check(str(run), "resume_strict=false").cfg.resume_strict
    assert command.cfg.engine.pause_after is None, "it would pause again at once"
    assert check(str(run), "engine.pause_after=3").cfg.engine.pause_after == 3


def test_hooks_are_added_and_removed_as_on_a_command_line(run: Path) -> None:
    changed = check(
        str(run), "~hooks.ema", "~default_hooks.progress", "+hooks=[profiler]", "hooks.profiler.priority=40"
    ).cfg
    assert (list(changed.hooks), "progress" in changed.default_hooks) == (["profiler"], False)
    assert (changed.hooks.profiler._target_, changed.hooks.profiler.priority) == ("hydraloop.hooks.ProfilerHook", 40)
    assert list(check(str(run), "+hooks=profiler,tta").cfg.hooks) == ["ema", "profiler", "tta"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("optimizer=sgd", "optimizer: an option of a group cannot be selected: .*\n  Change its keys, optimizer.…=…"),
        ("+optimizer=sgd", "optimizer: an option of a group cannot be selected"),
        (
            "hooks=[profiler]",
            r"hooks: an option of a group cannot be .*\n  To add hooks: '\+hooks=\[profiler\]'",
        ),
        ("hooks=[]", "hooks: an option of a group cannot be selected: .*\n  To remove one: hooks.<name>=null"),
        ("+hooks=[ema]", "hooks: ema is in the run already\n  Change its options: hooks.ema.…=…"),
        ("hooks.tta.transforms=[]", r"hooks.tta: this hook is not selected\n  Add it: '\+hooks=\[tta\]' 'hooks.tta"),
        ("seed=1,2", "seed: seed=1,2 has several values"),
        ("seed=abc", "seed: Value 'abc'"),
        ("engine.max_epoch=3", "engine.max_epoch: .*\n.*max_epochs"),
    ],
)
def test_a_saved_config_has_types_and_its_groups_are_selected(line: str, message: str, run: Path) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        check(str(run), line)


@pytest.mark.parametrize("key", ["defaults", "hydra"])
def test_a_saved_config_selects_no_other_file(key: str, run: Path, tmp_path: Path) -> None:
    file = tmp_path / ".hydra" / "config.yaml"
    file.parent.mkdir()
    file.write_text((run / ".hydra" / "config.yaml").read_text() + f"{key}: [mine]\n")
    with pytest.raises(UserError, match=f"^{key}: no run writes this key into {file}"):
        check(str(tmp_path))


def test_a_pipe_is_no_config(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    os.mkfifo(tmp_path / ".hydra" / "config.yaml")
    with pytest.raises(UserError, match="run: "):
        check(str(tmp_path))


HOSTILE = {
    "tag": "seed: !unknown 1",
    "object": "seed: !!python/object/apply:os.getcwd []",
    "broken": "[1",
    "list": "[1]",
    "aliases": "a: &a [1]\nb: *a\n",
    "deep": f"a: {'[' * 3000}{']' * 3000}\n",
    "long": f"a: {'b' * 1_000_000}\n",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_config_that_cannot_be_read_is_named(text: str, run: Path, tmp_path: Path) -> None:
    file = tmp_path / ".hydra" / "config.yaml"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        check(str(tmp_path))
    assert str(caught.value).startswith(f"{file} cannot be read: ")
    assert caught.value.remedy == "Restore the file, or name another run."


def test_a_secret_in_the_environment_stays_there(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Path(shutil.copytree(run, tmp_path / "moved"))
    file = moved / ".hydra" / "config.yaml"
    notify = "notify: {api_key: '${oc.env:MINE}', every: '${engine.max_epochs}'}"
    file.write_text(file.read_text().replace("\nmy:\n", f"\nmy:\n  {notify}\n"))
    monkeypatch.setenv("MINE", "hunter2-hunter2")
    cfg = check(str(moved)).cfg
    saved = OmegaConf.to_container(cfg.my.notify, resolve=False)
    assert saved["api_key"] == "${oc.env:MINE}"
    assert cfg.my.notify == {"api_key": "hunter2-hunter2", "every": 3}


def test_a_run_with_objects_from_python_is_continued_from_python(run: Path, tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    shutil.copy(run / ".hydra" / "config.yaml", tmp_path / ".hydra")
    checkpoint = tmp_path / "checkpoints" / "epoch_1.pth"
    write(checkpoint, {"meta": {"given": ["task", "data.train"]}, "state_dict": {}})
    for path in (tmp_path, checkpoint):
        with pytest.raises(UserError, match=r"got task, data.train as objects from Python"):
            check(str(path))
    write(checkpoint, {"meta": {}, "state_dict": {}})
    assert check(str(checkpoint)).cfg.resume == str(checkpoint)
