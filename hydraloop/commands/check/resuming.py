"""A check that a run that continues from a checkpoint equals one that was not interrupted."""

from __future__ import annotations

from pathlib import Path

from hydraloop.commands.check.findings import Finding
from hydraloop.commands.check.short_runs import ON_CPU, Project, Watch, digest

_HALF, _WHOLE = 2, 6
"""Iterations before the checkpoint, and of the whole run."""
_EPOCH = 3
"""Iterations of an epoch, so that the resumed run begins inside of one and sees another one."""


def resume(project: Project, folder: Path) -> Finding:
    """Train a short run, and again from its middle."""
    changes = {
        **ON_CPU,
        "engine.max_iters": _WHOLE,
        "engine.limit_train_batches": _EPOCH,
        "engine.limit_val_batches": 1,
    }
    whole, rest = Watch(save_at=_HALF), Watch()
    one = project.engine(folder / "whole", whole, changes)
    one.train()
    checkpoint = folder / "whole" / "checkpoints" / "halfway.pth"
    other = project.engine(folder / "resumed", rest, changes, checkpoint=checkpoint)
    other.train()
    for at, (batch, value) in enumerate(zip(rest.batches, rest.losses, strict=True), start=_HALF):
        if batch != whole.batches[at]:
            remedy = "Draw from the global generator of torch, NumPy or Python, which are seeded for each batch."
            return Finding("problem", f"a resumed run gets another batch {at + 1}", "data.train", remedy)
        if value != whole.losses[at]:
            losses = f"{value:.6g}, not {whole.losses[at]:.6g}"
            return _differs(f"a resumed run has another loss in iteration {at + 1}: {losses}")
    ours, theirs = one.task.state_dict(), other.task.state_dict()
    differing = [name for name, value in ours.items() if digest(value) != digest(theirs[name])]
    if differing:
        return _differs(f"a resumed run ends with another {differing[0]}")
    return Finding("ok", f"{_WHOLE - _HALF} iterations after a checkpoint are equal to those without a stop")


def _differs(text: str) -> Finding:
    remedy = "Keep what changes in training in buffers (register_buffer), or in the state_dict of the hook or schedule."
    return Finding("problem", text, "task", remedy)
