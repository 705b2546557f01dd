"""Private names of other packages: each has a check here, and a comment with the reason where it is used."""

from __future__ import annotations

import ast
import inspect
import multiprocessing.process
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra._internal.config_loader_impl as loading
import pytest
import torch
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigSource
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.nn import functional
from torch.optim import SGD, lr_scheduler
from torch.optim.optimizer import _use_grad_for_differentiable
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import hydraloop
from hydraloop.config import arguments
from hydraloop.optim import avoid_dynamo
from hydraloop.safety import hydra_versions
from hydraloop.safety.public_targets import is_public

FOLDER = Path(hydraloop.__file__).parent
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(FOLDER.rglob("*.py"))}
DOCUMENTED = {
    "_target_",
    "_partial_",
    "_args_",
    "_convert_",
    "_recursive_",
    "_exit",
    "_getframe",
    "_fields",
    "_replace",
    "_sync",
}
"""Keys of Hydra, names of the standard library, and the suffix of trackers' folders: not private."""
_PRIVATE = re.compile(r"_(?!_)\w+")


def _hydras_packages() -> None:
    assert ConfigSource._get_header_dict("# @package _global_\na: 1\n") == {"package": "_global_"}
    sources = (FileConfigSource, ImportlibResourcesConfigSource)
    assert all("_get_header_dict(" in inspect.getsource(source) for source in sources)


def _hydras_overrides() -> None:
    cfg = OmegaConf.create({"a": 1})
    loading.ConfigLoaderImpl._apply_overrides_to_config(arguments.parse(["a=2", "+b=3"]), cfg)
    assert cfg == {"a": 2, "b": 3}
    with pytest.raises(ConfigCompositionException) as caught:
        loading.ConfigLoaderImpl._apply_overrides_to_config(
            arguments.parse(["c.d=4"]), OmegaConf.create({"c": {}}, flags={"struct": True})
        )
    cause = caught.value.__cause__
    assert isinstance(cause, OmegaConfBaseException)
    assert cause.parent_node is not None
    assert cause.parent_node._get_root() == {"c": {}}
    assert "get_overrides_dirname" in vars(loading) or not hydra_versions.IS_1_3


def _native_functions() -> None:
    assert functional.gelu.__module__ == "torch._C._nn"
    assert is_public("torch.nn.functional.gelu")


def _foreach() -> None:
    values, others = [torch.ones(2)], [torch.full((2,), 3.0)]
    torch._foreach_mul_(values, 2.0)
    torch._foreach_add_(values, others, alpha=2.0)
    torch._foreach_lerp_(values, others, 0.5)
    assert values[0].tolist() == [5.5, 5.5]
    torch._foreach_copy_(values, others)
    assert values[0].tolist() == [3.0, 3.0]


def _loaders_workers() -> None:
    loader = DataLoader([1], num_workers=1, persistent_workers=True)
    assert loader._iterator is None
    assert callable(_MultiProcessingDataLoaderIter._shutdown_workers)
    assert "self._workers.append(w)" in inspect.getsource(_MultiProcessingDataLoaderIter)
    assert "if _SIGCHLD_handler_set:\n        return" in inspect.getsource(signal_handling._set_SIGCHLD_handler)


def _tensors_version() -> None:
    tensor = torch.zeros(1)
    before = tensor._version
    tensor += 1
    assert tensor._version > before


def _schedulers() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
    again: Any = SGD(optimizer.param_groups, lr=1.0)
    scheduler = lr_scheduler.StepLR(again, 3)
    again._opt_called = True
    scheduler.step()  # warnings are errors


def _norms() -> None:
    assert isinstance(nn.BatchNorm1d(1), nn.modules.batchnorm._NormBase)
    assert isinstance(nn.InstanceNorm2d(1), nn.modules.batchnorm._NormBase)


def _modules() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    assert list(module._modules) == ["0"]
    assert torch.compile(module)._orig_mod is module
    module._compiled_call_impl = lambda inputs: inputs + 1
    assert module(torch.ones(1)).tolist() == [2.0]


def _scalers_state() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 3})
    assert scaler.state_dict()["_growth_tracker"] == 3


