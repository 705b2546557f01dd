"""Of `hydra:`, a short list is read. Each other option is refused by one message, and nothing is called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydraloop.config import checks
from hydraloop.config.arguments import typed_keys
from hydraloop.config.compose import opened
from hydraloop.config.hydra_keys import variables
from hydraloop.errors import UserError

PRIMARY = "defaults: [hydraloop/project, _self_, {optional experiment: null}]\n"
UNUSED = "hydraloop does not use this option of Hydra"
CALL = "{x: {_target_: evil.call}}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of config files, beside a package that must not be imported."""
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "__init__.py").write_text("raise SystemExit('evil was imported')\n")
    for name, text in {
        "config": PRIMARY,
        "hydra/launcher/mine": "_target_: evil.call\n",
        "hydra/job_logging/own": "{version: 1, root: {handlers: []}}\n",
        "own/packaged": f"# @package hydra.callbacks\n{CALL}\n",
    }.items():
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "conf" / "experiment").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    assert "evil" not in sys.modules


def composed(project: Path, *lines: str, is_sweep: bool = False) -> None:
    with opened(project / "conf", "config") as composer:
        if is_sweep:
            checks.compose_sweep([*lines, "seed=1,2"], composer)
        else:
            checks.compose_job(lines, composer)


FILES = {
    # What a file says, and the key that is named.
    f"hydra: {{callbacks: {CALL}}}": "hydra.callbacks.x._target_",
    "defaults: [/own: packaged]": "hydra.callbacks.x._target_",
    "defaults: [override /hydra/launcher: mine]": "hydra.launcher._target_",
    f"hydra: {{callbacks: '${{init}}'}}\ninit: {{exclude: [{CALL}]}}": "hydra.callbacks",
    "defaults: [override /hydra/job_logging: own]": "hydra.job_logging.version",
    "defaults: [override /hydra/job_logging: stdout]": "hydra.job_logging.version",
    "hydra: {hydra_logging: {handlers: {x: {(): evil.call}}}}": "hydra.hydra_logging.handlers.x.()",
    "hydra: {sweeper: {_target_: evil.call}}": "hydra.sweeper._target_",
    "hydra: {launcher: {n_jobs: 2}}": "hydra.launcher.n_jobs",
    "hydra: {job: {env_set: {PATH: evil}}}": "hydra.job.env_set.PATH",
    "hydra: {job: {env_copy: [PATH]}}": "hydra.job.env_set.PATH",
    "hydra: {job: {env_copy: [NOPE]}}": "hydra.job.env_copy",
    "hydra: {job: {chdir: true}}": "hydra.job.chdir",
    "hydra: {job: {config: {override_dirname: {kv_sep: _}}}}": "hydra.job.config.override_dirname.kv_sep",
    "hydra: {output_subdir: conf}": "hydra.output_subdir",
    "hydra: {help: {app_name: mine}}": "hydra.help.app_name",
    "hydra: {overrides: {task: [seed=3]}}": "hydra.overrides",
    "hydra: {overrides: {hydra: ['++hydra.job.env_set.PATH=evil']}}": "hydra.overrides",
}


def test_a_file_sets_no_other_option(project: Path) -> None:
    for number, text in enumerate(FILES):
        (project / "conf" / "experiment" / f"mine{number}.yaml").write_text(f"# @package _global_\n{text}\n")
    with opened(project / "conf", "config") as composer:
        for number, key in enumerate(FILES.values()):
            with pytest.raises(UserError) as caught:
                checks.compose_job([f"experiment=mine{number}"], composer)
            assert (caught.value.key, caught.value.problem) == (key, UNUSED)
        for number in (0, len(FILES) - 1):  # found by both of the checks that a sweep shares with a run
            with pytest.raises(UserError, match=UNUSED):
                checks.compose_sweep([f"experiment=mine{number}", "seed=1,2"], composer)


@pytest.mark.parametrize("section", ["null", "[1]", "3", "${my}"])
def test_a_section_that_is_no_mapping(section: str, project: Path) -> None:
    (project / "conf" / "config.yaml").write_text(f"{PRIMARY}hydra: {section}\n")
    with pytest.raises(UserError) as caught:
        composed(project)
    assert (caught.value.key, caught.value.problem) == ("hydra", UNUSED)


TYPED = {
    "hydra.callbacks=x": "hydra.callbacks",
    "+hydra.callbacks.x._target_=evil.call": "hydra.callbacks.x._target_",
    "+hydra/callbacks=x": "hydra/callbacks",
    "hydra/launcher=mine": "hydra/launcher",
    "hydra/launcher=null": "hydra/launcher",
    "hydra/job_logging=none": "hydra/job_logging",
    "hydra.sweeper={_target_: evil.call}": "hydra.sweeper._target_",
    "hydra.job.chdir=true": "hydra.job.chdir",
    "hydra.output_subdir=null": "hydra.output_subdir",
    "hydra.run.dri=x": "hydra.run.dri",
    "hydra=x": "hydra",
    "~hydra.run.dir": "hydra.run.dir",
}


