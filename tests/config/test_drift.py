"""Every stored dataclass with a `_target_` against the signature of what it builds, so that the two cannot drift."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

import hydraloop.schemas

FOR_THE_BUILDER = {
    "hooks": {"priority", "on_error"},
    "default_hooks": {"priority", "on_error"},
    "scheduler": {"param", "by_epoch", "convert_to_iter_based", "begin", "end", "monitor"},
}
"""Fields that are taken out before the target is called."""
GIVEN_BY_THE_BUILDER = {"optimizer": {"params"}}


def _with_target(schema: type) -> bool:
    """Whether it is an option; a base class leaves the target to its subclasses."""
    return any(field.name == "_target_" and field.default != MISSING for field in dataclasses.fields(schema))


def stored() -> dict[tuple[str, type], None]:
    """(group, dataclass) of all options in the store, dataclasses inside their defaults included."""
    found: dict[tuple[str, type], None] = {}

    def visit(group: str, node: Any) -> None:
        schema = OmegaConf.get_type(node) if OmegaConf.is_config(node) else type(node)
        if schema is not None and dataclasses.is_dataclass(schema) and _with_target(schema):
            found[group, schema] = None
        if OmegaConf.is_config(node):
            for key in node if OmegaConf.is_dict(node) else range(len(node)):
                if not OmegaConf.is_missing(node, key) and OmegaConf.is_config(node[key]):
                    visit(group, node[key])

    for group, options in ConfigStore.instance().repo.items():
        if isinstance(options, Mapping) and group not in ("hydra", "_dummy_empty_config_"):
            for option in options.values():
                if not isinstance(option, Mapping):
                    visit(group, option.node)
    return found


STORED = list(stored())


def in_the_modules() -> Iterator[type]:
    for info in pkgutil.iter_modules(hydraloop.schemas.__path__):
        module = importlib.import_module(f"hydraloop.schemas.{info.name}")
        for value in vars(module).values():
            own = isinstance(value, type) and value.__module__ == module.__name__
            if own and dataclasses.is_dataclass(value) and not value.__name__.startswith("_"):  # a base is no option
                yield value


def target_of(schema: type) -> Callable[..., Any]:
    target = next(field.default for field in dataclasses.fields(schema) if field.name == "_target_")
    module, _, name = str(target).rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def options_of(group: str, schema: type) -> dict[str, Any]:
    """{option: default} of what the target gets; MISSING where there is none."""
    left_out = {"_target_", "_partial_"} | FOR_THE_BUILDER.get(group, set())
    return {
        field.name: field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        for field in dataclasses.fields(schema)
        if field.name not in left_out
    }


def parameters_of(target: Callable[..., Any], group: str) -> dict[str, inspect.Parameter]:
    left_out = GIVEN_BY_THE_BUILDER.get(group, set())
    return {name: p for name, p in inspect.signature(target).parameters.items() if name not in left_out}


def ids(entry: tuple[str, type]) -> str:
    return f"{entry[0]}-{entry[1].__name__}"


def ours(entry: tuple[str, type]) -> bool:
    return target_of(entry[1]).__module__.startswith("hydraloop")


def test_every_dataclass_with_a_target_is_stored() -> None:
    written = {schema for schema in in_the_modules() if _with_target(schema)}
    assert {schema for _, schema in STORED} == written


def test_all_groups_are_looked_at() -> None:
    assert {group for group, _ in STORED} >= {
        "data", "task", "model", "optimizer", "scheduler", "hooks", "default_hooks",
    }  # fmt: skip


@pytest.mark.parametrize("entry", STORED, ids=ids)
def test_the_target_takes_every_option(entry: tuple[str, type]) -> None:
    group, schema = entry
    parameters = parameters_of(target_of(schema), group)
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values()), "anything would pass"
    assert set(options_of(group, schema)) <= set(parameters)


@pytest.mark.parametrize("entry", [entry for entry in STORED if ours(entry)], ids=ids)
def test_the_options_of_our_classes_are_all_there_with_the_same_defaults(entry: tuple[str, type]) -> None:
    group, schema = entry
    options, parameters = options_of(group, schema), parameters_of(target_of(schema), group)
    assert set(options) == set(parameters)
    without_default = {name for name, p in parameters.items() if p.default is p.empty}
    for name, option in options.items():
        if name in without_default:
            continue
        default = parameters[name].default
        assert _plain(option) == _plain(default), name


def _plain(value: Any) -> Any:
    """Tuples as lists; what is there to be changed by the task (metrics) as None."""
    if isinstance(value, Mapping):
        return None if all(dataclasses.is_dataclass(item) for item in value.values()) else dict(value)
    return list(value) if isinstance(value, tuple | list) else value


def test_the_default_hooks_are_the_ones_of_the_example_config() -> None:
    from hydraloop.schemas.root import DEFAULT_HOOKS

    in_store = {name.removesuffix(".yaml") for name in ConfigStore.instance().repo["default_hooks"]}
    assert set(DEFAULT_HOOKS) == in_store
