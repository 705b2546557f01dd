"""`hydraloop.compose`: a config from Python, composed and checked as on the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, open_dict

from hydraloop.cli import arguments
from hydraloop.cli.command import compose_job
from hydraloop.cli.compose import opened
from hydraloop.safety import typed_options as typed
from hydraloop.safety.allowlist import ALLOWLIST


def compose(
    overrides: Sequence[str] = (),
    *,
    config_path: str | Path = "conf",
    config_name: str = "config",
    trusted: Sequence[str] = (),
    folder: Path | None = None,
) -> DictConfig:
    """Return the config of one run, checked as on the command line.

    When `hydraloop.build` resumes a run with this object (not with a copy), it treats the overrides as typed.

    Args:
        overrides: as typed on the command line, `["hooks=[ema]", "optimizer.lr=1e-2"]`.
        config_path: the folder with config files, relative to the calling file (in a notebook: the working directory).
        config_name: the primary config in it, without `.yaml`.
        trusted: packages whose classes a config may name in `_target_`, in addition to the allowlist's own.
        folder: used instead of the calling file's folder.

    Raises:
        UserError: a mistake in the overrides or the config files.
    """
    folder = folder or _folder_of(sys._getframe(1).f_code.co_filename)
    ALLOWLIST.trust_folder(folder)
    ALLOWLIST.trust(trusted)
    with opened(folder / config_path, config_name) as composer:
        lines, _ = arguments.with_hook_lists(overrides)
        cfg = compose_job(lines, composer)
    with open_dict(cfg):
        del cfg["hydra"]
    typed.remember(cfg, typed.keys_of(lines))
    return cfg


def _folder_of(filename: str) -> Path:
    path = Path(filename)
    return path.resolve().parent if path.is_file() else Path.cwd()
