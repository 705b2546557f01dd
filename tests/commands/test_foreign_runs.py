"""Runs from other people: their archives run no code, and resuming them writes nothing outside of the run."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.e2e.projects import Project
from tests.marks import slow

QUICK = ("engine.max_epochs=1", "engine.limit_train_batches=2", "engine.limit_val_batches=1", "engine.test=false")
MODEL = "from hydraloop.models import SmallCNN\nclass Net(SmallCNN): pass\n"
EVIL = f"open('owned', 'w')\n{MODEL}"
COMMANDS = {
    "evaluate": ["split=val"],
    "predict": ["split=val"],
    "export": ["format=safetensors"],
    "resume": ["engine.max_epochs=2"],
}
RUN = "outputs/2026-01-01/run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with a run, and a copy of the run in `copy` beside the project."""
    folder = tmp_path_factory.mktemp("trusted")
    project = Project.make(folder / "project")
    project.write("evil.py", MODEL)
    project.write("own.py", "import sys, hydraloop\nhydraloop.build(hydraloop.compose([f'resume={sys.argv[1]}']))\n")
    done = project.train(*QUICK, f"hydra.run.dir={RUN}", "task.model._target_=evil.Net")
    assert done.code == 0, done.text
    shutil.copytree(project.path / RUN, folder / "copy")
    return project


@pytest.fixture
def archive(trained: Project, tmp_path: Path) -> Project:
    """The same project, unpacked from an archive of someone else, with all that was recorded in its folder."""
    shutil.copytree(trained.path, tmp_path / "archive")
    shutil.copytree(trained.path.parent / "copy", tmp_path / "archive" / "run")
    found = Project(tmp_path / "archive")
    found.write("evil.py", EVIL)
    return found


@pytest.mark.parametrize("name", [name if name in ("evaluate", "resume") else slow(name) for name in COMMANDS])
def test_hydraloop_runs_no_code_of_an_archive(archive: Project, name: str, tmp_path: Path) -> None:
    """The message is the same in another folder, and of another user."""
    line = [name, str(archive.path / "run"), *COMMANDS[name]]
    elsewhere = Project(tmp_path / "elsewhere")
    elsewhere.path.mkdir()
    for project, home in ((archive, "/nowhere"), (elsewhere, str(tmp_path))):
        done = project.python("-m", "hydraloop", *line, HOME=home)
        assert done.code == 2
        assert done.err.endswith(f": {shlex.join(['python', 'train.py', *line])}\n"), done.text
    assert not list(tmp_path.rglob("owned"))


@pytest.mark.parametrize("name", ["evaluate", slow("predict"), slow("export"), "resume"])
def test_a_script_trusts_its_folder(trained: Project, name: str, tmp_path: Path) -> None:
    """It may be started in another folder, and by another user."""
    elsewhere = Project(tmp_path / "elsewhere")
    elsewhere.path.mkdir()
    line = [name, shutil.copytree(trained.path / RUN, tmp_path / "run"), *COMMANDS[name]]
    done = elsewhere.python(str(trained.path / "train.py"), *map(str, line), HOME=str(tmp_path))
    assert done.code == 0, done.text


@pytest.mark.slow
def test_a_program_that_runs_as_a_module_trusts_its_folder(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    project.write("pkg/own.py", MODEL)
    project.write("pkg/train.py", "import hydraloop\n\nhydraloop.main(config_path='../conf')\n")
    done = project.python("-m", "pkg.train", *QUICK, f"hydra.run.dir={RUN}", "task.model._target_=pkg.own.Net")
    assert done.code == 0, done.text
    done = project.python("-m", "pkg.train", "evaluate", RUN, "split=val")
    assert done.code == 0, done.text


def test_a_file_beside_a_run_in_outputs_is_not_of_the_project(trained: Project) -> None:
    trained.write("outputs/unpacked.py", EVIL)
    done = trained.train("evaluate", RUN, "task.model._target_=outputs.unpacked.Net")
    assert "a config may not instantiate outputs.unpacked.Net" in done.err
    assert not (trained.path / "owned").exists()


# Links. --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def foreign(trained: Project, tmp_path: Path) -> Path:
    """A run of someone else, whose config names only classes of hydraloop. Beside it is the user's file `profile`."""
    shutil.copytree(trained.path.parent / "copy", tmp_path / "run")
    config = tmp_path / "run" / ".hydra" / "config.yaml"
    config.write_text(config.read_text().replace("evil.Net", "hydraloop.models.SmallCNN"))
    (tmp_path / "profile").write_text("export PATH\n")
    return tmp_path / "run"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("metrics.jsonl", "profile", ["train.py", "resume", "RUN", "engine.max_epochs=9"]),
        ("train.log", "profile", ["train.py", "resume", "RUN", "engine.max_epochs=9"]),
        ("checkpoints", "folder", ["train.py", "resume=RUN", "engine.max_epochs=9"]),
        (".lock", "new", ["train.py", "resume=auto", "hydra.run.dir=RUN", "engine.max_epochs=9"]),
        ("metrics.jsonl", "profile", ["own.py", "RUN"]),
    ],
)
def test_no_link_leads_a_resumed_run_to_other_files(
    foreign: Path, trained: Project, name: str, target: str, words: list[str]
) -> None:
    link = foreign / name
    if link.is_dir():
        link.rename(foreign.parent / target)
    link.unlink(missing_ok=True)
    link.symlink_to(foreign.parent / target)
    before = files(foreign.parent)
    done = trained.python(*(word.replace("RUN", str(foreign)) for word in words))
    assert files(foreign.parent) == before
    assert done.code != 0
    assert f"{link} is a link to {foreign.parent / target}, outside of {foreign}" in done.err
    assert f"rm {link} && mv {foreign.parent / target} {link}" in done.err


@pytest.mark.slow
def test_links_inside_a_run_and_above_it_are_followed(foreign: Path, trained: Project, tmp_path: Path) -> None:
    (foreign / "newest.jsonl").symlink_to("metrics.jsonl")
    (tmp_path / "above").symlink_to(tmp_path)
    done = trained.train("resume", str(tmp_path / "above" / "run"), "engine.max_epochs=3")
    assert done.code == 0, done.text


# Folders that a run names. -------------------------------------------------------------------------------------------


def test_a_foreign_run_writes_only_into_its_directory(foreign: Path, trained: Project, tmp_path: Path) -> None:
    config = OmegaConf.load(foreign / ".hydra" / "config.yaml")
    config.default_hooks.checkpoint.out_dir = str(tmp_path / "planted")
    OmegaConf.save(config, foreign / ".hydra" / "config.yaml")
    before = files(tmp_path)
    done = trained.train("resume", str(foreign), "engine.max_epochs=3")
    assert (done.code, files(tmp_path)) == (2, before), done.text
    found = re.search(r"add (default_hooks.checkpoint.out_dir=\S+)", done.err)
    assert found, done.err
    for typed in (found[1], "default_hooks.checkpoint.out_dir=null"):
        assert trained.train("resume", str(foreign), "engine.max_epochs=3", typed, "--dry-run").code == 0
