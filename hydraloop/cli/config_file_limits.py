"""What a config file may set in Hydra's own section: a short list. Everything else must be typed.

A config file can come from anywhere, but a command line only from the user. A config file may choose directories, log
files in the run directory, some environment variables and the values of a sweep. `hydraloop.main(hydra_sections=True)`
lets config files set all of Hydra's options.
"""

from __future__ import annotations

import dataclasses
import functools
import posixpath
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PureWindowsPath
from typing import Any

from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.schemas.root import HYDRA_SETTINGS

_VARIABLES = """
    CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ASCEND_RT_VISIBLE_DEVICES
    ZE_AFFINITY_MASK
    CUBLAS_WORKSPACE_CONFIG CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_DEVICE_MAX_CONNECTIONS NVIDIA_TF32_OVERRIDE
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE PYTORCH_ENABLE_MPS_FALLBACK
    PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING
    PYTORCH_MPS_HIGH_WATERMARK_RATIO PYTORCH_MPS_LOW_WATERMARK_RATIO MALLOC_ARENA_MAX
    OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS NUMEXPR_MAX_THREADS
    VECLIB_MAXIMUM_THREADS RAYON_NUM_THREADS TOKENIZERS_PARALLELISM OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY
    KMP_AFFINITY KMP_BLOCKTIME
    NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_SOCKET_IFNAME NCCL_SOCKET_FAMILY NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_SHM_DISABLE
    NCCL_IB_DISABLE NCCL_IB_HCA NCCL_IB_TIMEOUT NCCL_IB_GID_INDEX NCCL_ALGO NCCL_PROTO NCCL_BUFFSIZE NCCL_NTHREADS
    NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_CROSS_NIC NCCL_NVLS_ENABLE NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT
    TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_AVOID_RECORD_STREAMS
    TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_HIGH_PRIORITY GLOO_SOCKET_IFNAME
    TP_SOCKET_IFNAME TORCH_DISTRIBUTED_DEBUG
    TORCH_CPP_LOG_LEVEL TORCH_SHOW_CPP_STACKTRACES HYDRA_FULL_ERROR TQDM_DISABLE WANDB_MODE TF_CPP_MIN_LOG_LEVEL
    WANDB_SILENT HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE TRANSFORMERS_VERBOSITY
"""
"""For devices, kernels, memory, threads, communication, messages and offline use. Not NCCL_NET_PLUGIN, which loads a
library."""
ENVIRONMENT = frozenset(_VARIABLES.split())
"""Variables that a config may set: exact names, none of which names a program, library, folder or address."""

_PARAMETERS = """
    cluster name timeout_min slurm_time slurm_signal_delay_s slurm_partition slurm_account slurm_qos slurm_constraint
    mem_gb slurm_mem slurm_mem_per_gpu slurm_mem_per_cpu cpus_per_task slurm_cpus_per_gpu
    gpus_per_node slurm_gpus_per_node slurm_gpus_per_task slurm_gres
    nodes tasks_per_node slurm_ntasks_per_node slurm_nodelist slurm_exclude slurm_exclusive slurm_array_parallelism
"""
_SUBMITIT = frozenset(_PARAMETERS.split())
"""Parameters that a config may give submitit: time, partition, memory, CPUs, GPUs, nodes and account. Others can run
commands or send mail."""
_SUBMITIT_VALUE = re.compile(r"[\w.,:=+@*&|()\[\]/-]+")
"""Without line breaks, which submitit would write into the job's shell script, and without interpolations."""

_RAY = ("num_cpus", "num_gpus", "memory")
"""What a config may give Ray."""

_FREE = ("mode", "run.dir", "sweep.dir", "sweep.subdir", "job.name", "searchpath")
"""Options of Hydra that a config file may set to any value here; `check_search_path` and `check_sweep_subdir` look at
some."""
_SET_BY_HYDRA = ("runtime.", "overrides.", "job.config_name", "job.override_dirname", "job.id", "job.num")
"""Hydra replaces what a config file sets here; for `overrides`, see `check_overrides`."""
_CHOICES = "hydra.runtime.choices."
"""Start of the keys that name the selected option of a group."""
_FILES_OF_USERS = ("main", "command-line")
"""Hydra's names for the project's config folder and --config-dir."""
_LOG_FILE = re.compile(r"(job|hydra)_logging\.handlers\.[^.]+\.filename")
_OUTPUT_DIR = re.compile(r"\$\{hydra[.:]runtime\.output_dir\}/")
_JOB_NUMBER = re.compile(r"\$\{hydra[.:]job\.num\}")
_JOB_NAME = re.compile(r"\$\{hydra[.:]job\.name\}")


