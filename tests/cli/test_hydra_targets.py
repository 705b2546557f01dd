from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from hydraloop.cli import command
from hydraloop.cli.hydra_targets import check_hydra
from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST
from tests.config.composed import composer

CALLBACK = """
import torch
from hydra.experimental.callback import Callback

class Mine(Callback):
    pass
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a callback, on `sys.path`; what this process trusts is put back afterwards."""
    (tmp_path / "own_callbacks.py").write_text(CALLBACK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ALLOWLIST, "_folders", {tmp_path.resolve()})
    monkeypatch.setattr(ALLOWLIST, "_trusted", set())
    yield tmp_path
    sys.modules.pop("own_callbacks", None)


def config(**sections: Any) -> DictConfig:
    cfg = OmegaConf.create({"hydra": OmegaConf.structured(HydraConf), "evil": {"_target_": "os.abort"}})
    for section, value in sections.items():
        cfg.hydra[section] = value
    return cfg


def handler(**options: Any) -> dict[str, Any]:
    return {"version": 1, "handlers": {"x": options}}


@pytest.mark.parametrize(
    "target",
    [
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        "hydra.experimental.callbacks.LogJobReturnCallback",
        "own_callbacks.Mine",
    ],
)
def test_targets_of_hydra_and_of_the_project_pass(target: str) -> None:
    check_hydra(config(callbacks={"x": {"_target_": target, 5: [6]}, "none": None}))


@pytest.mark.parametrize(
    "target",
    [
        "torch.hub.load",
        "os.system",
        "hydra.utils.get_method",
        "hydra._internal.core_plugins.basic_launcher.run_job",
        "hydra._internal.core_plugins.basic_launcher.Path",
        "hydra._internal.core_plugins.basic_launcher.Path.unlink",
        "hydra_plugins.os.system",
        "own_callbacks.torch.load",
        "hydra._internal.core_plugins",
        "hydra.experimental.callbacks.PickleJobInfoCallback",
        "???",
        "${hydra.job.num}",
    ],
)
@pytest.mark.parametrize("section", ["callbacks", "launcher", "sweeper"])
def test_other_targets_are_refused(section: str, target: str) -> None:
    with pytest.raises(UserError) as caught:
        check_hydra(config(**{section: {"x": [{"deep": {"_target_": target}}]}}))
    assert caught.value.key == f"hydra.{section}.x[0].deep._target_"
    assert caught.value.remedy


LATER = "${evil.${hydra.run.dir}}"
"""Resolves to another value in the run than here: by then the directory is written in another way."""


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"callbacks": {"x": "${evil}"}}, "callbacks.x"),
        ({"callbacks": {"x": {"y": ["${evil}"]}}}, "callbacks.x.y[0]"),
        ({"callbacks": {"x": {"_target_": LATER}}}, "callbacks.x._target_"),
        ({"callbacks": {"x": {"_target_": f"own_callbacks.{LATER}"}}}, "callbacks.x._target_"),
        ({"launcher": "${evil}"}, "launcher"),
        ({"sweeper": {"params": {"seed": f"1,{LATER}"}}}, "sweeper.params.seed"),
        ({"job_logging": LATER}, "job_logging"),
        ({"job_logging": {"handlers": {"x": LATER}}}, "job_logging.handlers.x"),
        ({"job_logging": {"handlers": {"x": {"class": LATER}}}}, "job_logging.handlers.x.class"),
        ({"job_logging": {"formatters": {"x": {"format": f"e{LATER}"}}}}, "job_logging.formatters.x.format"),
        ({"hydra_logging": {"root": {"level": "${now:%S}"}}}, "hydra_logging.root.level"),
    ],
)
def test_interpolations_are_refused_unless_they_are_typed(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match="an interpolation is refused here") as caught:
        check_hydra(config(**sections))
    assert caught.value.key == f"hydra.{key}"
    check_hydra(config(callbacks={"x": {"folder": "${hydra.run.dir}/here"}}))
    check_hydra(config(hydra_logging={"root": {"level": "${now:%S}"}}), {"hydra.hydra_logging.root.level"})


def test_the_name_of_a_launchers_jobs_may_be_that_of_the_program_as_written() -> None:
    cfg = config(launcher={"name": "${hydra.job.name}"})
    cfg.hydra.job.name = "train"
    check_hydra(cfg)
    for value in (LATER, "${evil}"):
        cfg.hydra.job.name = value
        with pytest.raises(UserError, match="an interpolation is refused here") as caught:
            check_hydra(cfg)
        assert caught.value.key == "hydra.launcher.name"


def test_a_trusted_target_passes() -> None:
    cfg = config(
        callbacks={"x": {"_target_": "torch.hub.load"}}, job_logging=handler(**{"()": "logging.config.listen"})
    )
    with pytest.raises(UserError, match=r'trusted=\["torch\.hub\.load"\]'):
        check_hydra(cfg)
    ALLOWLIST.trust(["torch.hub.load", "logging.config.listen"])
    check_hydra(cfg)


