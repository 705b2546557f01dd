"""From the config to the optimizer of a run."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn, optim

from hydraloop.engine.distributed.fsdp import is_sharded
from hydraloop.engine.named_optimizers import OptimizerSet
from hydraloop.engine.parameter_patterns import Places, matched, places_of
from hydraloop.errors import UserError
from hydraloop.optim.layer_decay import lr_scales
from hydraloop.optim.parameter_groups import check_settings, grouped
from hydraloop.safety.instantiate import instantiate, instantiate_callable, refused, require_target
from hydraloop.schemas.optimizer import _Optimizer, check_own_options, nodes

_FUSED = ("Adam", "AdamW")
"""Their fused kernels work in every run, also for shards. Not those of others: torch's fused SGD fails if a parameter
gets its first gradient later than others, and fused Adagrad and SGD fail for sparse gradients."""
_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


def resolve_fused(fused: Any, params: Iterable[Tensor], key: str = "optimizer.fused", *, optimizer: str) -> bool | None:
    """Return the `fused` argument of the optimizer: whether one kernel updates all parameters.

    Args:
        fused: True, False or None (torch chooses), which are returned; or "auto".
        params: the parameters to train.
        key: the option's key in the config, for the error.
        optimizer: name of its class.

    Returns:
        For "auto", True if the fused kernel works, on CPUs too, because it is the fastest; otherwise None. Only the
        kernels of Adam and AdamW work in every run.

    Raises:
        UserError: another value.
    """
    if fused is None or isinstance(fused, bool):
        return fused
    if fused != "auto":
        raise UserError(f"cannot be {fused!r}", key=key, remedy="Use auto, true, false or null.")
    works = all(param.is_floating_point() and param.device.type in _FUSED_DEVICES for param in params)
    return True if works and optimizer in _FUSED else None


def build_optimizer(cfg: DictConfig, model: nn.Module, task: nn.Module, given: Any = None) -> optim.Optimizer:
    """Return the optimizer of the config, for all parameters of the task that require gradients.

    Args:
        cfg: the whole config. `optimizer` is a node with `_target_`, or a mapping of such nodes by name.
        model: the part of the task that checkpoints save. It must contain all trained parameters.
        task: the task, which contains the model.
        given: used instead of the config: an optimizer, optimizers by name, or a function of the list of parameters.

    Returns:
        The optimizer; for a mapping, all of them in one (`OptimizerSet`).

    Raises:
        UserError: there is nothing to train, a trained parameter is not saved, or is not in exactly one optimizer, or
            an option is wrong.
    """
    check_trained(model, task)
    if given is not None:
        return _finished(given, model)
    node = copy.deepcopy(cfg.optimizer)  # with its schema, for messages
    OmegaConf.resolve(node)
    places = places_of(model)
    named = nodes(node)
    keys = {name: f"optimizer.{name}".rstrip(".") for name in named}
    for name, one in named.items() or [("", node)]:
        require_target(one, keys.get(name, "optimizer"))
    check_own_options(named)
    chosen = _shared_out({name: one.get("match") for name, one in named.items()}, places)
    optimizers = {name: _built(one, model, chosen[name], places, keys[name]) for name, one in named.items()}
    check_complete(optimizers, model)
    return optimizers[""] if "" in optimizers else OptimizerSet(optimizers)


def _finished(given: Any, model: nn.Module) -> optim.Optimizer:
    if callable(given):
        given = given([parameter for parameter in model.parameters() if parameter.requires_grad])
    elif any(map(is_sharded, model.parameters())):
        remedy = "Give a function of the parameters: optimizer=functools.partial(torch.optim.AdamW, lr=1e-3)."
        raise UserError("FSDP2 has replaced the parameters of a finished optimizer", key="optimizer", remedy=remedy)
    optimizers = dict(given) if isinstance(given, Mapping) else {"": given}
    for name, one in optimizers.items():
        if not isinstance(one, optim.Optimizer):
            raise _not_an_optimizer(one, f"optimizer.{name}".rstrip("."))
    remedy = "Give each parameter of task.model to exactly one optimizer, or set requires_grad=False."
    check_complete(optimizers, model, remedy)
    return given if isinstance(given, optim.Optimizer) else OptimizerSet(optimizers)


def check_trained(model: nn.Module, task: nn.Module) -> None:
    """Check that there is something to train, and that checkpoints save all of it."""
    trained = {name: parameter for name, parameter in task.named_parameters() if parameter.requires_grad}
    if not trained:
        remedy = "Unfreeze a part of it, or name a model that has parameters."
        raise UserError("the model has no parameter to train", key="task.model", remedy=remedy)
    saved = set(model.parameters())
    outside = [name for name, parameter in trained.items() if parameter not in saved]
    if outside:
        raise UserError(
            f"{', '.join(outside)} would be trained, but only the parameters of task.model can be",
            key="task",
            remedy="Move it into the model, or set requires_grad=False.",
        )


def check_complete(optimizers: Mapping[str, optim.Optimizer], model: nn.Module, remedy: str = "") -> None:
    """Check that each trained parameter of the model is in exactly one of the optimizers."""
    owners: dict[Tensor, list[str]] = {}
    for name, optimizer in optimizers.items():
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            owners.setdefault(parameter, []).append(name)
    for name, parameter in model.named_parameters():
        found = owners.get(parameter, [])
        if len(found) > 1:
            remedy = remedy or f'Remove it from one: optimizer.{found[0]}.match="…|!{name}"'
            raise UserError(f"{name} is in two optimizers, {found[0]} and {found[1]}", key="optimizer", remedy=remedy)
        if not found and parameter.requires_grad:
            rest = "give one of them match=null, which takes the rest." if len(optimizers) > 1 else "add it."
            remedy = remedy or f"Freeze it (requires_grad=False), or {rest}"
            raise UserError(f"{name} is in no optimizer", key="optimizer", remedy=remedy)


def _shared_out(patterns: Mapping[str, Any], places: Places) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each optimizer by name, as `match` says."""
    trained = [parameter for parameter in places if parameter.requires_grad]
    if list(patterns) == [""]:
        return {"": trained}
    chosen = {
        name: matched(pattern, places, f"optimizer.{name}.match")
        for name, pattern in patterns.items()
        if pattern is not None
    }
    taken: set[nn.Parameter] = set().union(*chosen.values())
    for name in patterns.keys() - chosen.keys():  # one at most
        chosen[name] = set(trained) - taken
    return {name: [parameter for parameter in trained if parameter in chosen[name]] for name in patterns}


