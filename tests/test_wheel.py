"""The wheel is what users get: two clones build equal bytes, and it works in an empty folder without a clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml

from hydraloop.commands import parser
from tests.docs.pages import AGENTS, blocks
from tests.e2e.projects import REPOSITORY


def shell(command: str, folder: Path, **environment: str) -> str:
    """The output of a command, which must succeed."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def built(folder: Path, umask: str) -> Path:
    """The wheel of a clone of the working tree, named like the package."""
    shell(f"umask {umask} && git clone -q {REPOSITORY} {folder / 'hydraloop'}", folder)
    clone, who = folder / "hydraloop", "-c user.name=me -c user.email=me@localhost"
    for path in shell(
        "git diff HEAD --name-only --diff-filter=d; git ls-files -o --exclude-standard", REPOSITORY
    ).splitlines():
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, clone / path, follow_symlinks=False)
    date = {"GIT_AUTHOR_DATE": "2026-01-02T03:04:05Z", "GIT_COMMITTER_DATE": "2026-01-02T03:04:05Z"}
    shell(f"git add -A && git {who} commit -q --allow-empty -m all", clone, **date)
    shell(f"umask {umask} && scripts/build.sh", clone, HYDRALOOP_VENV=sys.prefix)
    (wheel,) = (clone / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [built(tmp_path_factory.mktemp("clone"), umask) for umask in ("022", "077")]


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `bin` of an environment with the wheel, and with the packages of this one, but not its clone."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    shell(f"{sys.executable} -m venv --without-pip {venv}", venv.parent)
    pip = f"{sys.executable} -m pip --python {venv / 'bin' / 'python'} install -q --no-deps --no-index {wheels[0]}"
    shell(pip, venv.parent, PIP_DISABLE_PIP_VERSION_CHECK="1")
    packages = next((venv / "lib").glob("python*/site-packages"))
    (packages / "tests.pth").write_text(sysconfig.get_paths()["purelib"])
    return venv / "bin"


@pytest.mark.slow
def test_two_clones_build_equal_bytes(wheels: list[Path]) -> None:
    first, second = (wheel.read_bytes() for wheel in wheels)
    assert first == second
    names = zipfile.ZipFile(wheels[0]).namelist()
    assert [name for name in names if not name.startswith(("hydraloop/", "hydraloop-"))] == []
    kept = {"README.md", "train.py", "conf/config.yaml", ".gitignore"}
    assert {f"hydraloop/templates/starter/{name}" for name in kept} < set(names)
    assert {"hydraloop/data/files/digits.csv.gz", "hydraloop/data/files/LICENSE.digits.txt"} < set(names)


@pytest.mark.slow
def test_the_first_minutes_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    path = {"PATH": f"{installed}:/usr/bin:/bin", "HOME": str(tmp_path / "home")}
    shell("hydraloop new demo", tmp_path, **path)
    demo = tmp_path / "demo"
    printed = shell("python train.py hooks=ema,mlflow engine.max_epochs=2", demo, **path)
    assert "status      finished" in printed
    printed = shell("python train.py -m optimizer.lr=1e-3,1e-2 engine.max_epochs=2", demo, **path)
    assert "\n  python train.py optimizer.lr=0.01" in printed
    run = shell("ls -d outputs/*/*", demo, **path).strip()
    assert '"accuracy"' in shell(f"python train.py evaluate {run}", demo, **path)
    assert "2 passed" in shell("python -m pytest -p no:cacheprovider", demo, **path)
    (tmp_path / "yaml.py").write_text("raise SystemExit('a command for runs imported a file of the working directory')")
    assert shell(f"hydraloop status demo/{run}", tmp_path, **path).startswith("finished")


@pytest.mark.slow
def test_every_option_composes_without_the_clone(installed: Path, tmp_path: Path) -> None:
    path = {"PATH": f"{installed}:/usr/bin:/bin"}
    (tmp_path / "train.py").write_text("import hydraloop\n\nhydraloop.main()\n")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("defaults: [hydraloop/project, _self_, experiment: null]\n")
    for line in ("model=small_cnn", "task=regression model=mlp", "model=small_cnn hooks=[ema,wandb]"):
        assert "Nothing was trained" in shell(f"python train.py --dry-run data=digits {line}", tmp_path, **path)


@pytest.mark.nightly
def test_each_command_of_the_page_for_agents_works(installed: Path, tmp_path: Path) -> None:
    """In its order, in an empty folder. With `--json`, standard output is one document."""
    path, folder = {"PATH": f"{installed}:/usr/bin:/bin", "HOME": str(tmp_path / "home")}, tmp_path
    page = AGENTS.read_text(encoding="utf-8")
    _, head, text = page.split("---\n", 2)
    assert list(yaml.safe_load(head)) == ["name", "description"]
    named = {*re.findall(r"(?:hydraloop|train\.py) (\w+)", text)} & {*parser.COMMANDS}
    assert named >= {
        "new",
        "check",
        "resume",
        "status",
        "results",
        "runs",
        "report",
        "stop",
        "evaluate",
    }
    for command in [command for block in blocks(AGENTS) for command in block.commands]:
        if command.startswith("cd "):
            folder /= command.removeprefix("cd ")
            continue
        printed = shell(command, folder, **path)
        if "--json" in command:
            assert ("error" in json.loads(printed)) == ("optimizr" in command), printed


@pytest.mark.slow
@pytest.mark.parametrize("is_editable", [False, True])
def test_the_package_is_found_above_a_clone_with_its_name(
    is_editable: bool, wheels: list[Path], installed: Path
) -> None:
    above = wheels[0].parents[2]
    assert (above / "hydraloop" / "hydraloop").is_dir()
    python = sys.executable if is_editable else installed / "python"
    assert (
        shell(f"{python} -c 'import hydraloop; print(hydraloop.main.__module__)'", above)
        == "hydraloop.commands.command_line\n"
    )
