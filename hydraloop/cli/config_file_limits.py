"""Refuse options in config files that could run code or overwrite files.

A config can come from anywhere, but a command line only from the user. So environment variables and parameters of
submitit outside a list, and files outside the run directory, are accepted only if their key is typed:
`++hydra.job.env_set.NAME=value`.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Collection, Iterator
from pathlib import PureWindowsPath
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST

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

_OUTPUT_DIR = re.compile(r"\$\{hydra[.:]runtime\.output_dir\}/")
_JOB_NUMBER = re.compile(r"\$\{hydra[.:]job\.num\}")
_JOB_NAME = re.compile(r"\$\{hydra[.:]job\.name\}")


def check_limits(cfg: DictConfig, typed: Collection[str]) -> None:
    """Refuse variables and files that were not typed on the command line.

    Args:
        cfg: with the node `hydra`.
        typed: keys that the command line sets.
    """
    raw: Any = OmegaConf.to_container(cfg, resolve=False)
    hydra = raw.get("hydra")
    if not isinstance(hydra, dict):
        return
    _check_environment(hydra.get("job"), typed)
    if "hydra.output_subdir" not in typed:
        _check_output_subdir(hydra.get("output_subdir"))
    _check_sweep_subdir(hydra.get("sweep"))


def check_submitit(cfg: DictConfig, typed: Collection[str]) -> None:
    """Refuse parameters of submitit that could run commands, unless they were typed or submitit is trusted.

    Args:
        cfg: of a sweep.
        typed: keys that the command line sets.
    """
    if "submitit" in ALLOWLIST.packages:
        return
    section = "sweep.submitit"
    raw: Any = OmegaConf.to_container(cfg, resolve=False)
    sweep = raw.get("sweep")  # an interpolation, as written, is refused below
    for key, value in _values(sweep.get("submitit") if isinstance(sweep, dict) else sweep, section):
        is_harmless = key.removeprefix(f"{section}.") in _SUBMITIT and _SUBMITIT_VALUE.fullmatch(str(value))
        if key not in typed and not (value is None or is_harmless):
            raise UserError(
                f"a config file may not set this to {value!r}: only harmless parameters, as plain numbers and words",
                key=key,
                remedy=f"Type it on the command line: {key}=…. To trust all parameters, {ALLOWLIST.remedy('submitit')}",
            )


def check_file(path: object, key: str, job: Any) -> None:
    """Refuse a log file that is not in the run directory, or whose name does not end in `.log`.

    Args:
        path: as written. Allowed are `${hydra.runtime.output_dir}/` at the start, `${hydra.job.num}`, and
            `${hydra.job.name}` if that name has no interpolation.
        key: its full key, for the error.
        job: `hydra.job`, as written.

    Raises:
        UserError: names the key.
    """
    text = str(path)
    inside = _OUTPUT_DIR.match(text)
    rest = _JOB_NUMBER.sub("0", text[inside.end() :] if inside else "/")
    name = str(job.get("name")) if isinstance(job, dict) else "${}"
    rest = posixpath.normpath(_JOB_NAME.sub(lambda found: name, rest).replace("\\", "/"))
    if "${" in rest or rest.startswith(("/", "../")) or PureWindowsPath(rest).drive or not rest.endswith(".log"):
        problem = "may be a file outside the run directory" if text.endswith(".log") else "is refused"
        raise UserError(
            f"{text} {problem}",
            key=key,
            remedy="In a config file, name one in the run directory that ends in .log: "
            f"${{hydra.runtime.output_dir}}/name.log. Any other path must be typed on the command line: {key}=…",
        )


def _values(node: object, key: str) -> Iterator[tuple[str, object]]:
    """Yield (key, value as written) of each value in nested mappings."""
    if not isinstance(node, dict):
        yield key, node
        return
    for name, value in node.items():
        yield from _values(value, f"{key}.{name!s}")


def _check_environment(job: Any, typed: Collection[str]) -> None:
    variables = job.get("env_set") if isinstance(job, dict) else job
    if variables is not None and not isinstance(variables, dict):
        raise UserError(
            f"{variables} is not a mapping", key="hydra.job.env_set", remedy="Write NAME: value for each variable."
        )
    copied = job.get("env_copy") if isinstance(job, dict) else None
    for name, value in (variables or {}).items():
        key = f"hydra.job.env_set.{name}"
        as_it_is = isinstance(copied, list) and name in copied and os.environ.get(name) == value
        if name not in ENVIRONMENT and key not in typed and not as_it_is:
            raise UserError(
                "a config file may not set this environment variable, which could run code or send credentials",
                key=key,
                remedy=f"Set it in the shell before you start ({name}=…), or type ++{key}=… on the command line.",
            )


def _check_output_subdir(folder: Any) -> None:
    if folder is not None and ("${" in folder or ".." in folder.split("/") or not folder.startswith(".hydra")):
        raise UserError(
            f"{folder} could hold a config.yaml that the run would overwrite",
            key="hydra.output_subdir",
            remedy="In a config file, use .hydra. Any other folder must be typed: hydra.output_subdir=…",
        )


def _check_sweep_subdir(sweep: Any) -> None:
    """Refuse a job's folder outside its sweep, typed or not. Other folders are checked when they are made."""
    subdir, base = (str(sweep.get(name)) for name in ("subdir", "dir")) if isinstance(sweep, dict) else ("", "")
    path = posixpath.normpath(subdir.removeprefix(f"{base.rstrip('/')}/").replace("\\", "/"))
    if path.startswith("/") or path.split("/")[0] == ".." or PureWindowsPath(path).drive:
        raise UserError(
            f"{subdir} is outside the sweep's directory, where a job could overwrite another run",
            key="hydra.sweep.subdir",
            remedy="Name a folder in hydra.sweep.dir: ${hydra.job.num}.",
        )
