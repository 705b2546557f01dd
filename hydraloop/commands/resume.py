"""`python train.py resume <run> [overrides]`: continue a run with its saved config. Imports no torch, except for a run
that was started from Python, or whose config does not resolve here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.config import arguments
from hydraloop.config.checks import Draft
from hydraloop.config.compose import Composer
from hydraloop.config.hook_checks import hook_nodes
from hydraloop.config.saved_config import composed
from hydraloop.errors import UserError, missing_path
from hydraloop.files.checkpoint_files import newest_intact
from hydraloop.files.config_yaml import flattened
from hydraloop.files.result import PAUSE
from hydraloop.files.run_directory import checkpoint_folders, config_file, holds_run, run_of
from hydraloop.files.secrets import MASK
from hydraloop.safety.allowlist import ALLOWLIST

NAME = "resume"


def check_resume(path: Path, lines: Sequence[str], composer: Composer) -> Draft:
    """Return the draft that continues a run, with its saved config and the node `hydra`, checked.

    Args:
        path: the run directory, or a checkpoint file in it.
        lines: changes of the config, as typed.
        composer: of the config `run_config.NAME`.

    Raises:
        UserError: there is no run, or it cannot be continued from its config, or a mistake in the overrides.
    """
    run_dir = run_of(path) if path.exists() else None
    if run_dir is None or not holds_run(run_dir):
        otherwise = f"Name one, outputs/<date>/<run>. For a sweep, repeat its command with sweep.resume={path}"
        problem = f"{path} is neither a run directory nor a checkpoint of one"
        raise UserError(problem, key=NAME, remedy=missing_path(path, otherwise))
    ALLOWLIST.distrust(run_dir)

    @cache
    def meta() -> Mapping[str, Any]:
        return _meta(path if path.is_file() else newest_intact(*checkpoint_folders(run_dir)))

    _check_given(run_dir, meta)
    changes = {"resume": str(path), "load_from": None, "resume_strict": True, "detach": False, PAUSE: None}
    typed = arguments.typed(lines)
    cfg = composed(run_dir, typed.lines, composer, meta, changes)
    _check_secrets(cfg)
    _check_out_dirs(cfg, run_dir, typed.keys)
    return Draft(overrides=typed.lines, cfg=cfg, typed=typed.keys)


def _meta(checkpoint: Path | None) -> Mapping[str, Any]:
    if checkpoint is None:
        return {}  # that the run has no checkpoint is reported when its directory is determined
    from hydraloop.engine.checkpoint.format import load  # imports torch

    found: Mapping[str, Any] = load(checkpoint, mmap=True, only=()).get("meta") or {}
    return found


def _check_given(run_dir: Path, meta: Any) -> None:
    """Refuse a run that got objects from Python. Hydra's records show that a run was started from the command line."""
    file = config_file(run_dir)
    if file is None or file.with_name("hydra.yaml").exists():
        return
    given: Sequence[str] = meta().get("given", ())
    if given:
        raise UserError(
            f"the run in {run_dir} got {', '.join(given)} as objects from Python, which its config does not describe",
            key=NAME,
            remedy=f"Continue it from Python: hydraloop.build(hydraloop.compose(['resume={run_dir}']), …).",
        )


def _check_out_dirs(cfg: DictConfig, run_dir: Path, typed: Sequence[str]) -> None:
    """Refuse to write checkpoints outside of the run, which may come from someone else, unless the folder was typed."""
    for hook, node in hook_nodes(cfg):
        key, folder = f"{hook}.out_dir", node.get("out_dir")
        is_inside = folder is None or Path(folder).expanduser().resolve().is_relative_to(run_dir.resolve())
        if key not in typed and not is_inside:
            raise UserError(
                f"{folder} is outside of {run_dir}, and a run may come from someone else",
                key=key,
                remedy=f"To write there, add {shlex.quote(f'{key}={folder}')}\n"
                f"  To write into the run directory, add {key}=null",
            )


def _check_secrets(cfg: DictConfig) -> None:
    """Refuse a config with a masked secret: `***` must not be used as its value."""
    for entry, value in flattened(OmegaConf.to_container(cfg)).items():
        key = re.sub(r"(\.\d+)+$", "", entry)  # of a list
        if isinstance(value, str) and MASK in value:
            raise UserError(
                "its value is a secret, which is masked in the files of the run",
                key=key,
                remedy=f"Add the option {key} with its value to the command.",
            )
