"""Ranks: several processes that train together, over torch.distributed.

Two groups: the device's (nccl, or gloo on CPUs) for gradients and device tensors, and one of the hosts (gloo) for plain
values and for what hooks ask for, so that neither waits for a device.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import socket
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from hydraloop.engine.distributed.comm import Distributed, Pending
from hydraloop.errors import PeerError, UserError
from hydraloop.run.result import describe

_FAILED = "failed"
"""The key in the store under which the first rank that fails says so."""


class Sharding(Protocol):
    """The options of FSDP2; `hydraloop.schemas.distributed.FSDPConf` gives their reasons."""

    wrap: list[str]
    reshard_after_forward: bool
    param_dtype: str | None
    reduce_dtype: str | None
    offload: bool


class Options(Protocol):
    """The options of `Ranks`; `hydraloop.schemas.distributed.DistributedConf` gives their reasons."""

    strategy: str
    backend: str
    timeout: float
    agree_interval: int
    bucket_cap_mb: float | None
    find_unused_parameters: bool
    sync_batchnorm: bool
    fsdp: Sharding


def connect(options: Options, device: str = "auto") -> Distributed:
    """Join the processes that a launcher has started, as its environment variables say (RANK, WORLD_SIZE, …).

    Args:
        device: as in `engine.device`.

    Returns:
        `Ranks`, after all of them have come; a plain `Distributed` where nothing was launched, or one process.

    Raises:
        UserError: no such device, or the process has joined the others already.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" not in os.environ or world_size == 1:
        return Distributed()
    if dist.is_initialized():
        raise UserError(
            "this process has joined the others already",
            key="distributed",
            remedy="Hand on what the first engine has: hydraloop.build(cfg, distributed=engine.distributed).",
        )
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=options.timeout)))
    # torchrun keeps one store over its restarts: without a part of it for each, the last attempt's keys would be found.
    store = PrefixStore(f"hydraloop-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    ranks = Ranks(options, store, rank, world_size, int(os.environ.get("LOCAL_RANK", rank)), device=device)
    ranks.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    ranks.node_rank = int(os.environ.get("GROUP_RANK", rank // ranks.local_world_size))  # torchrun's word for a node
    return ranks


class Ranks(Distributed):
    """This process among `world_size` ones.

    Args:
        options: see `Options`.
        store: that all ranks share.
        rank: 0 .. world_size - 1.
        world_size: 2 or more.
        local_rank: the rank on this machine.
        device: as in `engine.device`.
    """

    def __init__(
        self, options: Options, store: Any, rank: int, world_size: int, local_rank: int, *, device: str = "auto"
    ) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.agree_interval = options.agree_interval
        self.sharded = options.strategy == "fsdp2"
        self._options = options
        self._store = store
        self._alone = False
        self._ddp: Any = None
        self._model: Any = None
        self._device = self.device(device)
        if self.sharded and options.fsdp.offload and self._device.type == "cpu":
            raise UserError(
                "on a CPU the shards are in host memory already", key="distributed.fsdp.offload", remedy="Use false."
            )
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index)
        backend = options.backend
        if backend == "auto":
            backend = dist.get_default_backend_for_device(self._device)
            if self.sharded and options.fsdp.offload:  # shards in host memory are gathered there, too
                backend = f"cpu:gloo,{self._device.type}:{backend}"
        loopback = _loopback()
        if loopback is not None and _is_local():  # else gloo asks for this machine's name, which may lead nowhere
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        timeout = timedelta(seconds=options.timeout)
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=self._device if self._device.type == "cuda" else None,
        )
        self._hosts = dist.new_group(backend="gloo", timeout=timeout)
        """All ranks, their hosts' memory."""

    def device(self, wanted: str) -> torch.device:
        """As in a single process; of several GPUs the one with the local rank's number."""
        device = super().device(wanted)
        if device.type == "cpu" or wanted not in ("auto", device.type):
            return device
        if self.local_rank >= torch.accelerator.device_count():
            raise UserError(
                f"there are {torch.accelerator.device_count()} devices for the process {self.local_rank} (from 0) "
                "of this machine",
                key="distributed.nproc_per_node",
                remedy=f"Use {torch.accelerator.device_count()} or fewer, or engine.device=cpu.",
            )
        return torch.device(device.type, self.local_rank)

    # The model. ------------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module) -> None:
        """With FSDP2, shard the model over all ranks; its parameters become DTensors. Rank 0's values count.

        Raises:
            UserError: an option of FSDP2, or `sync_batchnorm`, does not fit the model or the device.
        """
        if self._options.sync_batchnorm:
            if self._device.type == "cpu":
                raise UserError(
                    "torch has it for GPUs only", key="distributed.sync_batchnorm", remedy="Set it to false on a CPU."
                )
            convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
            convert(model)
        if self.sharded:
            from hydraloop.engine.distributed.fsdp import shard

            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), 0)
            shard(model, self._options.fsdp, self._device)
            self._model = model

    def wrap(self, task: nn.Module) -> nn.Module:
        """With DDP, the task in `DistributedDataParallel`; rank 0's parameters and buffers count."""
        if self.sharded:
            return task
        wrapped = task
        if not self._options.find_unused_parameters:  # to which the tally, in no forward, would be one
            wrapped = with_tally = _WithTally(task, self._device)
            self.tally = with_tally.tally
        ddp: Any = nn.parallel.DistributedDataParallel
        for buffer in task.buffers():  # before torch 2.13, DDP itself does so only if it does in every forward, too
            dist.broadcast(buffer.detach(), 0)
        # Later, they are made the same before each evaluation. torch 2.13 has renamed the option.
        new = "forward_sync_buffers" in inspect.signature(ddp).parameters
        self._ddp = ddp(
            wrapped,
            **{"forward_sync_buffers" if new else "broadcast_buffers": False},
            bucket_cap_mb=self._options.bucket_cap_mb,
            find_unused_parameters=self._options.find_unused_parameters,
            gradient_as_bucket_view=True,  # saves a copy of all gradients
        )
        return cast(nn.Module, self._ddp)

    def sync_gradients(self, on: bool) -> None:
        """What `no_sync` does, for the forward and backward to come; all-reduces once where it is on."""
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = on
        elif self._model is not None:
            self._model.set_requires_gradient_sync(on)

    def before_evaluation(self, task: nn.Module) -> None:
        """Broadcast rank 0's buffers; gather weights in shards anew, a hook may have put others in their place."""
        self.after_evaluation()
        if not self._alone:
            for buffer in task.buffers():
                dist.broadcast(buffer.detach(), 0)

    def after_evaluation(self) -> None:
        """Forget gathered weights."""
        if self._model is not None:
            from hydraloop.engine.distributed.fsdp import forget_gathered

            forget_gathered(self._model)

    # Values. ---------------------------------------------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, a new tensor; one all-reduce in the group of the tensor's device."""
        total = values.clone()
        if not self._alone:
            dist.all_reduce(total, group=self._hosts if total.device.type == "cpu" else None)
        return total

    def gather(self, value: Any) -> list[Any]:
        """All ranks' values, over the hosts; two collectives."""
        if self._alone:
            return [value]
        mine = _encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._hosts)
        longest = max(int(size) for size in sizes)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        dist.all_gather(parts, padded, group=self._hosts)
        return [_decode(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, over the hosts; two collectives."""
        if self._alone:
            return value
        mine = _encode(value) if self.is_main else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(mine)])
        dist.broadcast(size, 0, group=self._hosts)
        sent = mine if self.is_main else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(sent, 0, group=self._hosts)
        return value if self.is_main else _decode(sent)

    def barrier(self) -> None:
        """Wait for all hosts; devices go on."""
        if not self._alone:
            dist.barrier(group=self._hosts)

    def start_max(self, values: Tensor) -> Pending:
        """An all-reduce among the hosts, in the background."""
        if self._alone:
            return Pending()
        return cast(Pending, dist.all_reduce(values, dist.ReduceOp.MAX, group=self._hosts, async_op=True))

    def start_sum(self, values: Tensor) -> Pending:
        """An all-reduce among the devices, in the background."""
        if self._alone:
            return Pending()
        return cast(Pending, dist.all_reduce(values, async_op=True))

    # The end. --------------------------------------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """Leave word in the store, unless another rank was first, and speak to nobody any more."""
        if self._alone:
            return
        self._alone = True
        if isinstance(error, PeerError):
            return
        try:
            self._store.compare_set(_FAILED, "", json.dumps([self.rank, describe(error)]))
        except (RuntimeError, OSError):  # the launching process keeps the store
            self.orphaned = True

    def first_failure(self) -> tuple[int, str] | None:
        """What the store says; None where it is gone, too."""
        try:
            if not self._store.check([_FAILED]):
                return None
            rank, error = json.loads(self._store.get(_FAILED))
        except (RuntimeError, OSError):
            return None
        return rank, error

    def close(self) -> None:
        """Destroy both groups; not after an error, since a group whose ranks have gone may wait for them."""
        if not self._alone and dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()


class _WithTally(nn.Module):
    """A task and one more parameter: what is put into its gradient is averaged over the ranks with the others', so that
    the number of samples (or tokens) of all ranks comes without a collective of its own."""

    def __init__(self, task: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.task = task
        self.tally = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, batch: Any) -> Any:
        """What the task returns."""
        return self.task(batch)


def _encode(value: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def _decode(encoded: Tensor) -> Any:
    return torch.load(io.BytesIO(encoded.numpy().tobytes()), weights_only=True)


def _is_local() -> bool:
    """Whether all processes are known to be on this machine."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    return os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1")


def _loopback() -> str | None:
    """The name of the interface that leads back to this machine."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