def check_limits(hydra: Any, typed: Collection[str]) -> None:
    """Refuse options of Hydra that a config file may not set. A composer has to be open.

    Values are compared as written, because `${now:}` and others have another value in the run.

    Args:
        hydra: the node, as `written` returns it.
        typed: keys that the command line sets.

    Raises:
        UserError: names the key.
    """
    _check_sweep_subdir(hydra)
    if ALLOWLIST.hydra_sections:
        return
    options = list(leaves(hydra, "hydra"))
    chosen = {key.removeprefix(_CHOICES): name for key, name in options if key.startswith(f"{_CHOICES}hydra/")}
    defaults, by_key = _defaults(tuple(chosen.items())), dict(options)
    for key, value in options:
        option = key.removeprefix("hydra.")
        is_given = key in typed or (key in defaults and defaults[key] == value)
        problem = None if is_given or "[" in key else _problem(option, value, by_key)
        if problem is not None:
            simple = "null" if value is None else str(value)
            shown = simple if re.fullmatch(r"[\w./-]+", simple) else "…"
            raise UserError(
                problem,
                key=key,
                remedy=f"Type it on the command line: {shlex.quote(f'++{key}={shown}')}\n"
                "  To let config files set all options of Hydra: hydraloop.main(hydra_sections=True) in train.py",
            )


