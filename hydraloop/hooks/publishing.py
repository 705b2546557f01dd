"""Published files: a checkpoint without what only its own run needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydraloop.engine.checkpoint import evaluation_weights, load, write
from hydraloop.engine.checkpoint_files import PUBLISHED, SUFFIX
from hydraloop.errors import UserError, suggestion

ENTRIES = ("format", "meta", "state_dict", "optimizer", "schedulers", "hooks", "precision", "rng", "progress")
"""What a checkpoint has, and a published file can keep."""


def check_keys(keys: Sequence[str], left_out: Sequence[str]) -> None:
    """Refuse a key that no checkpoint of the run will have.

    Args:
        left_out: entries that the run does not save.

    Raises:
        UserError: names the close ones.
    """
    there = [entry for entry in ENTRIES if entry not in left_out]
    for key in keys:
        if key not in there:
            raise UserError(
                f"a checkpoint of this run has no {key!r}",
                key="published_keys",
                remedy=f"{suggestion(key, there)} For the weights and where they come from: [meta,state_dict].",
            )


def publish(path: Path, keys: Sequence[str], weights: str) -> Path:
    """Write `<stem>_published.pth` beside a checkpoint, with only the `keys` of it. Returns its path.

    Args:
        weights: `averaged`: its `state_dict` is the averaged weights where there are any; `raw`: the raw ones.
    """
    checkpoint = load(path, key="published_keys")
    published = {entry: checkpoint[entry] for entry in keys}
    if "state_dict" in published:
        published["state_dict"] = evaluation_weights(checkpoint, weights)
    if "meta" in published:
        # They are the state dict now; who loads the file must not look for them among the hooks.
        published["meta"] = {name: fact for name, fact in checkpoint["meta"].items() if name != "averaged_weights"}
    target = path.with_name(f"{path.stem}{PUBLISHED}{SUFFIX}")
    write(target, published)
    return target
