"""What only a command line may set, not a config file: it can come from anywhere."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig
from omegaconf.errors import InterpolationResolutionError

from hydraloop.errors import UserError
from hydraloop.run_files.config_yaml import plain
from hydraloop.validate.hooks import hook_nodes


def check_typed(cfg: DictConfig, run_dir: Path, typed: Collection[str]) -> None:
    """Refuse what only a command line may set: traces that could be outside the run directory.

    Called when the run is built: only then do environment variables and `${hydra:…}` have their values.
    """
    from hydraloop.tracking.run_description import flattened  # 10 ms, which other commands do without

    folder = run_dir.resolve()
    for hook, node in hook_nodes(cfg):
        key, path = f"{hook}.json_trace_path", node.get("json_trace_path")
        inside = path is None or (folder / str(path)).resolve().is_relative_to(folder)
        if key not in typed and not (inside and str(path or ".json").endswith((".json", ".json.gz"))):
            raise UserError(
                f"{path} may be a file outside the run directory, or not a trace",
                key=key,
                remedy="In a config file, name one in the run directory that ends in .json or .json.gz: trace.json. "
                f"Any other path must be typed on the command line: {key}=…",
            )
    written: dict[str, object] = {}
    for key, node in [*hook_nodes(cfg), ("engine.compile", cfg.engine.compile)]:
        with suppress(InterpolationResolutionError):  # an error when it is built
            written |= flattened(plain(node), key)
    for key, value in written.items():
        owner = re.sub(r"(\.\d+)?\._target_$", "", key)
        is_handler = key.endswith("._target_") and str(value).endswith(".tensorboard_trace_handler")
        is_compilers = key.startswith("engine.compile.options.") and "trace" in key.split(".")
        if (is_handler or is_compilers) and not {owner, key} & {*typed}:
            raise UserError(
                "in a config file, this is refused, because it writes files outside the run directory",
                key=owner,
                remedy=f"Use tb_trace, or type it: {owner}=…"
                if is_handler
                else "Leave it out, and begin the command with TORCH_COMPILE_DEBUG=1",
            )
