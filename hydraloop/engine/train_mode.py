"""Train and eval modes of modules: training keeps the modes that the user has set; evaluation restores them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from hydraloop.engine.distributed.comm import Distributed

log = logging.getLogger(__name__)


def begin_training(task: nn.Module, ranks: Distributed) -> None:
    """Call `train()` on each module in train mode that overrides it, because it may freeze some of its layers there.

    All modes stay as the user has set them: a module in eval mode stays in eval mode.
    """
    modes = [(module, module.training) for module in task.modules()]
    for module, training in modes:
        if training and _overrides_train(module):
            module.train()
    _set([(module, training and module.training) for module, training in modes])
    model = getattr(task, "model", task)
    if ranks.is_main and not any(module.training for module in model.modules()):
        log.warning(
            "the whole model is in eval mode, as from_pretrained returns it: it trains without dropout and with fixed "
            "batch norm statistics. If you do not want this, call model.train() where the model is made."
        )


@contextmanager
def in_eval_mode(task: nn.Module) -> Iterator[None]:
    """Put all modules into eval mode, and restore the mode of each one at the end."""
    modes = [(module, module.training) for module in task.modules()]
    task.eval()
    try:
        yield
    finally:
        _set(modes)


def _set(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Give each module its mode; outer modules come before inner ones.

    A custom `train` also sets the modules inside, so inner modules follow, and the attributes are set last.
    """
    for module, training in modes:
        if _overrides_train(module):
            module.train(training)
    for module, training in modes:
        module.training = training


def _overrides_train(module: nn.Module) -> bool:
    return getattr(module.train, "__func__", None) is not nn.Module.train
