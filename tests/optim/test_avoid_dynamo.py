"""avoid_dynamo_import: no import of torch._dynamo, and the same steps."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SETUP = """
import sys, torch
from hydraloop.optim.avoid_dynamo import avoid_dynamo_import
"""
_TRAIN = """
def train(target, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = target(model.parameters(), lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    assert torch.is_grad_enabled()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

def train_all():
    return [train(torch.optim.AdamW, fused=True), train(torch.optim.AdamW), train(torch.optim.SGD, momentum=0.9),
            train(torch.optim.RMSprop)]
"""


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", _SETUP + _TRAIN + code], check=True)


@pytest.mark.slow
def test_torch_still_needs_it() -> None:
    """If this fails, torch's optimizers no longer import the compiler, and avoid_dynamo.py can be removed."""
    run(
        "assert 'torch._dynamo' not in sys.modules, 'imported by something else'\n"
        "train_all()\n"
        "assert 'torch._dynamo' in sys.modules, 'remove avoid_dynamo.py'\n"
    )


@pytest.mark.slow
def test_training_imports_no_dynamo_and_steps_are_equal_after_it_is_imported() -> None:
    run(
        "avoid_dynamo_import()\n"
        "avoid_dynamo_import()\n"
        "without = train_all()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "import torch._dynamo\n"
        "after = train_all()\n"
        "assert all(torch.equal(a, b) for a, b in zip(without, after, strict=True))\n"
        # Now torch's own wrappers are used, which exclude the function from compilation.
        "kept = torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable\n"
        "assert kept.__module__ != 'hydraloop.optim.avoid_dynamo', kept\n"
    )
