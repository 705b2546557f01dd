"""`fused`: one kernel for all parameters, if it works."""

from __future__ import annotations

import pytest
import torch

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.errors import UserError
from hydraloop.optim import resolve_fused
from tests.ranks import on_ranks

FLOATS = [torch.zeros(2), torch.zeros(3)]


@pytest.mark.parametrize("given", [True, False, None])
def test_an_explicit_fused_is_kept(given: bool | None) -> None:
    assert resolve_fused(given, FLOATS) is given


def test_auto_is_fused_if_the_kernel_works() -> None:
    assert resolve_fused("auto", FLOATS) is True
    assert resolve_fused("auto", [*FLOATS, torch.zeros(2, dtype=torch.complex64)]) is None
    assert resolve_fused("auto", [torch.zeros(2, device="meta")]) is None


def test_another_value_names_the_key() -> None:
    with pytest.raises(UserError) as caught:
        resolve_fused("yes", FLOATS)
    assert caught.value.key == "optimizer.fused"


def resolve_on_shards(distributed: Distributed) -> list[bool | None]:
    """Return the result of `auto` for two optimizers of a sharded model."""
    distributed.prepare(model := torch.nn.Linear(3, 1))
    return [resolve_fused("auto", model.parameters(), optimizer=name) for name in ("AdamW", "SGD")]


def test_sharded_parameters_are_fused_only_in_some_optimizers() -> None:
    # torch's fused SGD does not support sharded parameters. If this fails, remove _FUSED_ON_SHARDS.
    assert on_ranks(2, resolve_on_shards, strategy="fsdp2") == [[True, None]] * 2
