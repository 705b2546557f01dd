"""Where the log messages of a rank go."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hydraloop.launch.rank_log import _config
from hydraloop.schemas.root import JOB_LOGGING

FILE = Path("/run/rank1.log")


def config(**changes: Any) -> dict[str, Any]:
    """Hydraloop's logging config with changes."""
    made = OmegaConf.create({"hydra": {"runtime": {"output_dir": "/run"}}, "logging": {**JOB_LOGGING, **changes}})
    plain = OmegaConf.to_container(made.logging, resolve=True)
    assert isinstance(plain, dict)
    return dict(plain)  # type: ignore[arg-type]


def test_rank_0_has_the_config_as_it_is() -> None:
    assert _config(config(), Path("/run/train.log"), 0) == config()


def test_another_rank_writes_to_its_own_file_only() -> None:
    found = _config(config(), FILE, 1)
    assert found["root"] == {"level": "INFO", "handlers": ["file"]}
    assert found["handlers"]["file"]["filename"] == str(FILE)


def test_a_file_is_not_emptied() -> None:
    """The launching process has written to it."""
    handler = {"class": "logging.FileHandler", "filename": "/run/train.log", "mode": "w"}
    for rank in (0, 1):
        assert _config(config(handlers={"file": handler}), FILE, rank)["handlers"]["file"]["mode"] == "a"


def test_without_a_file_it_is_the_redirected_terminal() -> None:
    console = {"console": {"class": "logging.StreamHandler"}}
    made = config(handlers=console, root={"level": logging.DEBUG, "handlers": ["console"]})
    assert _config(made, FILE, 1) == made
