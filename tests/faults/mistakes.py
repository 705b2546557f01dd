"""Plants one mistake in a valid command line, such as `client.py` writes. The kinds are what people type."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

Words = list[str]
"""What is typed after `python train.py`, or `hydraloop` and what is typed after it."""


def _misspelt(name: str, draw: random.Random) -> str:
    """Return a name with a letter left out, doubled, changed, or exchanged with the next one."""
    at = draw.randrange(max(1, len(name) - 1))
    letter, following = name[at], name[at + 1 : at + 2]
    forms = ["", letter * 2, draw.choice("aeoxt"), following + letter]
    form = draw.choice(forms)
    changed = name[:at] + form + name[at + (2 if form is forms[3] else 1) :]
    return changed if changed != name else _misspelt(name, draw)


def _misspelt_part(pattern: str) -> Callable[[Words, random.Random], Words | None]:
    """Return a kind: the group `name` of a pattern is misspelt in a word that the pattern matches."""

    def plant(words: Words, draw: random.Random) -> Words | None:
        found = [(at, match) for at, word in enumerate(words) if (match := re.match(pattern, word))]
        if not found:
            return None
        at, match = draw.choice(found)
        changed = words[at][: match.start("name")] + _misspelt(match["name"], draw) + words[at][match.end("name") :]
        return [*words[:at], changed, *words[at + 1 :]]

    return plant


def _added(*forms: str) -> Callable[[Words, random.Random], Words | None]:
    """Return a kind: one of several wrong forms is added, which may have several words."""
    return lambda words, draw: [*words, *draw.choice(forms).split(" ")]


def _without_m(*forms: str) -> Callable[[Words, random.Random], Words | None]:
    return lambda words, draw: None if "-m" in words else [*words, draw.choice(forms)]


def _misspelt_flag(words: Words, draw: random.Random) -> Words | None:
    return [word.replace("-m", "--mutlirun") for word in words] if "-m" in words else [*words, "--dry-rnu"]


def _plus(words: Words, draw: random.Random) -> Words | None:
    at = draw.choice([at for at, word in enumerate(words) if "=" in word])
    return [*words[:at], f"+{words[at]}", *words[at + 1 :]]


def _dashes(words: Words, draw: random.Random) -> Words | None:
    return [*words, *draw.choice(["--lr=0.1", "--lr 0.1", "--batch-size 32", "--max_epochs=3", "--seed 1"]).split(" ")]


def _colon(words: Words, draw: random.Random) -> Words | None:
    at = draw.choice([at for at, word in enumerate(words) if "=" in word])
    return [*words[:at], words[at].replace("=", draw.choice([":", "=="]), 1), *words[at + 1 :]]


def _command(words: Words, draw: random.Random) -> Words | None:
    return ["hydraloop", _misspelt(draw.choice(["runs", "results", "resume"]), draw)]


KINDS: dict[str, Callable[[Words, random.Random], Words | None]] = {
    "misspelt key": _misspelt_part(r"(\w+\.)+(?P<name>\w{4,})="),
    "misspelt section": _misspelt_part(r"(?P<name>engine|optimizer|default_hooks|scheduler|data|distributed)\."),
    "misspelt group": _misspelt_part(r"(?P<name>hooks|optimizer|scheduler|precision|task|experiment|data)="),
    "misspelt option": _misspelt_part(r"(optimizer|task|model|experiment|data)=(?P<name>\w{3,})$"),
    "misspelt hook": _misspelt_part(r"(default_)?hooks=\[(\w+,)*(?P<name>\w{3,})"),
    "misspelt hook in a key": _misspelt_part(r"(default_)?hooks\.(?P<name>\w{3,})\."),
    "misspelt command": _command,
    "misspelt flag": _misspelt_flag,
    "options with dashes": _dashes,
    "wrong type": _added("seed=abc", "engine.max_epochs=many", "engine.deterministic=maybe", "optimizer.lr=fast",
                         "engine.max_epochs=2.5", "data.loader.num_workers=[2]"),
    "out of range": _added("engine.max_epochs=0", "engine.accumulate=-1", "seed=-1", "engine.limit_val_batches=0",
                           "distributed.nproc_per_node=0", "engine.max_iters=-5", "data.loader.batch_size=0"),
    "wrong choice": _added("distributed.strategy=dpp", "weights=avg", "init.mismatched=ignore",
                           "default_hooks.timer.on_error=rais", "default_hooks.logger.priority=HIHG"),
    "missing plus": _added("hooks.mine._target_=my_project.hooks.MyHook", "task.model.depth=3", "debug=fast"),
    "superfluous plus": _plus,
    "sweep without -m": _without_m("seed=0,1", "optimizer.lr=1e-3,1e-2", "optimizer=sgd,adamw", "seed=range(0,3)"),
    "hook not selected": _added("hooks.ema.momentum=0.1", "hooks.early_stopping.patience=3", "hooks.tta.priority=30"),
    "option of another hook": _added("hooks.ema.patience=3", "hooks=[tta] hooks.tta.momentum=0.1",
                                     "hooks=[ema] hooks.ema.num_images=3"),
    "other group of hooks": _added("hooks.checkpoint.interval=2", "default_hooks.ema.momentum=0.1",
                                   "hooks.logger.interval=5", "hooks=[checkpoint]"),
    "list without brackets": _without_m("engine.activation_checkpointing=Block", "init.exclude=head",
                                        "optimizer.betas=0.9,0.99", "secrets=dsn,token_of_mine"),
    "space after a comma": _added("hooks=[ema, tta]", "init.exclude=[head, tail]"),
    "space around =": _added("engine.max_epochs= 3", "engine.max_epochs =3", "engine.max_epochs = 3"),
    "open bracket": _added("hooks=[ema", "init.exclude=[head", "hooks=ema]"),
    "missing value": _added("engine.max_epochs", "engine.max_epochs=", "optimizer.lr=", "hooks=", "optimizer="),
    "deleted, but needed": _added("~optimizer", "~engine", "~task", "~data", "~seed", "~hooks"),
    "colon or two =": _colon,
    "key without its section": _added("lr=0.1", "max_epochs=3", "batch_size=32", "num_workers=2", "accumulate=2"),
    "contradiction": _added("hooks=[ema] hooks.ema.priority=101", "resume=auto load_from=weights.pth",
                            "distributed.strategy=fsdp2"),
}  # fmt: skip
"""By name: a function of a valid line that plants the mistake; it returns None if the line has no place for it."""


def drawn(lines: Sequence[Words], draw: random.Random) -> Iterator[tuple[str, Words, Words]]:
    """Yield (kind, a valid line, the line with the mistake) without end, all kinds equally often."""
    kinds = [*KINDS]
    draw.shuffle(kinds)
    for kind in cycle(kinds):
        line = draw.choice([line for line in lines if KINDS[kind](line, draw)])
        wrong = KINDS[kind](line, draw)
        assert wrong is not None
        yield kind, line, wrong
