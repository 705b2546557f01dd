"""Checks of the data sets, of short trainings in this process, and of a step on two ranks."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hydraloop.commands.check.short_runs import ON_CPU, NotJudgedError, Watch, digest, short_run
from hydraloop.config.checks import Draft
from hydraloop.data.batching import BatchRequest, SeededFetcher
from hydraloop.data.map_style_loader import GlobalBatchLoader
from hydraloop.engine.batch_transfer import leaves_of
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.process_group import connect
from hydraloop.engine.engine import Engine
from hydraloop.engine.seeding import seed_everything
from hydraloop.errors import UserError
from hydraloop.files import environment
from hydraloop.files.terminal import print_to
from hydraloop.launch import start_ranks
from hydraloop.tasks.task import ignored_label, labels_error

MOST = 20_000
"""Samples of a data set that are read."""
_SECONDS = 20.0
"""Time for reading one data set."""
_FEW = 0.01
"""Part of a split that may be in the training data, in addition to the part of the training data that has copies."""
_ITERATIONS, _TIME = 60, "0:00:30"
"""Length and time limit of a training on one batch."""
_HALF, _EPOCH, _WHOLE = 2, 3, 6
"""Iterations before a checkpoint, of an epoch, and of a whole run: the resumed one begins inside of an epoch."""
_TOLERANCE = 1e-3
"""Difference of the gradients of all parameters, in parts of their norm. Rounding in fp32 makes up to 1e-4 in networks
without normalization; a loss that is a sum makes 1."""
OF_RANKS = "HYDRALOOP_CHECK"
"""Variable of the two ranks: the file for their gradients."""


@dataclass
class Read:
    """What is known of the samples of a data set."""

    samples: int
    """In the whole data set."""
    hashes: list[str] = field(default_factory=list)
    """Hashes of the samples that were read, without the label if a sample is `(inputs, label)`."""
    labels: set[int] = field(default_factory=set)
    """All integer labels that were read."""
    draws: bool = False
    """Whether samples differ between epochs, so that their hashes say nothing."""


def read(loader: GlobalBatchLoader) -> Read:
    """Read up to MOST samples, without the draws of augmentations if a data set wraps another one."""
    seeded, samples = loader.seeded, len(loader.dataset)
    indices = random.Random(0).sample(range(samples), min(samples, MOST))
    inner = _without_draws(seeded, indices[:8])
    found, until = Read(samples, draws=inner is None), monotonic() + _SECONDS
    for index in indices:
        sample = _sample(inner or seeded, index, 0)
        is_pair = isinstance(sample, tuple | list) and len(sample) == 2
        found.hashes.append(digest(sample[0] if is_pair else sample))
        found.labels.update(_integers(sample[1] if is_pair else sample))
        if monotonic() > until:
            break
    return found


def _without_draws(seeded: SeededFetcher, indices: Sequence[int]) -> SeededFetcher | None:
    """Return the data set, or the one that it wraps, whose samples are the same in two epochs; None without one."""
    while any(digest(_sample(seeded, index, 0)) != digest(_sample(seeded, index, 1)) for index in indices):
        outer, inner = seeded.dataset, getattr(seeded.dataset, "dataset", None)
        if inner is None or hasattr(outer, "indices") or len(inner) != len(outer):
            return None
        seeded = SeededFetcher(inner, seeded.collate, seeded.seed)
    return seeded


def _sample(seeded: SeededFetcher, index: int, epoch: int) -> Any:
    samples = seeded.samples(BatchRequest([index], epoch, index))
    return samples[0] if isinstance(samples, list) else samples


def _integers(label: Any) -> set[int]:
    """Return the integers in the label of a sample."""
    if not (isinstance(label, Tensor | int) or hasattr(label, "dtype")):
        return set()
    values = torch.as_tensor(label)
    return set() if values.is_floating_point() or values.dtype == torch.bool else set(values.flatten().tolist())


def sets_of(engine: Engine) -> dict[str, Read]:
    """Return what is known of the data sets with indices, by key."""
    loaders = engine.loaders.by_key().items()
    return {key: read(loader) for key, loader in loaders if isinstance(loader, GlobalBatchLoader)}


def splits(sets: Mapping[str, Read]) -> str:
    """Look for samples of validation and test sets in the training data.

    Args:
        sets: by key, `train`, `val`, `test/a`.
    """
    train = sets.get("train")
    others = {key: one for key, one in sets.items() if key != "train" and not one.draws}
    if train is None or train.draws or not others:
        raise NotJudgedError("it needs data.train and another data set, both with indices and without random samples")
    counts = Counter(train.hashes)
    copies = sum(count for count in counts.values() if count > 1) / len(train.hashes)
    for key, one in others.items():
        known, read_of = sum(sample in counts for sample in one.hashes), len(one.hashes)
        expected = (copies + _FEW) * read_of
        if known > expected + 3 * expected**0.5:
            remedy = "Split the data before you make the data sets, so that each sample is in one of them."
            problem = f"{known} of {read_of} samples are in data.train, too"
            raise UserError(problem, key=f"data.{key.replace('/', '.')}", remedy=remedy)
    return f"no sample of train is in {', '.join(others)}, apart from samples that repeat"


def labels(engine: Engine, sets: Mapping[str, Read]) -> str:
    """Compare the labels of the data with the number of outputs of a model that classifies."""
    known = {key: one for key, one in sets.items() if one.labels}
    found = cross_entropy_of(engine)
    if found is None or not known:
        raise NotJudgedError("the task has no cross-entropy over classes, or samples are not (inputs, label)")
    classes, ignored = found[0].shape[1], ignored_label(engine.task)
    for key, one in known.items():
        if not one.labels - {ignored} <= {*range(classes)}:
            raise labels_error(engine.task, torch.tensor([*one.labels]), classes, f"data.{key.replace('/', '.')}")
    everywhere = set[int]().union(*(one.labels for one in known.values())) - {ignored}
    never = [label for label in (0, classes - 1) if label not in everywhere]
    if never and all(len(one.hashes) == one.samples for one in known.values()):
        low, high = min(everywhere), max(everywhere)
        remedy = f"The labels are {low} to {high}. Number them from 0, and let the model have {high - low + 1} outputs."
        problem = f"the model has {classes} outputs, and no sample has the label {never[0]}"
        raise UserError(problem, key="task.model", remedy=remedy)
    return f"{len(everywhere)} labels for the model's {classes} outputs"


def cross_entropy_of(engine: Engine) -> tuple[Tensor, Tensor] | None:
    """Return the outputs `[N, C, …]` for the first training batch and the labels, if the loss is their cross-entropy.

    Returns:
        None for another loss, or if the task fails, as training then shows.
    """
    task = engine.task
    task.eval()
    try:
        with torch.no_grad():
            (batch,) = engine.batches.on_device(engine.loaders.train, count=1)
            if isinstance(task.loss, nn.CrossEntropyLoss | nn.NLLLoss):  # which fails for labels outside
                outputs, labels = task.model(batch[0]), batch[1]
            else:
                result = task(batch)
                outputs, labels = result["outputs"], result["targets"]
                torch.testing.assert_close(result["loss"], cross_entropy(outputs, labels), rtol=1e-3, atol=1e-5)
    except Exception:
        return None
    if not (isinstance(outputs, Tensor) and isinstance(labels, Tensor)) or labels.is_floating_point():
        return None
    return (outputs, labels) if labels.shape == outputs.shape[:1] + outputs.shape[2:] else None


def on_one_batch(draft: Draft, engine: Engine, folder: Path) -> tuple[Engine, Watch]:
    """Train on the first samples only, with new draws of augmentations each time; of a stream, on its first batch.

    Args:
        engine: with the data of the project.
    """
    watch = Watch()
    batch = None
    changes = {"scheduler": {}, "engine.max_iters": _ITERATIONS, "engine.max_time": _TIME, "engine.val_interval": None}
    if isinstance(engine.loaders.train, GlobalBatchLoader):
        changes["engine.overfit_batches"] = 1
    else:
        batch = next(iter(engine.loaders.train or ()))
    trained = short_run(draft, folder, watch, changes, batch=batch)
    trained.train()
    return trained, watch


def loss(base: Engine, engine: Engine, watch: Watch) -> str:
    """Judge whether the loss of one batch falls.

    Args:
        base: an engine of the project that has not trained.
        engine: the one that has trained on the batch, with what `watch` has seen.
    """
    if engine.task.steps:
        raise NotJudgedError(f"{type(engine.task).__name__} has several losses, which work against each other")
    if _draws(base):
        raise NotJudgedError("the same batch and weights have another loss each time, as in reinforcement learning")
    first, count = watch.losses[0], min(5, len(watch.losses))
    least = min(sum(watch.losses[at : at + count]) / count for at in range(len(watch.losses) - count + 1))
    text = f"{first:.4g} → {least:.4g} in {len(watch.losses)} iterations on one batch"
    falls = least <= first - abs(first) / 20 and not _ignores_inputs(base, watch.losses)
    if falls or abs(first) < 1e-3:
        return text
    remedy = "Is optimizer.lr right? Do targets belong to inputs?"
    raise UserError(f"the loss does not fall: {text}", key="task", remedy=remedy)


def _ignores_inputs(base: Engine, losses: list[float]) -> bool:
    """Return whether a cross-entropy stays at that of a constant output, as with labels that belong to other inputs."""
    outputs_and_labels = cross_entropy_of(base)
    third = len(losses) // 3
    if outputs_and_labels is None or outputs_and_labels[1].ndim != 1 or not third:
        return False
    labels = outputs_and_labels[1]
    constant = float(torch.special.entr(labels.bincount() / len(labels)).sum())  # the entropy of the labels
    middle = sum(losses[third : 2 * third]) / third
    late = sum(losses[-third:]) / third
    return constant > 0.3 and late > 0.9 * constant and late > 0.97 * middle


def _draws(engine: Engine) -> bool:
    """Return whether the task draws random numbers for its loss, apart from dropout."""
    (batch,) = engine.batches.on_device(engine.loaders.train, count=1)
    engine.task.train()
    engine.task.model.eval()
    losses = set()
    with suppress(Exception), torch.no_grad():  # a model that has no loss in eval mode
        for seed in range(3):
            seed_everything(seed)
            value = engine.task(batch)["loss"]
            losses.add(round(float(value if isinstance(value, Tensor) else value[0]), 6))
    return len(losses) > 1


def parameters(draft: Draft, folder: Path, base: Engine, trained: Engine, watch: Watch) -> str:
    """Look for parameters that are not trained: not registered, frozen with random values, or without a gradient.

    Args:
        folder: for another engine.
        base: an engine of the project that has not trained.
        trained: one that has, with what `watch` has seen.
    """
    frozen = {name: value for name, value in base.task.model.named_parameters() if not value.requires_grad}
    _refuse([*unregistered(base.task)], "are not registered", "Use nn.ModuleList, nn.ModuleDict or nn.Parameter.")
    if frozen:
        other = dict(short_run(draft, folder, changes={"seed": base.run.seed + 1}).task.model.named_parameters())
        random = [name for name, value in frozen.items() if not torch.equal(value, other[name])]
        _refuse(random, "are frozen with random values", "Load weights, or remove requires_grad_(False).")
    named = trained.task.model.named_parameters()
    unused = [name for name, value in named if value.requires_grad and name not in watch.gradients]
    _refuse(unused, "never get a gradient", "Use them in forward without detach(), or remove them.")
    return f"{len(watch.gradients)} get gradients{f', {len(frozen)} are frozen' if frozen else ''}"


def _refuse(names: Sequence[str], problem: str, remedy: str) -> None:
    if names:
        shown = ", ".join(names[:4]) + " …" * (len(names) > 4)
        raise UserError(f"parameters {problem}: {shown}", key="task.model", remedy=remedy)


def unregistered(task: nn.Module) -> Iterator[str]:
    """Yield the attributes of modules that hold trainable parameters which the task does not know."""
    known = set(map(id, task.parameters()))
    for place, module in task.named_modules():
        for name, value in vars(module).items():
            held = [each.parameters() if isinstance(each, nn.Module) else [each] for each in leaves_of(value)]
            own = [one for several in held for one in several if isinstance(one, Tensor)]
            is_hidden = any(one.requires_grad and id(one) not in known for one in own)
            if is_hidden and name != "engine" and not name.startswith("_"):
                yield f"{place}.{name}".lstrip(".")


def resume(draft: Draft, folder: Path) -> str:
    """Train a short run, and a second one that continues from the middle of the first."""
    limits = {"engine.max_iters": _WHOLE, "engine.limit_train_batches": _EPOCH, "engine.limit_val_batches": 1}
    whole, rest = Watch(save_at=_HALF), Watch()
    first = short_run(draft, folder / "whole", whole, {**ON_CPU, **limits})
    first.train()
    checkpoint = folder / "whole" / "checkpoints" / "halfway.pth"
    resumed = short_run(draft, folder / "resumed", rest, {**ON_CPU, **limits}, checkpoint=checkpoint)
    resumed.train()
    remedy = "Keep what changes in buffers (register_buffer), or in the state_dict of the hook or schedule."
    if rest.losses != whole.losses[_HALF:] or digest(first.task.state_dict()) != digest(resumed.task.state_dict()):
        if rest.batches != whole.batches[_HALF:]:
            remedy = "Its batches differ: draw from the global generators of torch, NumPy or Python, which are seeded."
        raise UserError("a resumed run has other losses or weights", key="task", remedy=remedy)
    return f"{_WHOLE - _HALF} iterations after a checkpoint are equal to those without a stop"


def ranks(draft: Draft, base: Engine, folder: Path, argv: Sequence[str]) -> str:
    """Take one step in this process, and one on two ranks, on the CPU in fp32, without dropout and batch norm.

    Args:
        base: an engine of the project.
        folder: for the files of these runs.
        argv: all arguments of this process, for those of the ranks.
    """
    first = _gradients(draft, None, folder / "first", share_of_batch(base, 0), 0)
    second = _gradients(draft, None, folder / "second", share_of_batch(base, 1), 1)  # with other random numbers
    if _distance(first, second) > _TOLERANCE:
        raise NotJudgedError("collate_fn or the step draws random numbers apart from nn.Dropout, and ranks draw others")
    file = folder / "gradients.pth"
    options = OmegaConf.create({"nproc_per_node": 2, "nnodes": 1, "max_restarts": 0})
    variables = {OF_RANKS: str(file), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ended, _ = start_ranks.launch(options, environment.script()[1:], argv, variables)
    if ended.error is not None:
        raise ended.error
    distance = _distance(first, torch.load(file, weights_only=True))
    text = f"gradients of 2 ranks and of one process differ by {distance:.0e} with the same global batch"
    if distance > _TOLERANCE:
        remedy = "Let the loss be the mean over the samples of a batch, or return (sum, count)."
        raise UserError(text, key="task.loss", remedy=remedy)
    return text


def step(draft: Draft) -> None:
    """Take one step as a rank, and write the gradients into a file."""
    print_to(Path(os.devnull))
    file = Path(os.environ[OF_RANKS])
    connected = connect(draft.cfg.distributed, "cpu")
    batch = share_of_batch(short_run(draft, file.with_name("base"), changes=ON_CPU), 0, 2, connected.rank)
    gradients = _gradients(draft, connected, file.with_name("ranks"), batch, 0)
    if connected.is_main:
        torch.save(gradients, file)
    connected.close()


def share_of_batch(engine: Engine, seed: int, ranks: int = 1, rank: int = 0) -> Any:
    """Return a rank's share of the first global batch, without an odd sample. Each rank loads all samples, with the
    same draws.

    Args:
        seed: of what collate_fn draws.
    """
    loader = engine.loaders.train
    if not isinstance(loader, GlobalBatchLoader) or loader.batch_size is None or loader.samples_at(0)[1] < 2:
        raise NotJudgedError("ranks do not share the samples of a global batch: a stream or a batch sampler")
    request = loader.order.request(0, 0)
    share, samples = slice(rank, len(request.indices) // 2 * 2, ranks), loader.seeded.samples(request)
    if not isinstance(samples, list):  # the data set returns whole batches
        return loader.seeded.__getitems__(BatchRequest(request.indices[share], request.epoch, seed))
    seed_everything(seed)
    return loader.seeded.collate(samples[share], request.indices[share])


def _gradients(draft: Draft, ranks: Distributed | None, folder: Path, batch: Any, seed: int) -> dict[str, Tensor]:
    """Take one step with a batch. Return the gradients of the model."""
    watch = Watch(seed=seed)
    changes = {**ON_CPU, "engine.max_iters": 1, "engine.val_interval": None, "engine.sanity_val_steps": 0}
    engine = short_run(draft, folder, watch, changes, ranks=ranks, batch=batch)
    for module in engine.task.modules():
        if any(name in type(module).__name__ for name in ("Dropout", "BatchNorm")):
            module.eval()  # it stays so in training
    engine.train()
    return watch.gradients


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference in parts of the norm."""
    zero = torch.zeros(())
    pairs = [(one.get(name, zero), other.get(name, zero)) for name in sorted(one.keys() | other.keys())]
    difference = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return float((difference / max(sum(float(a.double().square().sum()) for a, _ in pairs), 1e-300)) ** 0.5)
