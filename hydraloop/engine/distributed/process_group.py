"""Ranks that train together over torch.distributed: sums, gathers and broadcasts values, and wraps or shards the model.

There are two groups. The devices' group (nccl, or gloo on CPUs) exchanges gradients and device tensors. The hosts'
group (gloo) exchanges plain values and the requests of hooks, which need not wait for a device.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from hydraloop.engine.distributed.buckets import broadcast, gathered, in_buckets
from hydraloop.engine.distributed.comm import Distributed, Pending
from hydraloop.engine.distributed.fsdp import hosts_mesh, reshard, shard
from hydraloop.errors import PeerError, UserError
from hydraloop.files.result import describe
from hydraloop.files.secrets import mask_text

if TYPE_CHECKING:
    from hydraloop.schemas.engine import DistributedConf

_FAILED = "failed"
"""The key in the store for the error of the rank that failed first."""


def connect(options: DistributedConf, device: str = "auto") -> Distributed:
    """Join the processes that a launcher has started, by its environment variables (RANK, WORLD_SIZE, …).

    Args:
        device: as in `engine.device`.

    Returns:
        A `ProcessGroup`, once all ranks have joined; a plain `Distributed` for a single process.

    Raises:
        UserError: there is no such device, this process has already joined, or there should be several and is one.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" not in os.environ or world_size == 1:
        if options.nproc_per_node > 1:
            raise UserError(
                "from Python no processes are started",
                key="distributed.nproc_per_node",
                remedy=f"Use train.py, or torchrun --nproc-per-node={options.nproc_per_node} script.py.",
            )
        return Distributed()
    if dist.is_initialized():
        raise UserError(
            "this process has already joined the others",
            key="distributed",
            remedy="Pass on what the first engine has: hydraloop.build(cfg, distributed=engine.distributed).",
        )
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=options.timeout)))
    # torchrun keeps one store over its restarts. The prefix hides the keys of earlier attempts.
    store = PrefixStore(f"hydraloop-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    group = ProcessGroup(options, store, rank, world_size, int(os.environ.get("LOCAL_RANK", rank)), device=device)
    group.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    group.node_rank = int(os.environ.get("GROUP_RANK", rank // group.local_world_size))  # torchrun calls a node a group
    return group


class ProcessGroup(Distributed):
    """One of several processes that train together.

    Args:
        options: of `distributed` in the config.
        store: shared by all ranks.
        rank: 0 .. world_size - 1.
        world_size: 2 or more.
        local_rank: the rank on this machine.
        device: as in `engine.device`.
    """

    def __init__(
        self, options: DistributedConf, store: Any, rank: int, world_size: int, local_rank: int, *, device: str = "auto"
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
        offload = self.sharded and options.fsdp.offload
        backend = options.backend
        if backend == "auto":
            backend = dist.get_default_backend_for_device(self._device)
            if offload:  # shards in host memory are gathered there, too
                backend = f"cpu:gloo,{self._device.type}:{backend}"
        _use_loopback()
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
        self.mesh = hosts_mesh(timeout) if self.sharded else None

    # The model. ------------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        """Convert batch norm (`sync_batchnorm`). With FSDP2, shard rank 0's model; its parameters become DTensors.

        Raises:
            UserError: an option of FSDP2, or `sync_batchnorm`, does not fit the model or the device.
        """
        if self._options.sync_batchnorm:
            convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
            convert(model)
        if self.sharded:
            self.broadcast_weights(model)
            shard(model, self._options.fsdp, self._device, autocast)
            self._model = model

    def wrap(self, task: nn.Module, *, is_first: bool = True) -> nn.Module:
        """With DDP, return the task in `DistributedDataParallel`; with FSDP2, the task."""
        if self.sharded:
            return task
        options = self._options
        ddp: Any = nn.parallel.DistributedDataParallel
        if is_first:  # before torch 2.13, DDP does this only together with doing it in every forward
            broadcast(task.buffers())
        else:  # DDP is in a reference cycle: free the old one and its buckets before the new one is made
            self._ddp = None
            gc.collect()
        # `before_evaluation` makes buffers equal again. torch 2.13 has renamed the option.
        is_renamed = "forward_sync_buffers" in inspect.signature(ddp).parameters
        self._ddp = ddp(
            task,
            **{"forward_sync_buffers" if is_renamed else "broadcast_buffers": False},
            init_sync=is_first,
            bucket_cap_mb=options.bucket_cap_mb,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=True,  # saves a copy of all gradients
        )
        return cast(nn.Module, self._ddp)

    def broadcast_weights(self, task: nn.Module) -> None:
        """Broadcast rank 0's parameters and buffers."""
        broadcast((*task.parameters(), *task.buffers()))

    def average(self, parameters: Mapping[str, nn.Parameter], step: str) -> None:
        """One all-reduce for each 250 MiB of a type; a parameter without a gradient counts as zeros.

        With `find_unused_parameters`, the hosts also exchange which gradients any rank has.
        """
        if self._alone:
            return
        unused = [name for name, parameter in parameters.items() if parameter.grad is None]
        if self._options.find_unused_parameters:
            used = self.sum(torch.tensor([name not in unused for name in parameters], dtype=torch.int32)).tolist()
            parameters = {name: one for (name, one), count in zip(parameters.items(), used, strict=True) if count}
        elif unused:
            raise UserError(
                f"the loss of the step {step!r} does not depend on {', '.join(unused)}, so it has no gradient",
                key="distributed.find_unused_parameters",
                remedy="Set it to true if other batches use them; freeze them ('hooks=[freeze]') if none does.",
            )
        gradients = []
        for parameter in parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        in_buckets(gradients, lambda flat: dist.all_reduce(flat.div_(self.world_size)))

    def sync_gradients(self, on: bool) -> None:
        """Set whether the next backward averages the gradients; off is like torch's `no_sync`."""
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = on
        elif self._model is not None:
            self._model.set_requires_gradient_sync(on)

    def before_evaluation(self, task: nn.Module) -> None:
        """Broadcast rank 0's buffers, and free gathered weights, because a hook may have replaced their shards."""
        self.after_evaluation()
        if not self._alone:
            broadcast(task.buffers())

    def after_evaluation(self) -> None:
        """Free gathered weights."""
        if self._model is not None:
            reshard(self._model)

    def lower_timeout(self) -> None:
        """Set the timeout of the devices' group to `train_timeout`. The hosts' group keeps `timeout`: it waits for
        checkpoints."""
        if self._options.train_timeout is not None and not self._alone:
            cast(dist.ProcessGroup, dist.group.WORLD).set_timeout(timedelta(seconds=self._options.train_timeout))

    # Values. ---------------------------------------------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks as a new tensor; one all-reduce in the group of the tensor's device."""
        total = values.clone()
        if not self._alone:
            dist.all_reduce(total, group=self._hosts if total.device.type == "cpu" else None)
        return total

    def all_gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks; one collective of the devices, and another one in backward."""
        return values if self._alone else gathered(values)

    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' values, over the hosts; two collectives."""
        if self._alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._hosts)
        return values

    def from_main(self, value: Any) -> Any:
        """Return rank 0's value, over the hosts; two collectives."""
        if self._alone:
            return value
        of_main = self.gather(value if self.is_main else None)[0]
        return value if self.is_main else of_main

    def barrier(self) -> None:
        """Wait for all hosts; devices continue."""
        if not self._alone:
            dist.barrier(group=self._hosts)

    def start_max(self, values: Tensor) -> Pending:
        """Start an all-reduce among the hosts."""
        if self._alone:
            return Pending()
        return cast(Pending, dist.all_reduce(values, dist.ReduceOp.MAX, group=self._hosts, async_op=True))

    def start_sum(self, values: Tensor) -> Pending:
        """Start an all-reduce among the devices."""
        if self._alone:
            return Pending()
        return cast(Pending, dist.all_reduce(values, async_op=True))

    # The end. --------------------------------------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """Write the error to the store, unless another rank was first, and communicate no more."""
        if self._alone:
            return
        self._alone = True
        if isinstance(error, PeerError):
            return
        try:
            self._store.compare_set(_FAILED, "", json.dumps([self.rank, mask_text(describe(error))]))
        except (RuntimeError, OSError):  # the launching process has the store
            self.orphaned = True

    def first_failure(self) -> tuple[int, str] | None:
        """Return what the store has; None if the store has ended."""
        try:
            if not self._store.check([_FAILED]):
                return None
            rank, error = json.loads(self._store.get(_FAILED))
        except (RuntimeError, OSError):
            return None
        return rank, error

    def close(self) -> None:
        """Destroy both groups; not after an error, because a group may wait for ranks that have ended."""
        if not self._alone and dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()


def _use_loopback() -> None:
    """If all processes are on this machine, let gloo use the loopback interface: the host name may not resolve."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        is_local = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    else:
        is_local = os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1")
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if is_local and loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
