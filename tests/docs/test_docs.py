"""README and docs: they build without a warning, their links and paths exist, their commands and code work."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import AGENTS, ARCHITECTURE, PAGES, Block, blocks, name, prose, unquoted
from tests.e2e.projects import REPOSITORY, Project
from tests.e2e.warm import SERVER, environment_of_python
from tests.marks import nightly, slow

LEFT_OUT = {
    "python -m venv": "the tests have an environment",
    "pip install": "needs the network; tests/test_wheel.py installs a wheel",
    "scripts/run.sh": "installs into .venv; tests/e2e/test_setup_script.py covers it",
    "scripts/test.sh": "runs the tests",
    "mlflow ui": "a server; tests/e2e/trackers/test_tracker_pages.py opens its page",
    "tensorboard --logdir": "a server; tests/e2e/trackers/test_tracker_pages.py opens its page",
    "eval": "changes the shell; tests/cli/test_completion.py covers it",
    "torchrun --nnodes=2": "needs two machines",
    "python train.py engine.compile=true": "compiling takes a minute; tests/engine covers it",
    "python train.py +hooks.posts.": "needs a service; tests/tracking/test_custom.py has one",
}
"""Commands that are not executed, by their beginning, with the reason."""
NIGHTLY = {
    "docs/how-to/sweeps.md": "tests/sweeps, tests/faults/sweeps and tests/e2e/test_command_line.py",
    "docs/reference/schedules.md": "tests/optim",
    "docs/how-to/clusters.md": "tests/e2e/test_launching.py and tests/examples",
    "docs/how-to/tracking.md": "tests/e2e/trackers",
}
"""Pages with many long runs, with the tests that CI has of the same options."""
TINY = [
    "engine.max_iters=2",
    "engine.val_interval=null",
    "data.loader.batch_size=2",
    "task.model.layers=1",
    *(f"data.{part}.megabytes=0.1" for part in ("train", "val", "test")),
]
"""Makes `experiment=char_lm` short."""


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_has_a_language_that_this_test_knows(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= pages.LANGUAGES
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks(page)), "a block that is not found"


def test_the_docs_build_without_a_warning(tmp_path: Path) -> None:
    """Links between pages and to headings are part of it."""
    pytest.importorskip("sphinx", reason="the docs' packages are not installed")
    script, site = tmp_path / "build.py", tmp_path / "site"
    script.write_text("import sys\nfrom sphinx.cmd.build import main\nsys.exit(main(sys.argv[1:]))\n")
    arguments = [str(script), "-q", "-W", "--keep-going", "-b", "dirhtml", "docs", str(site)]
    code, _, errors = SERVER.run(arguments, REPOSITORY, environment_of_python())  # torch is imported there
    assert (code, errors) == (0, "")
    assert (site / "how-to" / "tracking" / "index.html").is_file()


@pytest.mark.parametrize("page", [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"], ids=name)
def test_links_of_the_pages_that_are_not_built(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for link in links:
        if "://" in link:
            continue
        file, _, heading = link.partition("#")
        assert (page.parent / file).exists(), link
        assert not heading or heading in _headings(page.parent / file if file else page), link


def _headings(page: Path) -> list[str]:
    titles = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_of_the_repository_exist(page: Path) -> None:
    paths = re.findall(r"`((?:hydraloop|scripts|conf|tests)/[\w/.-]*)`", prose(page))
    for files, folder in re.findall(r"\| ((?:`\w+\.py`(?:, )?)+) in `([\w/]+/)` \|", prose(page)):
        paths += [folder + file for file in re.findall(r"`(\w+\.py)`", files)]
    made = {block.file for block in blocks(page)} | {"hydraloop/project"}  # an entry of a defaults list
    assert [path for path in paths if path not in made and not (REPOSITORY / path).exists()] == []


def test_the_files_on_the_way_of_a_command_exist() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    paths = re.findall(r"(?<![\w/])((?:\w+/)+\w+\.py)", text.replace("hydraloop/", ""))
    assert len(paths) > 20
    assert [path for path in paths if not (REPOSITORY / "hydraloop" / path).exists()] == ["scripts/hook_docs.py"]


def test_the_picture_of_a_run_is_that_of_the_hook() -> None:
    from hydraloop.engine import hook

    documented = inspect.getdoc(hook) or ""
    picture = re.search(r"^    before_run\n.*?^    after_run[^\n]*$", documented, re.M | re.S)
    assert picture
    page = REPOSITORY / "docs" / "how-to" / "hooks.md"
    assert textwrap.dedent(picture[0]) in [block.text.rstrip() for block in blocks(page)]


@pytest.mark.parametrize(
    ("page", "most"),
    [(REPOSITORY / "README.md", 700), (REPOSITORY / "CONTRIBUTING.md", 600), (AGENTS, 700), (ARCHITECTURE, 900)],
    ids=["README", "contributing", "agents", "architecture"],
)
def test_a_page_has_few_words(page: Path, most: int) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= most


def test_the_readme_leads_to_every_page() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    missing = [name(page) for page in PAGES if f"]({name(page)})" not in text]
    assert missing == ["README.md", "docs/index.md"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_work_in_zsh_too(page: Path) -> None:
    """zsh expands brackets, braces and tildes, and fails if nothing matches."""
    commands = [command for block in blocks(page) for command in block.commands if "train.py" in command]
    assert [command for command in commands if re.search(r"[][{}*?~]", unquoted(command))] == []


def test_every_command_that_is_left_out_is_somewhere() -> None:
    commands = [command for page in PAGES for block in blocks(page) for command in block.commands]
    assert [start for start in LEFT_OUT if not any(command.startswith(start) for command in commands)] == []


# The commands and the code. ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        (nightly if name(page) in NIGHTLY else slow)(page, id=name(page))
        for page in PAGES
        if page != AGENTS and any(block.language in ("bash", "python") for block in blocks(page))
    ],
)
def test_the_commands_and_the_code_of_a_page_work(page: Path, tmp_path: Path) -> None:
    """They run in a clone, or in the folder that the page goes to with `cd`."""
    project = clone = Project.make(tmp_path / "project")
    shutil.copytree(REPOSITORY / "scripts", project.path / "scripts", ignore=shutil.ignore_patterns("benchmarks"))
    waiting: list[str] = []
    for block in blocks(page):
        if block.file is not None:
            project.write(block.file, block.text)
        elif block.language == "python":
            _train(project, waiting)
            project.write("block.py", block.text)
            done = project.python("block.py")
            assert done.code == 0, done.text
        if block.text.startswith("scripts/"):
            _train(project, waiting)
            project = clone
        for command in _executed(block):
            if command.startswith("cd "):
                _train(project, waiting)
                project = Project(project.path / command.removeprefix("cd "))
                continue
            if "<run>" in command or not command.startswith("python train.py"):
                _train(project, waiting)
            if command.startswith("python train.py"):
                waiting.append(_with_run(command, project))
            else:
                _shell(_with_run(command, project), project)
    _train(project, waiting)


def _executed(block: Block) -> list[str]:
    return [command for command in block.commands if not command.startswith(tuple(LEFT_OUT))]


def _with_run(command: str, project: Project) -> str:
    """The command with the latest run instead of `outputs/<run>`."""
    if "<run>" not in command:
        return command
    return command.replace("outputs/<run>", str(project.runs[-1].path.relative_to(project.path)))


def _train(project: Project, commands: list[str]) -> None:
    """Execute the commands that wait, in one process."""
    if commands:
        lines = [_shortened(shlex.split(command)[2:]) for command in commands]
        for command, done in zip(commands, project.many(lines), strict=True):
            assert done.code == 0, f"{command}\n{done.text}"
        commands.clear()


def _shortened(arguments: list[str]) -> list[str]:
    """With one epoch, unless the command says how long; with six for schedules, whose lengths must fit."""
    if "experiment=char_lm" in arguments:
        return [*arguments, *TINY]
    if "precision=bf16" in arguments:  # slow on a CPU
        return [*arguments, "engine.limit_train_batches=2", "engine.limit_val_batches=1"]
    if any(argument.startswith(("--", "engine.max_epochs", "engine.max_iters", "resume=")) for argument in arguments):
        return arguments
    has_schedules = any(argument.lstrip("+").startswith("scheduler") for argument in arguments)
    return [*arguments, f"engine.max_epochs={6 if has_schedules else 1}"]


def _shell(command: str, project: Project) -> None:
    """Execute a command in bash; `python` and `torchrun` are those of the tests. hydraloop starts with torch."""
    if command.startswith(("python -m hydraloop ", "hydraloop ")):
        _, *words = shlex.split(command.removeprefix("python -m "))
        done = project.python("-m", "hydraloop", *words)
        assert done.code == 0, f"{command}\n{done.text}"
        return
    command = command.replace("torchrun ", "python -m torch.distributed.run ")
    if "train.py" in command:
        command += " engine.max_epochs=1"
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=project.path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
