"""`experiment=char_lm` by hand: an efficient training loop for the same model and data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from time import perf_counter
from typing import IO, Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from examples.char_lm.gpt import GPT
from examples.char_lm.python_sources import PythonSources

IGNORED = -100


class ByHand:
    """A training loop that can be continued.

    It uses DDP over the processes of the default group if there is one, and autocast to bf16 and torch.compile if the
    config has them. It has fused AdamW, a warm-up and half a cosine, clipping, and a record every few iterations, which
    is the only host sync. The gradient is that of the mean over the targets of all ranks. Their number is summed over
    the ranks during the forward pass.

    Args:
        cfg: the composed config.
        device: device to train on.
        file: file for the records of rank 0.
    """

    def __init__(self, cfg: DictConfig, device: torch.device, file: IO[str]) -> None:
        torch.manual_seed(cfg.seed)
        self.device, self.file = device, file
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.is_main = self.ranks == 1 or dist.get_rank() == 0
        self.bf16 = cfg.precision.name == "bf16"
        self.max_norm, self.record_every = cfg.default_hooks.grad_clip.max_norm, cfg.default_hooks.logger.interval
        self.batches = self._batches(cfg)
        self.iteration = 0
        self.loss = math.nan
        """Loss in the last record."""
        self.losses = self.norms = torch.zeros((), device=device)

        model: nn.Module = GPT(**{name: value for name, value in cfg.task.model.items() if name != "_target_"})
        model.to(device)
        if cfg.engine.compile:
            model.compile()
        self.parameters = list(model.parameters())
        options = cfg.optimizer
        decayed = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
        others = [parameter for parameter in self.parameters if not any(parameter is one for one in decayed)]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
            lr=options.lr,
            betas=tuple(options.betas),
            weight_decay=options.weight_decay,
            fused=True,
        )
        linear = cfg.scheduler.linear
        warmup, first, steps = int(linear.end), float(linear.start_factor), int(cfg.engine.max_iters)

        def factor(step: int) -> float:
            return (first + (1 - first) * min(step / (warmup - 1), 1.0)) * (1 + math.cos(math.pi * step / steps)) / 2

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        if self.ranks > 1:
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.model = model

    def run(self, iterations: int) -> None:
        """Train for a number of iterations. The device may still be busy with the last ones on return."""
        then = perf_counter()
        for tokens, targets in islice(self.batches, iterations):
            with self._autocast():
                loss = self._loss(tokens, targets)
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation for it
            norm = nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.schedule.step()
            self.losses, self.norms = self.losses + loss.detach(), self.norms + norm
            self.iteration += 1
            if self.iteration % self.record_every == 0:
                now = perf_counter()
                self._record((now - then) / self.record_every)
                then = now

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.ranks == 1:
            return functional.cross_entropy(self._logits(tokens), targets.flatten(), ignore_index=IGNORED)
        count = (targets != IGNORED).sum()
        counting: Any = dist.all_reduce(count, async_op=True)
        total = functional.cross_entropy(self._logits(tokens), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        counting.wait()
        return total * self.ranks / count

    def _logits(self, tokens: Tensor) -> Tensor:
        """Return one row of logits for each token, in float32 as autocast on a GPU would compute the loss."""
        logits: Tensor = self.model(tokens).flatten(0, 1).float()
        return logits

    def _record(self, seconds: float) -> None:
        """Write a record, which is the only host sync."""
        sums = torch.stack([self.losses, self.norms])
        if self.ranks > 1:
            dist.all_reduce(sums)
        self.loss, norm = (sums / (self.ranks * self.record_every)).tolist()
        self.losses = self.norms = torch.zeros((), device=self.device)
        if self.is_main:
            lr = self.optimizer.param_groups[0]["lr"]
            record = {"iteration": self.iteration, "lr": lr, "time": seconds, "grad_norm": norm, "loss": self.loss}
            print(json.dumps(record), file=self.file, flush=True)

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def _batches(self, cfg: DictConfig) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches on the device endlessly, each epoch in a new order."""
        options = {name: value for name, value in cfg.data.train.items() if name != "_target_"}
        data = PythonSources(**options)
        distributed = DistributedSampler[Any](data, seed=cfg.seed) if self.ranks > 1 else None
        loader = DataLoader(
            data,
            batch_size=cfg.data.loader.batch_size,
            sampler=RandomSampler(data) if distributed is None else distributed,
            collate_fn=_as_it_is,  # the data set returns whole batches
            num_workers=cfg.data.loader.num_workers,
            pin_memory=self.device.type == "cuda",
        )
        epoch = 0
        while True:
            if distributed is not None:
                distributed.set_epoch(epoch)
            for tokens, targets in loader:
                yield tokens.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)
            epoch += 1


def _as_it_is(batch: Any) -> Any:
    return batch
