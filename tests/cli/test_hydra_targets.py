from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.conf import HydraConf
from omegaconf import OmegaConf

from hydraloop.cli import command
from hydraloop.cli.config_file_limits import written
from hydraloop.cli.hydra_targets import check_targets
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


def config(**sections: Any) -> Any:
    """Hydra's section as written."""
    cfg = OmegaConf.create({"hydra": OmegaConf.structured(HydraConf)})
    for section, value in sections.items():
        cfg.hydra[section] = value
    return written(cfg, "hydra")


def handler(**options: Any) -> dict[str, Any]:
    return {"version": 1, "handlers": {"x": options}}


@pytest.mark.parametrize(
    "target",
    [
        "hydra.experimental.callbacks.LogJobReturnCallback",
        "own_callbacks.Mine",
    ],
)
def test_targets_of_hydra_and_of_the_project_pass(target: str) -> None:
    check_targets(config(callbacks={"x": {"_target_": target, 5: [6]}, "none": None}))


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
def test_other_targets_are_refused(target: str) -> None:
    with pytest.raises(UserError) as caught:
        check_targets(config(callbacks={"x": [{"deep": {"_target_": target}}]}))
    assert caught.value.key == "hydra.callbacks.x[0].deep._target_"
    assert caught.value.remedy


def test_a_trusted_target_passes() -> None:
    cfg = config(
        callbacks={"x": {"_target_": "torch.hub.load"}}, job_logging=handler(**{"()": "logging.config.listen"})
    )
    with pytest.raises(UserError, match=r'trusted=\["torch\.hub\.load"\]'):
        check_targets(cfg)
    ALLOWLIST.trust(["torch.hub.load", "logging.config.listen"])
    check_targets(cfg)


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
    check_targets(config(**{section: handler(**options)}))


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
        ({"queue": "os.abort"}, "queue"),
        ({"listener": "os.abort"}, "listener"),
        ({"queue": {"()": "os.abort"}}, "queue.()"),
        ({"class": "logging.StreamHandler", "stream": "ext://os.abort"}, "stream"),
        ({"class": "logging.StreamHandler", "list": ["ext://sys.modules"]}, "list[0]"),
    ],
)
@pytest.mark.parametrize("section", ["job_logging", "hydra_logging"])
def test_other_factories_are_refused(section: str, options: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError) as caught:
        check_targets(config(**{section: handler(**options)}))
    assert caught.value.key == f"hydra.{section}.handlers.x.{where}"
    assert caught.value.remedy


def test_a_config_without_the_sections_passes() -> None:
    check_targets(config())
    check_targets(None)


def test_composing_refuses() -> None:
    with composer() as opened, pytest.raises(UserError) as caught:
        command.compose_job(["+hydra.callbacks.x._target_=torch.hub.load"], opened)
    assert caught.value.key == "hydra.callbacks.x._target_"
