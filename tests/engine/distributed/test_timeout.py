"""After the first iteration, devices wait for each other for a shorter time; hosts do not."""

from __future__ import annotations

import time

import pytest
import torch

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.tasks import Regression
from tests.marks import slow
from tests.ranks import on_ranks


def late(distributed: Distributed) -> tuple[float, str]:
    """Rank 1 is 3 s late for the hosts, then for the devices. Return how long the devices waited, and the error."""
    model = torch.nn.Linear(4, 1)
    distributed.prepare(model)
    forward = distributed.wrap(Regression(model, torch.nn.functional.mse_loss))
    batch = torch.ones(2, 4), torch.zeros(2, 1)
    forward(batch)["loss"].backward()
    distributed.first_step_done()
    time.sleep(3 * distributed.rank)
    distributed.barrier()
    time.sleep(3 * distributed.rank)
    start = time.monotonic()
    try:
        forward(batch)["loss"].backward()
    except RuntimeError as error:
        distributed.abandon(error)
        return time.monotonic() - start, str(error)
    return time.monotonic() - start, ""


@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp2")])
def test_a_rank_that_hangs_is_noticed_sooner_after_the_first_iteration(strategy: str) -> None:
    options = {"strategy": strategy, "timeout": 60.0, "find_unused_parameters": True}
    waited, said = on_ranks(2, late, train_timeout=1.0, **options)[0]
    assert "timeout" in said or "Timed out" in said
    assert 0.5 < waited < 2.5
    for _, said in on_ranks(2, late, train_timeout=None, **options):
        assert said == ""
