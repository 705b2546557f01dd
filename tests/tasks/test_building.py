"""A model prepared for training on several ranks: what is compiled, and in which type its shards are gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

import hydraloop
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.errors import UserError
from hydraloop.schemas.engine import FSDPConf
from hydraloop.tasks import Regression
from hydraloop.tasks.building import prepare_model
from tests.ranks import on_ranks


class Block(nn.Module):
    """A layer that notes the types of its weights and inputs when it computes."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.LayerNorm(4)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """`[N, 4]` to `[N, 4]`."""
        if not torch.compiler.is_compiling():
            self.seen += [self.layer.weight.dtype, inputs.dtype]
        outputs: Tensor = self.norm(self.layer(inputs)).tanh()
        return outputs


class FloatMSELoss(nn.MSELoss):
    """In fp32: torch 2.11 cannot differentiate a loss of outputs in bfloat16 and targets in fp32."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`[N, 1]` and `[N, 1]` to a scalar."""
        return super().forward(outputs.float(), targets)


def network(norm: bool = False) -> nn.Sequential:
    """Two blocks and a head."""
    torch.manual_seed(0)
    return nn.Sequential(Block(norm), Block(norm), nn.Linear(4, 1))


def sharded_config(*lines: str) -> DictConfig:
    lines = ("distributed.strategy=fsdp2", "distributed.fsdp.wrap=[Block]", *lines)
    return hydraloop.compose([*lines], folder=Path(__file__).parents[2])


def compiled_then_sharded(distributed: Distributed) -> list[Any]:
    """Return which modules are compiled when the model is sharded, and a gradient of the model."""
    task = Regression(network(), nn.MSELoss())
    prepare, found = distributed.prepare, []

    def noted(model: nn.Module, *args: Any) -> None:
        found.extend(module._compiled_call_impl is not None for module in model.children())
        prepare(model, *args)

    distributed.prepare = noted  # type: ignore[method-assign]
    prepare_model(sharded_config("engine.compile={backend:aot_eager}"), task, torch.device("cpu"), distributed)
    torch.manual_seed(1)
    task((torch.randn(8, 4), torch.randn(8, 1)))["loss"].backward()
    block: Any = task.model[0]
    return [*found, block.layer.weight.grad.full_tensor().tolist(), len(block.seen)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
def test_blocks_are_compiled_before_they_are_sharded() -> None:
    model: Any = network()
    torch.manual_seed(1)
    nn.functional.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 1)).backward()
    for *compiled, gradient, eager_calls in on_ranks(
        2, compiled_then_sharded, strategy="fsdp2", fsdp=FSDPConf(wrap=["Block"])
    ):
        assert (compiled, eager_calls) == ([True, True, False], 0)
        torch.testing.assert_close(torch.tensor(gradient), model[0].layer.weight.grad)


def test_cuda_graphs_with_accumulation_are_refused() -> None:
    """Seen on a GPU: the second backward of a window reads a gradient that the graph has overwritten."""
    lines = ["engine.compile={mode: reduce-overhead}", "engine.accumulate=2"]
    cfg = hydraloop.compose(lines, folder=Path(__file__).parents[2])
    with pytest.raises(UserError, match=r"engine\.compile: CUDA graphs overwrite the gradients"):
        prepare_model(cfg, Regression(network(), nn.MSELoss()), torch.device("cpu"), Distributed())


def gathered(distributed: Distributed, precision: str, norm: bool) -> tuple[str, str, str, str, float]:
    """The types of a weight and the inputs in the forward, then of the gradient and the shard; the last loss."""
    task = Regression(network(norm), FloatMSELoss())
    prepare_model(sharded_config(f"precision={precision}"), task, torch.device("cpu"), distributed)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    torch.manual_seed(1)
    batch = torch.randn(8, 4), torch.randn(8, 1)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = task(batch)["loss"]
        loss.backward()
        optimizer.step()
    block: Any = task.model[0]
    return (
        str(block.seen[0]),
        str(block.seen[1]),
        str(block.layer.weight.grad.dtype),
        str(block.layer.weight.dtype),
        loss.item(),
    )


@pytest.mark.parametrize(
    ("precision", "param_dtype", "norm", "expected"),
    [
        ("bf16", "auto", False, "bfloat16"),
        ("bf16", None, False, "float32"),
        ("bf16", "auto", True, "float32"),
        ("fp32", "auto", False, "float32"),
        ("fp32", "bfloat16", False, "bfloat16"),
    ],
)
def test_the_type_in_which_shards_are_gathered(
    precision: str, param_dtype: str | None, norm: bool, expected: str
) -> None:
    *_, whole = gathered(Distributed(), "fp32", norm)
    options = {"strategy": "fsdp2", "fsdp": FSDPConf(wrap=["Block"], param_dtype=param_dtype)}
    for seen, inputs, *kept, loss in on_ranks(2, gathered, precision, norm, **options):
        assert seen == f"torch.{expected}"
        assert inputs == ("torch.bfloat16" if param_dtype == "bfloat16" else "torch.float32")
        assert kept == ["torch.float32"] * 2, "of the gradient and of the parameter"
        assert loss == pytest.approx(whole, rel=0.03)