def _built(node: DictConfig, model: nn.Module, chosen: list[nn.Parameter], places: Places, key: str) -> optim.Optimizer:
    """Return one optimizer for the chosen parameters."""
    own = _taken_own_options(node)
    if "fused" in node:
        node.fused = resolve_fused(node.fused, chosen, f"{key}.fused", optimizer=str(node._target_).rpartition(".")[2])
    node._partial_ = True  # the parameters are missing
    factory = instantiate(node, key)
    parameters = _parameters(own, model, chosen, places, key)
    try:
        optimizer = factory(parameters)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        mistake = refused(node, error, key)
        if mistake is None:
            raise
        raise mistake from error
    if not isinstance(optimizer, optim.Optimizer):
        raise _not_an_optimizer(optimizer, f"{key}._target_")
    check_settings(own["groups"], optimizer.defaults, type(optimizer).__name__, f"{key}.groups")
    for group in optimizer.param_groups:
        if "lr_scale" in group:
            group["lr"] *= group.pop("lr_scale")
    return optimizer


def _parameters(
    own: Mapping[str, Any], model: nn.Module, chosen: list[nn.Parameter], places: Places, key: str
) -> list[Any]:
    """Return what the optimizer gets: parameter groups, or the parameters if there is one group without settings."""
    layers_of = own["layers_of"] and instantiate_callable(own["layers_of"], f"{key}.layers_of")
    scales = {} if own["layer_decay"] is None else lr_scales(model, own["layer_decay"], layers_of, key)
    groups = grouped(chosen, own["groups"], scales, places, f"{key}.groups")
    is_plain = len(groups) == 1 and len(groups[0]) == 1
    return groups[0]["params"] if is_plain else groups  # LBFGS takes no groups


def _not_an_optimizer(found: object, key: str) -> UserError:
    problem = f"{type(found).__name__} is not an optimizer"
    return UserError(problem, key=key, remedy="Use a subclass of torch.optim.Optimizer.")


def _taken_own_options(node: DictConfig) -> dict[str, Any]:
    """Remove the options that the builder reads from a node, and return them."""
    OmegaConf.set_struct(node, False)
    defaults = vars(_Optimizer())  # of an optimizer of another package
    own = {name: node.pop(name, defaults[name]) for name in _Optimizer.OWN}
    own["groups"] = OmegaConf.to_container(OmegaConf.create(own["groups"]))
    return own


def optimizer_overrides(cfg: DictConfig, typed: Iterable[str]) -> frozenset[str]:
    """Return the options of optimizers that were typed: `lr`, with several optimizers `generator.lr`.

    In a resumed run, these numbers replace those of the checkpoint.
    """
    depth = 1 if "" in nodes(cfg.optimizer) else 2
    paths = [key.split(".")[1 : depth + 1] for key in typed if key.startswith("optimizer.")]
    return frozenset(
        ".".join(path)
        for path in paths
        if len(path) == depth and not path[-1].startswith("_") and path[-1] not in _Optimizer.OWN
    )