@pytest.mark.parametrize("section", ["launcher", "sweeper"])
def test_an_installed_plugin_has_to_be_trusted(
    section: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its options may run code: optuna's `custom_search_space` names any function."""
    installed = tmp_path_factory.mktemp("installed")
    (installed / "hydra_plugins" / "some_plugin").mkdir(parents=True)
    (installed / "hydra_plugins" / "some_plugin" / "code.py").write_text("class Plugin:\n    pass\n")
    monkeypatch.syspath_prepend(str(installed))
    cfg = config(**{section: {"_target_": "hydra_plugins.some_plugin.code.Plugin", "custom": "os.abort"}})
    with pytest.raises(UserError, match=r'trusted=\["hydra_plugins\.some_plugin"\]') as caught:
        check_hydra(cfg)
    assert caught.value.key == f"hydra.{section}._target_"
    ALLOWLIST.trust(["hydra_plugins.some_plugin"])
    check_hydra(cfg)
    for name in [name for name in sys.modules if name.startswith("hydra_plugins.some_plugin")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "options",
    [
        {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"},
        {"class": "logging.StreamHandler", "stream": "ext://sys.stderr"},
        {"class": "logging.FileHandler", "filename": "${hydra.runtime.output_dir}/a.log"},
        {"class": "logging.FileHandler", "filename": "${hydra:runtime.output_dir}/${hydra.job.num}.log"},
        {"()": "logging.handlers.RotatingFileHandler", "filename": "${hydra.runtime.output_dir}/a.log"},
        {"class": "hydraloop.cli.console.ConsoleHandler"},
        {"filters": [{"()": "logging.Filter"}]},
    ],
)
@pytest.mark.parametrize("section", ["job_logging", "hydra_logging"])
def test_handlers_of_the_standard_library_pass(section: str, options: dict[str, Any]) -> None:
    check_hydra(config(**{section: handler(**options)}))


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"()": "torch.load", "f": "evil.pt", "weights_only": False}, "()"),
        ({"class": "os.abort"}, "class"),
        ({"factory": "os.abort"}, "factory"),
        ({"()": "logging.os.abort"}, "()"),
        ({"()": "logging.config.fileConfig"}, "()"),
        ({"()": "logging.handlers.os.abort"}, "()"),
        ({"()": "logging.shutdown"}, "()"),
        ({"()": "logging.config.DictConfigurator"}, "()"),
        ({"()": "colorlog.sys.exit"}, "()"),
        ({"()": "hydraloop.cli.console.sys.exit"}, "()"),
        ({"()": "ext://os.abort"}, "()"),
        ({"()": "cfg://root"}, "()"),
        ({"()": "${hydra.job.num}"}, "()"),
        ({"class": "logging.handlers.HTTPHandler", "host": "evil"}, "class"),
        ({"()": "logging.handlers.SysLogHandler", "address": ["evil", 514]}, "()"),
        ({"()": "colorlog.ColoredFormatter"}, "()"),
        ({"queue": "os.abort"}, "queue"),
        ({"listener": "os.abort"}, "listener"),
        ({"queue": {"()": "os.abort"}}, "queue.()"),
        ({"class": "logging.StreamHandler", "stream": "ext://os.abort"}, "stream"),
        ({"class": "logging.StreamHandler", "stream": "${evil.${hydra.job.num}}"}, "stream"),
        ({"class": "logging.StreamHandler", "list": ["ext://sys.modules"]}, "list[0]"),
    ],
)
@pytest.mark.parametrize("section", ["job_logging", "hydra_logging"])
def test_other_factories_are_refused(section: str, options: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError) as caught:
        check_hydra(config(**{section: handler(**options)}))
    assert caught.value.key == f"hydra.{section}.handlers.x.{where}"
    assert caught.value.remedy


@pytest.mark.parametrize("section", ["formatters", "filters"])
def test_a_handler_is_not_taken_for_a_formatter_which_would_empty_a_file(section: str) -> None:
    options = {"class": "logging.FileHandler", "format": "precious.py", "datefmt": "w", "style": "utf-8"}
    with pytest.raises(UserError) as caught:
        check_hydra(config(job_logging={section: {"handlers": options}}))
    assert caught.value.key == f"hydra.job_logging.{section}.handlers.class"
    check_hydra(config(job_logging={"formatters": {"x": {"()": "colorlog.ColoredFormatter"}}}))


def test_a_config_without_the_sections_passes() -> None:
    check_hydra(config())
    check_hydra(OmegaConf.create({"seed": 1}))


@pytest.mark.parametrize("option", ["default", "stdout", "disabled", "none", "hydraloop"])
def test_hydras_own_logging_passes(option: str) -> None:
    with composer() as opened:
        assert command.compose_job([f"hydra/job_logging={option}"], opened).seed is not None


def test_composing_refuses() -> None:
    with composer() as opened, pytest.raises(UserError) as caught:
        command.compose_job(["+hydra.callbacks.x._target_=torch.hub.load"], opened)
    assert caught.value.key == "hydra.callbacks.x._target_"
