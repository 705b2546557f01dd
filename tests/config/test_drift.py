"""The dataclasses of all options: their text, and the signatures of the classes and functions that they configure."""

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
from omegaconf.errors import OmegaConfBaseException

import hydraloop.schemas
from hydraloop import schemas
from hydraloop.schemas.data import DigitsDataConf
from hydraloop.schemas.docs import field_docs
from hydraloop.schemas.optimizer import AdamWConf
from hydraloop.schemas.root import DEFAULT_HOOKS

FOR_THE_BUILDER = {
    "hooks": {"priority", "on_error"},
    "default_hooks": {"priority", "on_error"},
    "scheduler": {"param", "optimizer", "by_epoch", "convert_to_iter_based", "begin", "end", "monitor"},
    "optimizer": set(AdamWConf.OWN),
}
"""Fields that the builder removes before it calls the target."""
GIVEN_BY_THE_BUILDER = {"optimizer": {"params"}}


def _with_target(schema: type) -> bool:
    """Whether it is an option. A base class leaves the target to its subclasses."""
    return any(field.name == "_target_" and field.default != MISSING for field in dataclasses.fields(schema))


def stored() -> dict[tuple[str, type], None]:
    """(group, dataclass) of all options in the store, including dataclasses in their defaults."""
    found: dict[tuple[str, type], None] = {}

    def visit(group: str, node: Any) -> None:
        schema = OmegaConf.get_type(node) if OmegaConf.is_config(node) else type(node)
        if schema is not None and dataclasses.is_dataclass(schema) and _with_target(schema):
            found[group, schema] = None
        if OmegaConf.is_config(node):
            for key in node if OmegaConf.is_dict(node) else range(len(node)):
                has_value = not (OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key))
                if has_value and OmegaConf.is_config(node[key]):
                    visit(group, node[key])

    for group, options in ConfigStore.instance().repo.items():
        if isinstance(options, Mapping) and group not in ("hydra", "experiment", "_dummy_empty_config_"):
            for option in options.values():
                if not isinstance(option, Mapping):
                    visit(group, ConfigStore.instance().load(f"{group}/{option.name}").node)
    return found


def in_the_modules() -> Iterator[type]:
    for info in pkgutil.iter_modules(hydraloop.schemas.__path__):
        module = importlib.import_module(f"hydraloop.schemas.{info.name}")
        for value in vars(module).values():
            own = isinstance(value, type) and value.__module__ == module.__name__
            if own and dataclasses.is_dataclass(value) and not value.__name__.startswith("_"):  # _: a base
                yield value


STORED = list(stored())
SCHEMAS = list(in_the_modules())


def target_of(schema: type) -> Callable[..., Any]:
    target = next(field.default for field in dataclasses.fields(schema) if field.name == "_target_")
    module, _, name = str(target).rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def options_of(group: str, schema: type) -> dict[str, Any]:
    """{option: default} of the target's arguments; MISSING if there is no default."""
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
    written = {schema for schema in SCHEMAS if _with_target(schema)}
    assert {schema for _, schema in STORED} == written


def test_all_groups_are_compared() -> None:
    assert {group for group, _ in STORED} >= {
        "data", "task", "model", "optimizer", "scheduler", "hooks", "default_hooks",
    }  # fmt: skip


@pytest.mark.parametrize("entry", STORED, ids=ids)
def test_the_options_are_the_arguments_of_the_target(entry: tuple[str, type]) -> None:
    group, schema = entry
    assert set(options_of(group, schema)) == set(parameters_of(target_of(schema), group))


@pytest.mark.parametrize("entry", [entry for entry in STORED if ours(entry)], ids=ids)
def test_our_classes_have_the_same_defaults(entry: tuple[str, type]) -> None:
    group, schema = entry
    options, parameters = options_of(group, schema), parameters_of(target_of(schema), group)
    # An option that is derived from another one (`sync_norm` from `sync_buffers`) is that one with other defaults.
    changed = schema.__annotations__ if any((group, base) in STORED for base in schema.__bases__) else ()
    for name in options.keys() - changed:
        option, default = options[name], parameters[name].default
        assert default is inspect.Parameter.empty or _plain(option) == _plain(default), name


def _plain(value: Any) -> Any:
    """Tuples as lists, and objects that only the config adds (metrics, the loss) as None."""
    if isinstance(value, Mapping):
        built = "_target_" in value or all(
            dataclasses.is_dataclass(item) or (isinstance(item, Mapping) and "_target_" in item)
            for item in value.values()
        )
        return None if built else dict(value)
    return list(value) if isinstance(value, tuple | list) else value


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_every_field_has_a_text(schema: type) -> None:
    sections = {field.name for field in dataclasses.fields(schema) if dataclasses.is_dataclass(field.default_factory)}
    without = {"_target_", "_partial_"} | sections
    assert {field.name for field in dataclasses.fields(schema)} - without <= field_docs(schema).keys()


def test_typed_options_reject_typos_and_wrong_types() -> None:
    cfg = OmegaConf.structured(DigitsDataConf)
    for section, key, value in ((cfg.loader, "btch_size", 3), (cfg.loader, "batch_size", "many"), (cfg.train, "x", 0)):
        with pytest.raises(OmegaConfBaseException, match=key):
            section[key] = value
    cfg.val = None


def test_the_default_hooks_are_the_stored_ones() -> None:
    assert set(DEFAULT_HOOKS) == {name for name, _ in schemas.stored("default_hooks")}
