"""The schemas of data, task, model, optimizer and scheduler against what they build, so that neither drifts."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydraloop.data import build_loader
from hydraloop.schemas import data, model, optimizer, scheduler, task

NOT_ARGUMENTS = {"_target_", "_partial_"}
BY_THE_BUILDER = {"param", "by_epoch", "convert_to_iter_based", "begin", "end", "monitor"}
SCHEMAS: list[Any] = [
    schema
    for module in (data, task, model, optimizer, scheduler)
    for schema in vars(module).values()
    if dataclasses.is_dataclass(schema)
    and "_target_" in {field.name for field in dataclasses.fields(schema)}
    and not schema.__name__.startswith("_")  # a base is no option
]


def target(schema: Any) -> Any:
    module, _, name = schema()._target_.rpartition(".")
    return getattr(importlib.import_module(module), name)


def names(schema: Any) -> set[str]:
    ours = BY_THE_BUILDER if schema.__module__.endswith("scheduler") else set()
    return {field.name for field in dataclasses.fields(schema)} - NOT_ARGUMENTS - ours


def test_all_schemas_are_found() -> None:
    assert len(SCHEMAS) >= 26


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_the_fields_are_the_arguments(schema: Any) -> None:
    signature = inspect.signature(target(schema))
    left_out = {"params"}
    assert names(schema) == set(signature.parameters) - left_out


@pytest.mark.parametrize(
    "schema",
    [schema for schema in SCHEMAS if schema._target_.startswith("hydraloop")],
    ids=lambda schema: schema.__name__,
)
def test_our_defaults_are_the_classes(schema: Any) -> None:
    defaults = dataclasses.asdict(
        OmegaConf.to_object(OmegaConf.structured(schema(**{"model": None} if "model" in names(schema) else {})))
    )  # type: ignore[call-overload]
    parameters = inspect.signature(target(schema)).parameters
    compared = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty and name != "metrics"
    }
    assert {name: tuple(v) if isinstance(v := defaults[name], list) else v for name in compared} == compared


def test_the_loaders_options_are_build_loaders_arguments() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(data.LoaderConf)}
    assert fields.pop("eval_batch_size") is None
    parameters = inspect.signature(build_loader).parameters
    assert set(fields) == set(parameters) - {
        "dataset",
        "shuffle",
        "seed",
        "collate_fn",
        "device",
        "key",
        "rank",
        "world_size",
    }
    assert fields == {name: parameters[name].default for name in fields}


@pytest.mark.parametrize("module", [data, task, model, optimizer, scheduler])
def test_every_field_has_its_reason(module: Any) -> None:
    classes = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)]
    for schema in classes:
        for field, following in pairwise([*schema.body, None]):
            if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) != "_target_":
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert documented, f"{schema.name}: {ast.unparse(field)}"


def test_the_schemas_import_no_torch() -> None:
    code = (
        "import sys\n"
        "from hydraloop.schemas import data, model, optimizer, scheduler, task\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_typed_entries_refuse_typos_and_wrong_types() -> None:
    cfg = OmegaConf.structured(data.DigitsDataConf)
    with pytest.raises(Exception, match="btch_size"):
        cfg.loader.btch_size = 3
    with pytest.raises(Exception, match="batch_size"):
        cfg.loader.batch_size = "many"
    with pytest.raises(Exception, match="splt"):
        cfg.train.splt = "val"
    cfg.val = None
    assert cfg.val is None