def check_overrides(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse `hydra.overrides` in a config file: Hydra would append what was typed.

    Args:
        cfg: as Hydra has composed it from `overrides`.
    """
    if len(cfg.hydra.overrides.hydra) + len(cfg.hydra.overrides.task) != len(overrides):
        raise UserError("a config file may not set this", key="hydra.overrides", remedy="Remove it from the file.")


def check_ray(cfg: DictConfig, typed: Collection[str]) -> None:
    """Refuse what a config file may not tell Ray: where the cluster is, and what its workers run.

    Args:
        cfg: of a sweep.
        typed: keys that the command line sets.
    """
    section, sweep = "sweep.ray", written(cfg, "sweep")
    for key, value in leaves(sweep.get("ray") if isinstance(sweep, dict) else sweep, section):
        is_harmless = key.removeprefix(f"{section}.") in _RAY and isinstance(value, int | float)
        if "[" not in key and key not in typed and not (value is None or is_harmless):
            raise UserError(
                f"a config file may only set {', '.join(f'{section}.{name}' for name in _RAY)}, as numbers",
                key=key,
                remedy=f"Type it on the command line: {key}=…",
            )


def check_submitit(cfg: DictConfig, typed: Collection[str]) -> None:
    """Refuse parameters of submitit that could run commands, unless they were typed or submitit is trusted.

    Args:
        cfg: of a sweep.
        typed: keys that the command line sets.
    """
    if "submitit" in ALLOWLIST.packages:
        return
    section, sweep = "sweep.submitit", written(cfg, "sweep")  # an interpolation, as written, is refused
    for key, value in leaves(sweep.get("submitit") if isinstance(sweep, dict) else sweep, section):
        is_harmless = key.removeprefix(f"{section}.") in _SUBMITIT and _SUBMITIT_VALUE.fullmatch(str(value))
        if "[" not in key and key not in typed and not (value is None or is_harmless):
            raise UserError(
                f"a config file may not set this to {value!r}: only harmless parameters, as plain numbers and words",
                key=key,
                remedy=f"Type it on the command line: {key}=…. To trust all parameters, {ALLOWLIST.remedy('submitit')}",
            )


def written(cfg: DictConfig, name: str) -> Any:
    """Return a node of a config as written: as plain containers, with interpolations. None if it does not exist."""
    raw: Any = OmegaConf.to_container(cfg, resolve=False)
    return raw.get(name)


def leaves(node: object, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each value in nested containers. A list is a value, and so is each entry of it."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from leaves(value, f"{key}.{name!s}")
        return
    yield key, node
    if isinstance(node, list):
        for index, value in enumerate(node):
            yield from leaves(value, f"{key}[{index}]")


@functools.lru_cache(maxsize=8)
def _defaults(choices: tuple[tuple[str, str | None], ...]) -> dict[str, Any]:
    """Return Hydra's options by key without any config file of the user.

    Args:
        choices: the selected options of Hydra's groups. Those that only a file of the user has are left out.
    """
    loader = GlobalHydra.instance().config_loader()
    sources = [source for source in loader.get_sources() if source.provider not in _FILES_OF_USERS]
    found = dict(leaves(dataclasses.asdict(HydraConf()), "hydra"))
    for group, name in choices:
        option = f"{group}/{name}"
        loaded = next((source.load_config(option) for source in sources if source.is_config(option)), None)
        if loaded is not None:
            package = loaded.header.get("package") or group.replace("/", ".")
            found.update(leaves(OmegaConf.to_container(loaded.config, resolve=False), package))
    found.update(leaves(HYDRA_SETTINGS, "hydra"))
    return found


def _problem(option: str, value: Any, by_key: Mapping[str, Any]) -> str | None:
    """Return why a config file may not set an option of Hydra to a value; None if it may.

    Args:
        option: without `hydra.`.
        by_key: all options, as written.
    """
    if option in _FREE or option.startswith(_SET_BY_HYDRA):
        return None
    if option == "output_subdir":
        is_own = value is None or (value.startswith(".hydra") and ".." not in value.split("/") and "${" not in value)
        return None if is_own else f"{value} could hold a config.yaml that the run would overwrite; use .hydra"
    if option.startswith("job.env_set."):
        name = option.removeprefix("job.env_set.")
        if name in ENVIRONMENT or name in by_key["hydra.job.env_copy"]:  # Hydra copies the value from the shell
            return None
        return "a config file may not set this environment variable, which could run code or send credentials"
    if option.startswith("sweeper.params."):
        return "an interpolation is refused here, because its value was not checked" if "${" in str(value) else None
    if _LOG_FILE.fullmatch(option):
        problem = "may be a file outside the run directory, or is no log; use ${hydra.runtime.output_dir}/name.log"
        return None if _is_log_in_run(str(value), str(by_key.get("hydra.job.name", "${"))) else f"{value} {problem}"
    return "a config file may not set this option of Hydra"


def _is_log_in_run(path: str, job_name: str) -> bool:
    """Return whether a file as written is in the run directory and ends in `.log`.

    `${hydra.job.num}` may be in its name, and so may `${hydra.job.name}` if that has no interpolation.
    """
    inside = _OUTPUT_DIR.match(path)
    if inside is None:
        return False
    rest = _JOB_NAME.sub(lambda found: job_name, _JOB_NUMBER.sub("0", path[inside.end() :]))
    return "${" not in rest and not _leads_out(rest) and rest.endswith(".log")


def _leads_out(path: str) -> bool:
    """Return whether a relative path, of any operating system, leads out of its folder."""
    normal = posixpath.normpath(path.replace("\\", "/"))
    return normal.startswith("/") or normal.split("/")[0] == ".." or bool(PureWindowsPath(normal).drive)


def _check_sweep_subdir(hydra: Any) -> None:
    """Refuse a job's folder outside its sweep, typed or not. Other folders are checked when they are made."""
    sweep = hydra.get("sweep") if isinstance(hydra, dict) else None
    subdir, base = (str(sweep.get(name)) for name in ("subdir", "dir")) if isinstance(sweep, dict) else ("", "")
    if _leads_out(subdir.removeprefix(f"{base.rstrip('/')}/")):
        raise UserError(
            f"{subdir} is outside the sweep's directory, where a job could overwrite another run",
            key="hydra.sweep.subdir",
            remedy="Name a folder in hydra.sweep.dir: ${hydra.job.num}.",
        )
