"""`hydra.searchpath`: folders and trusted packages; no other module is imported to look for config files in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydraloop.cli import compose as composing
from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST

PRIMARY = "defaults: [hydraloop, _self_]\nhydra:\n  searchpath: [{}]\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a package, beside a package that does not belong to it and leaves a file `executed`."""
    (tmp_path / "project" / "conf").mkdir(parents=True)
    for folder in ("project/own_configs", "elsewhere/evil_configs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
        (tmp_path / folder / "group").mkdir()
        (tmp_path / folder / "group" / "extra.yaml").write_text("experiment_name: found\n")
        monkeypatch.syspath_prepend(str((tmp_path / folder).parent))
    marker = tmp_path / "executed"
    (tmp_path / "elsewhere" / "evil_configs" / "__init__.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    monkeypatch.setattr(ALLOWLIST, "_folders", {(tmp_path / "project").resolve()})
    monkeypatch.setattr(ALLOWLIST, "_trusted", set())
    yield tmp_path / "project"
    for name in ("own_configs", "evil_configs"):
        sys.modules.pop(name, None)


def composed(project: Path, entry: str | None, *overrides: str) -> str:
    """The experiment's name, with an entry in the primary config."""
    (project / "conf" / "config.yaml").write_text(PRIMARY.format(f"'{entry}'" if entry else ""))
    with composing.opened(project / "conf", "config") as composer:
        return str(composer.compose(overrides).experiment_name)


@pytest.mark.parametrize("entry", ["pkg://evil_configs", "structured://evil_configs", "pkg://evil_configs/inner"])
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.filterwarnings("ignore:provider")  # Hydra's, of a path that is not there
def test_a_package_that_is_not_trusted_is_not_imported(entry: str, typed: bool, project: Path) -> None:
    overrides = [f"hydra.searchpath=['{entry}']"] if typed else []
    with pytest.raises(UserError, match="Hydra would import evil_configs") as caught:
        composed(project, None if typed else entry, *overrides)
    assert caught.value.key == "hydra.searchpath"
    assert 'trusted=["evil_configs"]' in str(caught.value.remedy)
    assert not (project.parent / "executed").exists()


@pytest.mark.parametrize("entry", ["s3://bucket/conf", "pkg://", "pkg://.evil_configs", "pkg://hydra.test_utils"])
def test_other_places_are_refused(entry: str, project: Path) -> None:
    with pytest.raises(UserError) as caught:
        composed(project, entry)
    assert caught.value.key == "hydra.searchpath"


@pytest.mark.parametrize("entry", ["file://FOLDER", "FOLDER", "pkg://own_configs"])
def test_folders_and_packages_of_the_project_are_searched(entry: str, project: Path) -> None:
    found = composed(project, entry.replace("FOLDER", str(project / "own_configs")), "+group@_global_=extra")
    assert found == "found"


def test_a_trusted_package_is_searched(project: Path) -> None:
    ALLOWLIST.trust(["evil_configs"])
    assert composed(project, "pkg://evil_configs", "+group@_global_=extra") == "found"
    assert (project.parent / "executed").exists()
