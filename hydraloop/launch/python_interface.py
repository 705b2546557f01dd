"""hydraloop from Python: `compose` makes a config, `build` an engine to train, `load` the engine of a finished run,
`records` reads what a run has logged."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from hydraloop import schemas
from hydraloop.config import arguments
from hydraloop.config.checks import compose_job, validate
from hydraloop.config.compose import opened
from hydraloop.config.value_checks import check_strategy
from hydraloop.files import console
from hydraloop.files.config_yaml import remember_config
from hydraloop.files.metrics_log import read_rows
from hydraloop.files.run_directory import check_holds_run
from hydraloop.launch.plan import plan_build
from hydraloop.safety.allowlist import ALLOWLIST, Advice, from_python

if TYPE_CHECKING:
    from torch import nn

    from hydraloop.engine.distributed.comm import Distributed
    from hydraloop.engine.engine import Engine
    from hydraloop.engine.hook import Hook
    from hydraloop.engine.loaders import Loaders


class _Composed(NamedTuple):
    """What `build` needs to know of a config beside its contents."""

    typed: tuple[str, ...]
    """The keys that the overrides set."""
    trust: tuple[Path, list[str], Advice]
    """Arguments of `ALLOWLIST.trusting`."""


_composed: dict[int, _Composed] = {}
"""By the `id` of a config of `compose`, while it exists."""


def compose(
    overrides: Sequence[str] = (),
    *,
    config_path: str | Path = "conf",
    config_name: str = "config",
    trusted: Sequence[str] = (),
    folder: str | Path | None = None,
) -> DictConfig:
    """Return the config of one run, checked as on the command line.

    When `hydraloop.build` resumes a run with this object (not with a copy), it treats the overrides as typed. It also
    trusts what this call trusts.

    Args:
        overrides: as typed on the command line, `["hooks=[ema]", "optimizer.lr=1e-2"]`.
        config_path: the folder with config files, relative to the calling file (in a notebook: the working directory).
            If there is no folder `conf`, the config is `hydraloop/project`: the default of each group, without a model
            and data.
        config_name: the primary config in it, without `.yaml`.
        trusted: packages whose classes a config may name in `_target_`, in addition to the allowlist's own.
        folder: used instead of the calling file's folder.

    Raises:
        UserError: a mistake in the overrides or the config files.
    """
    folder = Path(folder or _folder_of(sys._getframe(1).f_code.co_filename))
    trust = folder, _listed(trusted), from_python("compose")
    configs = folder / config_path
    if (str(config_path), config_name) == ("conf", "config") and not configs.is_dir():
        configs, config_name = Path(schemas.__file__).parent, "hydraloop/project"  # no config files
    with ALLOWLIST.trusting(*trust), opened(configs, config_name) as composer:
        lines, _ = arguments.with_hook_lists(_listed(overrides))
        cfg = compose_job(lines, composer)
    with open_dict(cfg):
        del cfg["hydra"]
    _composed[id(cfg)] = _Composed(arguments.typed_keys(lines), trust)
    weakref.finalize(cfg, _composed.pop, id(cfg), None)
    return cfg


def build(
    cfg: DictConfig | None = None,
    *,
    run_dir: str | Path | None = None,
    distributed: Distributed | None = None,
    task: nn.Module | None = None,
    loaders: Loaders | Mapping[str, Any] | None = None,
    optimizer: Any = None,
    hooks: Mapping[str, Hook] | None = None,
    trusted: Sequence[str] = (),
    folder: str | Path | None = None,
) -> Engine:
    """Return an engine, ready to train, from a config. Finished objects replace parts of the config.

    If a launcher (torchrun) has started several processes, each of them calls `build`, and they train together. The
    engine prints what the command line prints, unless the script has set up logging. It has its own random numbers:
    they start from `seed`, and neither another engine nor the caller draws from them.

    Args:
        cfg: of `compose`, or the `.hydra/config.yaml` of a run (`OmegaConf.load`). It is not changed. None: that of
            `compose()`.
        run_dir: the directory for the run's files. None: a new one under `outputs/`, or that of the resumed run.
        distributed: the ranks. None: as the launcher's environment variables say.
        task: used instead of that of the config. Or a model, which the task of the config trains.
        loaders: used instead of all those of the config, by split (`{"train": …, "val": …}`). A split that is not given
            is empty.
        optimizer: used instead of that of the config: an optimizer, several by name, or a function of the list of
            trained parameters (`functools.partial(torch.optim.SGD, lr=0.1)`), which FSDP2 needs.
        hooks: by name, in addition to those of the config.
        trusted: packages whose classes a config may name in `_target_`, in addition to the allowlist's own.
        folder: whose classes a config may name. None: that of the calling file.

    Raises:
        UserError: an option that cannot be built; names the key and the fix.
        Exception: any error of a user's own constructor.
    """
    folder = Path(folder or _folder_of(sys._getframe(1).f_code.co_filename))
    console.ensure()
    from hydraloop.engine.distributed.process_group import connect
    from hydraloop.launch.build import build as build_engine
    from hydraloop.launch.given_objects import Parts

    parts = Parts(task, loaders or {}, optimizer, hooks or {})
    cfg = compose(folder=folder, trusted=trusted) if cfg is None else cfg
    with ALLOWLIST.trusting(folder, _listed(trusted), ALLOWLIST.advice or from_python("build")):
        remember_config(cfg)
        validate(cfg)
        distributed = distributed or connect(cfg.distributed, cfg.engine.device)
        check_strategy(cfg.distributed.strategy, several=distributed.world_size > 1)
        plan, lock = plan_build(cfg, None if run_dir is None else Path(run_dir), _typed(cfg), distributed)
        with ALLOWLIST.trusting(*_composed[id(cfg)].trust) if id(cfg) in _composed else nullcontext():
            engine = build_engine(plan, distributed, parts=parts, lock=lock)
            trust = ALLOWLIST.folders, ALLOWLIST.packages
    engine.messages.provide("trust", lambda: trust)  # for trackers, which start later
    return engine


def load(
    run_dir: str | Path,
    *,
    checkpoint: str | Path = "best",
    splits: Sequence[str] = (),
    overrides: Sequence[str] = (),
    task: nn.Module | None = None,
    loaders: Loaders | Mapping[str, Any] | None = None,
    hooks: Mapping[str, Hook] | None = None,
    distributed: Distributed | None = None,
    trusted: Sequence[str] = (),
    folder: str | Path | None = None,
) -> Engine:
    """Return the engine of a finished run with its weights, to validate, test or predict. It writes no file.

    The task is in eval mode. The engine has no optimizer, and of the hooks only those that change an evaluation
    (`tta`). It runs in this process, or with the ranks of a launcher, whatever the number of ranks was that trained.

    Args:
        run_dir: the run directory. The Python files in it are not trusted.
        checkpoint: `best`: the best one if the run has one, otherwise the last; `last`; or a file. The weights are the
            averaged ones if there are any (`weights=raw` in `overrides`: the raw ones).
        splits: the data sets to build (`test`). Empty: none, so that a model can be used without its data.
        overrides: changes of the run's config, `["data.test.root=/data"]`.
        task: as of `build`.
        loaders: used in addition to `splits`, as of `build`.
        hooks: as of `build`. Those that do not change an evaluation are not used.
        distributed: the ranks. None: as the launcher's environment variables say.
        trusted: packages whose classes the config may name in `_target_`, in addition to the allowlist's own.
        folder: whose classes the config may name. None: that of the calling file.

    Raises:
        UserError: there is no run or no checkpoint, the weights do not fit, or an option cannot be built.
    """
    folder = Path(folder or _folder_of(sys._getframe(1).f_code.co_filename))
    from hydraloop.launch.load_run import find_run, load_run

    with ALLOWLIST.trusting(folder, _listed(trusted), from_python("load")):
        found = find_run(Path(run_dir), checkpoint, _listed(overrides))
        return load_run(found, _listed(splits), task, loaders, hooks, distributed)


def records(run: str | Path) -> list[dict[str, Any]]:
    """Return the records of a run as rows, for `pandas.DataFrame(hydraloop.records("outputs/…"))`.

    A row has `mode` (train, val or test), `epoch`, `iteration`, the numbers and texts that were logged, and `timestamp`
    (seconds since 1970). The run may still be training.

    Args:
        run: the run directory.

    Raises:
        UserError: it is not a run directory.
    """
    check_holds_run(Path(run))
    return read_rows(Path(run))


def _listed(texts: Sequence[str]) -> list[str]:
    """Return a list; a text alone is one entry, not a list of letters."""
    return [texts] if isinstance(texts, str) else list(texts)


def _typed(cfg: DictConfig) -> Sequence[str]:
    """Return the keys that were typed for a config; for one of another program, those of Hydra's running job."""
    if id(cfg) in _composed:
        return _composed[id(cfg)].typed
    return arguments.typed_keys(HydraConfig.get().overrides.task) if HydraConfig.initialized() else ()


def _folder_of(filename: str) -> Path:
    path = Path(filename)
    return path.resolve().parent if path.is_file() else Path.cwd()
