"""What a config file may not set, since it could run code or overwrite files; whoever types it on the command line may.

A config can come from anywhere, a command line only from the user. So environment variables outside a list, and files
that are not in the run directory, are accepted if their own key is typed: `++hydra.job.env_set.NAME=value`.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Collection
from pathlib import PureWindowsPath
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraloop.cli.arguments import HOOK_GROUPS
from hydraloop.cli.composing import hydra_config
from hydraloop.errors import UserError

ENVIRONMENT = frozenset(
    (
        # Which devices are seen, and in what order.
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *("ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
        # Numerics, and when kernels are loaded and run.
        *("CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"),
        *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "PYTORCH_ENABLE_MPS_FALLBACK"),
        # Memory: splitting and releasing of blocks.
        *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
        *("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO", "MALLOC_ARENA_MAX"),
        # Numbers of threads, and their cores.
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMEXPR_MAX_THREADS"),
        *("VECLIB_MAXIMUM_THREADS", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
        *("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_BLOCKTIME"),
        # Communication: network interface, protocols, timeouts, messages. Not NCCL_NET_PLUGIN, which loads a library.
        *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_P2P_DISABLE"),
        *(
            "NCCL_P2P_LEVEL",
            "NCCL_SHM_DISABLE",
            "NCCL_IB_DISABLE",
            "NCCL_IB_HCA",
            "NCCL_IB_TIMEOUT",
            "NCCL_IB_GID_INDEX",
        ),
        *("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
        *("NCCL_CROSS_NIC", "NCCL_NVLS_ENABLE", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT"),
        *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_AVOID_RECORD_STREAMS"),
        *("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_HIGH_PRIORITY"),
        *("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "TORCH_DISTRIBUTED_DEBUG"),
        # Messages, and no network.
        *("TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "HYDRA_FULL_ERROR", "TQDM_DISABLE", "WANDB_MODE"),
        *("WANDB_SILENT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_VERBOSITY"),
    )
)
"""Variables that a config may set: exact names, none of which names a program, library, folder or address."""

_OUTPUT_DIR = re.compile(r"\$\{hydra[.:]runtime\.output_dir\}/")
_JOB = re.compile(r"\$\{hydra[.:]job\.num\}")
"""Known once the job runs; always a number."""


def check_limits(cfg: DictConfig, typed: Collection[str]) -> None:
    """Refuse variables and files that only the command line may name.

    Args:
        cfg: with the node `hydra`.
        typed: keys that the command line sets.

    Raises:
        UserError: names the key.
    """
    if "hydra" not in cfg:
        return
    with hydra_config(cfg):
        _check_environment(cfg, typed)
        if "hydra.output_subdir" not in typed:
            _check_output_subdir(cfg.hydra)
        for group in HOOK_GROUPS:
            for name, hook in (cfg.get(group) or {}).items():
                key = f"{group}.{name}.json_trace_path"
                if isinstance(hook, DictConfig) and "json_trace_path" in hook and key not in typed:
                    check_file(hook, "json_trace_path", key, endings=(".json", ".json.gz"), relative=True)


def check_file(node: DictConfig, name: str, key: str, *, endings: tuple[str, ...], relative: bool = False) -> None:
    """Refuse a file outside the run directory, or one that may be more than data.

    Args:
        node: has the path under `name`.
        key: the full key of the path, for the error.
        endings: what the path may end in.
        relative: whether a relative path is in the run directory; else it is in the working directory.

    Raises:
        UserError: the path, or that it is known only once the job runs.
    """
    raw = next(value for other, value in node.items_ex(resolve=False) if other == name)
    if raw is None:
        return
    example = ("" if relative else "${hydra.runtime.output_dir}/") + f"name{endings[0]}"
    error = UserError(
        f"{raw} may be a file outside the run directory" if str(raw).endswith(endings) else f"{raw} is refused",
        key=key,
        remedy=f"In a config file, name one in the run directory that ends in {' or '.join(endings)}: {example}. "
        f"Any other has to be typed on the command line: {key}=…",
    )
    inside = _OUTPUT_DIR.match(str(raw))
    if not isinstance(raw, str) or (inside is None and not relative):
        raise error
    # Each part alone, so that nothing is looked up by what is known only later: ${names.${hydra.job.num}}
    parts = [_text(node, part) for part in _JOB.split(raw[inside.end() :] if inside else raw)]
    path = posixpath.normpath("0".join(part for part in parts if part is not None).replace("\\", "/"))
    outside = path.startswith(("/", "../")) or PureWindowsPath(path).drive != ""
    if None in parts or outside or not path.endswith(endings):
        raise error


def _text(node: DictConfig, part: str) -> str | None:
    """A part of a value, resolved; None if it cannot be."""
    try:
        return str(OmegaConf.create({"part": part}, parent=node).part)
    except OmegaConfBaseException:
        return None


def _check_environment(cfg: DictConfig, typed: Collection[str]) -> None:
    job = cfg.hydra.job
    try:
        variables, copied = dict(job.env_set), list(job.env_copy)
    except OmegaConfBaseException as error:
        raise UserError("does not resolve before the run", key="hydra.job.env_set", remedy="Write it out.") from error
    for name, value in variables.items():
        key = f"hydra.job.env_set.{name}"
        as_it_is = name in copied and os.environ.get(name) == value
        if name not in ENVIRONMENT and key not in typed and not as_it_is:
            raise UserError(
                "a config file may not set this environment variable, which could run code or send credentials",
                key=key,
                remedy=f"Set it in the shell before you start ({name}=…), or type ++{key}=… on the command line.",
            )


def _check_output_subdir(hydra: Any) -> None:
    folder = hydra.output_subdir
    if folder is not None and (".." in folder.split("/") or not folder.startswith(".hydra")):
        raise UserError(
            f"{folder} could hold a config.yaml that the run would overwrite",
            key="hydra.output_subdir",
            remedy="In a config file, use .hydra; any other has to be typed: hydra.output_subdir=…",
        )