def test_the_command_line_sets_no_other_option(project: Path) -> None:
    with opened(project / "conf", "config") as composer:
        for line, key in TYPED.items():
            with pytest.raises(UserError) as caught:
                checks.compose_job([line], composer)
            assert (caught.value.key, caught.value.problem) == (key, UNUSED)
            assert "hydra.run.dir" in str(caught.value.remedy)


def test_what_is_read(project: Path) -> None:
    text = (
        "mode: MULTIRUN, run: {dir: '${experiment_name}'}, sweep: {dir: /x, subdir: 's-${seed}'}, job: {name: mine},"
        " sweeper: {params: {seed: '1,2'}}, searchpath: [], verbose: [hydraloop]"
    )
    (project / "conf" / "config.yaml").write_text(f"{PRIMARY}hydra: {{{text}}}\n")
    composed(project)
    composed(project, "hydra.verbose=true", "hydra.run={dir: x}", "hydra.sweeper.params={seed: '1,2'}")


def test_variables_of_the_environment_are_typed(project: Path) -> None:
    (project / "conf" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nhydra: {job: {env_set: {B: evil}}}"
    )
    line = "++hydra.job.env_set.A=1"
    composed(project, line)
    assert variables(["seed=1", line, "++hydra.job.env_set={C: a b, D: 2}"]) == {"A": "1", "C": "a b", "D": "2"}
    with pytest.raises(UserError, match=r"hydra\.job\.env_set\.B: hydraloop does not use"):
        composed(project, line, "experiment=mine")
    with pytest.raises(UserError, match="Write the value itself"):
        composed(project, "++hydra.job.env_set.A=${seed}")


@pytest.mark.parametrize("folder", ["..", "/runs/x", "a/../../x", "${hydra.job.num}/../../x"])
def test_the_folder_of_a_job_is_in_its_sweep(folder: str, project: Path) -> None:
    with pytest.raises(UserError) as caught:
        composed(project, f"hydra.sweep.subdir='{folder}'", "hydra.sweep.dir=all", is_sweep=True)
    assert caught.value.key == "hydra.sweep.subdir"
    composed(project, "hydra.sweep.subdir=a/../b/${seed}", "hydra.sweep.dir=all", is_sweep=True)


PACKAGES = ("pkg://evil", "pkg://evil/inner", "structured://evil", "s3://bucket/conf", "pkg://")
INTERPOLATIONS = ("${oc.env:PLACE}", "${now:%S}", "${my.place}", "${.0}")


@pytest.mark.parametrize(
    ("place", "is_typed"),
    [*((place, False) for place in (*PACKAGES, *INTERPOLATIONS)), *((place, True) for place in PACKAGES)],
)
def test_the_search_path_has_folders_only(
    place: str, is_typed: bool, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", "pkg://evil")
    if not is_typed:
        (project / "conf" / "config.yaml").write_text(f"{PRIMARY}hydra: {{searchpath: ['{place}']}}\n")
    with pytest.raises(UserError) as caught:
        composed(project, *([f"hydra.searchpath=['{place}']"] if is_typed else []))
    assert caught.value.key == "hydra.searchpath"


@pytest.mark.parametrize("place", INTERPOLATIONS)
def test_an_interpolation_that_is_typed_is_the_name_of_a_folder(
    place: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", "pkg://evil")
    with pytest.raises(UserWarning, match=r"path=\$\{.* is not available"):  # Hydra does not resolve it
        composed(project, f"hydra.searchpath=['{place}']")


@pytest.mark.parametrize("place", ["{}", "file://{}", "${{oc.env:PLACE}}"])
def test_a_folder_is_searched(place: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", str(project / "more"))
    (project / "more" / "experiment").mkdir(parents=True)
    (project / "more" / "experiment" / "found.yaml").write_text("# @package _global_\nseed: 3\n")
    text = place.format(project / "more")
    (project / "conf" / "config.yaml").write_text(f"{PRIMARY}hydra: {{searchpath: ['{text}']}}\n")
    with opened(project / "conf", "config") as composer:
        assert composer.compose(["experiment=found"]).seed == 3


def test_keys_that_overrides_set() -> None:
    lines = ["a.b=1", "+c={d: 1, e: {f: 2}}", "~g.h", "i=1,2", "++j=[{k: 1}]"]
    assert typed_keys(lines) == ("a.b", "c.d", "c.e.f", "i", "j")
