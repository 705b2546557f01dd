"""Prepares a model: activation checkpointing, torch.compile, channels last; and its modules' train and eval modes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from hydraloop.errors import UserError, suggestion

log = logging.getLogger(__name__)

_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that use CUDA graphs."""

WRAP = "distributed.fsdp.wrap"
"""The option that names the classes of modules that FSDP2 gathers one at a time."""


def class_name(model: nn.Module) -> str:
    """Return the name of the model's class, without the prefix that FSDP2 adds."""
    cls = type(model)
    original = cls.__bases__[-1].__name__
    return original if cls.__name__ == f"FSDP{original}" else cls.__name__


def modules_of(model: nn.Module, names: Sequence[str], *, key: str) -> list[nn.Module]:
    """Return the modules inside `model` whose class has one of the names, inner ones before outer ones.

    Args:
        key: the option that has the names, for the error.

    Raises:
        UserError: no module has one of the names; lists the names that there are.
    """
    inside = [module for name, module in model.named_modules() if name]
    there = {type(module).__name__ for module in inside}
    for name in names:
        if name not in there:
            raise UserError(
                f"{type(model).__name__} has no module of the class {name!r}",
                key=key,
                remedy=suggestion(name, there),
            )
    return [module for module in reversed(inside) if type(module).__name__ in names]


def checkpoint_activations(model: nn.Module, names: Sequence[str]) -> None:
    """Change modules of these classes, in place, to keep only their inputs and compute activations again in backward.

    Names in the state dict do not change. Dropout draws the same numbers again. Source: T. Chen et al., Training Deep
    Nets with Sublinear Memory Cost, 2016; torch.utils.checkpoint.

    Raises:
        UserError: no module has such a class.
    """
    for module in modules_of(model, names, key="engine.activation_checkpointing"):
        # An attribute of the object replaces the method of its class; hooks (of FSDP2) are still called around it.
        module.forward = functools.partial(_recomputed, module.forward)


def _recomputed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def compile_modules(modules: Sequence[nn.Module], options: object) -> None:
    """Call `Module.compile()`, in place. Names in the state dict do not change; the first call compiles.

    With CUDA graphs (`mode: max-autotune`), a module returns copies of its outputs, which the caller may keep.

    Args:
        modules: the model; with FSDP2, its blocks, before they are sharded.
        options: true, or a mapping of torch.compile's options; with false, nothing is compiled.

    Raises:
        UserError: torch.compile has no such option, or it is `options`, which may name a program or a file.
    """
    if options is False:
        return
    if options is not True and not isinstance(options, Mapping):
        raise UserError(
            f"{options!r} must be true, false or a mapping",
            key="engine.compile",
            remedy="Use true, false, or options of torch.compile: {mode: max-autotune}.",
        )
    arguments = {} if options is True else {str(name): value for name, value in options.items()}
    if "options" in arguments:
        raise UserError(
            "options of a backend are not accepted: they may name a program, a file or another machine",
            key="engine.compile.options",
            remedy="Use another option, such as {mode: max-autotune}.",
        )
    for module in modules:
        if type(module).__module__.startswith("torch.nn."):
            name = type(module).__name__
            log.warning("engine.compile: torch does not compile a bare nn.%s; put it into a custom nn.Module", name)
        try:
            module.compile(**arguments)
        except Exception as error:  # it only checks its options
            raise UserError(
                f"torch.compile refuses its options: {str(error).strip().splitlines()[0]}", key="engine.compile"
            ) from error
        if uses_cuda_graphs(arguments):
            module._compiled_call_impl = _with_copied_outputs(module._compiled_call_impl)


def uses_cuda_graphs(arguments: Mapping[str, Any]) -> bool:
    """Return whether options of torch.compile select CUDA graphs."""
    return arguments.get("mode") in _WITH_CUDA_GRAPHS or arguments.get("backend") == "cudagraphs"


def _with_copied_outputs(call: Any) -> Callable[..., Any]:
    """Return the call with copies of the tensors that it returns: a CUDA graph overwrites its own in the next call.

    A model that returns its loss would otherwise change the loss of an earlier iteration before a record reads it.
    """

    def call_and_copy(*args: Any, **kwargs: Any) -> Any:
        return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, call(*args, **kwargs))

    return call_and_copy


def use_channels_last(model: nn.Module, wanted: object, *, weights: bool = True) -> bool:
    """Store the weights of convolutions channels last if wanted. Return whether that is wanted.

    Args:
        wanted: true, false, or `auto`: if the model's class has `channels_last = True`.
        weights: False leaves them unchanged: FSDP2 needs contiguous weights.

    Raises:
        UserError: another value.
    """
    if wanted not in (True, False, "auto"):
        raise UserError(f"{wanted!r} must be auto, true or false", key="engine.channels_last", remedy="Use auto.")
    if wanted == "auto":
        wanted = getattr(model, "channels_last", False)
    if wanted and weights:
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                layout = torch.channels_last if isinstance(module, nn.Conv2d) else torch.channels_last_3d
                module.weight.data = module.weight.data.contiguous(memory_format=layout)
    return bool(wanted)


# Train and eval modes: training keeps the modes that the user has set; evaluation restores them. ----------------------


def begin_training(task: nn.Module, *, is_main: bool) -> None:
    """Call `train()` on each module in train mode that overrides it, because it may freeze some of its layers there.

    All modes stay as the user has set them: a module in eval mode stays in eval mode.
    """
    modes = [(module, module.training) for module in task.modules()]
    for module, training in modes:
        if training and _overrides_train(module):
            module.train()
    _set_modes([(module, training and module.training) for module, training in modes])
    model = getattr(task, "model", task)
    if is_main and not any(module.training for module in model.modules()):
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
        _set_modes(modes)


def _set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
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