def _optimizers_without_dynamo() -> None:
    def step(self: object) -> None: ...

    assert avoid_dynamo._is_wrapper(torch._disable_dynamo(step), "torch._compile", "inner")
    assert avoid_dynamo._is_wrapper(_use_grad_for_differentiable(step), "torch.optim.optimizer", "_use_grad")


def _trees() -> None:
    assert tree_map(lambda value: value + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]}
    assert tree_leaves({"a": [1, (2, None)]}, is_leaf=lambda value: value == (2, None)) == [1, (2, None)]


def _submitits_command() -> None:
    from submitit import AutoExecutor, SlurmExecutor

    assert list(inspect.signature(SlurmExecutor._submit_command).parameters) == ["self", "command"]
    assert isinstance(AutoExecutor(".", cluster="debug")._executor.parameters, dict)


def _children_of_multiprocessing() -> None:
    assert isinstance(multiprocessing.process._children, set)  # type: ignore[attr-defined]
    assert "_children.add(self)" in inspect.getsource(multiprocessing.process.BaseProcess.start)


def _raw_environment() -> None:
    raw: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
    before = dict(raw)
    os.environ["SET_FOR_A_TEST"] = "x"
    assert raw != before
    del os.environ["SET_FOR_A_TEST"]
    assert raw == before


CHECKS: dict[Callable[[], None], list[str]] = {
    _hydras_overrides: ["hydra._internal.config_loader_impl", "_apply_overrides_to_config", "_get_root"],
    _hydras_packages: ["_get_header_dict"],
    _native_functions: ["torch._C._nn"],
    _foreach: ["_foreach_mul_", "_foreach_add_", "_foreach_lerp_", "_foreach_copy_"],
    _loaders_workers: ["_iterator", "_shutdown_workers", "_workers", "torch.utils.data._utils", "_SIGCHLD_handler_set"],
    _tensors_version: ["_version"],
    _schedulers: ["_opt_called"],
    _norms: ["_NormBase"],
    _modules: ["_modules", "_orig_mod", "_compiled_call_impl"],
    _scalers_state: ["_growth_tracker"],
    _trees: ["torch.utils._pytree"],
    _children_of_multiprocessing: ["_children"],
    _submitits_command: ["_submit_command"],
    _raw_environment: ["_data"],
    _optimizers_without_dynamo: ["torch._dynamo", "torch._compile", "_use_grad"],
}
"""The names that each check covers."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.strip("_"))
def test_it_does_what_we_use_it_for(check: Callable[[], None]) -> None:
    check()


def test_every_private_name_has_a_check() -> None:
    trees = {path: ast.parse(text) for path, text in SOURCES.items()}
    own = {name for tree in trees.values() for node in ast.walk(tree) for name in _defined(node)}
    found = {
        name: str(path.relative_to(FOLDER))
        for path, tree in trees.items()
        for node in ast.walk(tree)
        for name in _used(node)
        if name not in own and name not in DOCUMENTED
    }
    checked = {name for names in CHECKS.values() for name in names}
    assert {name: path for name, path in found.items() if name not in checked} == {}
    assert [name for name in checked if not any(name in text for text in SOURCES.values())] == []


def _defined(node: ast.AST) -> Iterator[str]:
    """The names that a node of hydraloop's code defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            yield node.attr
    elif isinstance(node, ast.keyword) and node.arg:
        yield node.arg


def _used(node: ast.AST) -> Iterator[str]:
    """The private names in a node: attributes, imports, and strings that name one."""
    if isinstance(node, ast.Attribute) and _PRIVATE.fullmatch(node.attr):
        yield node.attr
    elif isinstance(node, ast.Import | ast.ImportFrom):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        yield from (name for name in modules if any(map(_PRIVATE.fullmatch, name.split("."))))
        yield from (alias.name for alias in node.names if _PRIVATE.fullmatch(alias.name))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
        yield from (text for text in _texts(node.args) if _PRIVATE.fullmatch(text))
    elif isinstance(node, ast.Constant):
        parts = str(node.value).split(".")
        if parts[0] in ("torch", "hydra", "omegaconf") and any(map(_PRIVATE.fullmatch, parts)):
            yield str(node.value)


def _texts(nodes: list[ast.expr]) -> Iterator[str]:
    yield from (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
