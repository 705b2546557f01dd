"""What random command lines are made of: the options of the default config, the grammar of overrides, valid lines."""

from __future__ import annotations

import shlex

from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from hydraloop.config.arguments import leaves
from hydraloop.config.compose import opened
from tests.config.composed import REPOSITORY

VALID = """
hooks=ema,profiler
'hooks=[ema,profiler]' hooks.ema.priority=HIGH hooks.profiler.priority=45
default_hooks.checkpoint.interval=5 ~default_hooks.logger
default_hooks.checkpoint=null
+hooks.mine._target_=my_project.hooks.MyHook +hooks.mine.priority=30
engine.accumulate=4 engine.val_interval=2
optimizer.lr=1e-2 'optimizer.betas=[0.9,0.99]'
optimizer=sgd optimizer.momentum=0.9
scheduler=cosine scheduler.cosine.begin=1
'scheduler=[]'
~optimizer +optimizer@optimizer.a=adam +optimizer@optimizer.b=sgd 'optimizer.a.match=head.*'
-m optimizer.lr=1e-3,1e-2 'hooks=[],[ema],[ema,mlflow]'
-m 'hooks=[ema]' hooks.ema.priority=HIGH,LOW
-m hooks=ema,profiler seed=0,1,2
-m 'seed=range(0,3)' 'optimizer.lr=choice(1e-2,1e-3)'
experiment=spirals task.model.width=32
experiment=diabetes
debug=fast
task.model.width=8 data.loader.batch_size=16
precision=bf16 engine.deterministic=true
experiment_name=mine seed=5
'+task.metrics.f1={_target_:torchmetrics.F1Score,task:multiclass,num_classes:10}'
'task.loss={label_smoothing:0.1}'
data.loader.batch_size=32 engine.limit_val_batches=0.5
load_from=null resume=null weights=raw
"""
"""Command lines that work."""
_COSTLY = (
    "detach",
    "hydra",
    "distributed",
    "sweep",
    "workers",
    "threads",
    "compile",
    "experiment_name",
    "-m",
    "--",
    "-",
)
"""Parts of words that are not run: they start processes or compilers, name directories, or run no training."""
FINISHED = "outputs/finished"
"""A run that the commands are given."""
_NAMES = st.text("abcdefghijklmnopqrstuvwxyz_.0123456789", min_size=1, max_size=12)
_ANY_TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)


def _default() -> tuple[list[str], list[str], list[str]]:
    """Return the keys of the default config, its config groups, and `group=option` for each option."""
    with opened(REPOSITORY / "conf", "config") as composer:
        cfg: DictConfig = composer.compose(["hooks=[ema]"])
        raw = OmegaConf.to_container(cfg, resolve=False)
        assert isinstance(raw, dict)
        keys = [key for name, node in raw.items() if name != "hydra" for key, _ in leaves(node, str(name))]
        groups = composer.groups()
        options = [f"{group}={option}" for group in groups for option in composer.options(group)]
    sections = {key.rpartition(".")[0] for key in keys} - {""}
    return [*keys, *sorted(sections)], groups, options


_KEYS, _GROUPS, _OPTIONS = _default()
_KEY = st.one_of(st.sampled_from(_KEYS), st.sampled_from(_KEYS), st.sampled_from(_GROUPS), _NAMES)
_NUMBER = st.one_of(
    st.integers(-3, 100).map(str), st.floats(width=16).map(repr), st.sampled_from(["1e-3", "0x1", "1_0"])
)
_WORD = st.one_of(
    st.sampled_from(["true", "false", "null", "None", "", "???", "nan", "inf", "auto", "ema", "HIGH", "'a, b'", '"x']),
    st.sampled_from(
        ["${seed}", "${nope}", "${oc.env:HOME}", "${hydra:job.num}", "${", "${eval:1}", "$", "a b", "=", "#"]
    ),
    _NAMES,
    _ANY_TEXT,
)
_PLAIN = st.one_of(_NUMBER, _WORD)


def _nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    listed = st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
    entries = st.lists(st.tuples(_NAMES, inner), max_size=3)
    return listed | entries.map(lambda pairs: "{" + ",".join(f"{key}:{value}" for key, value in pairs) + "}")


_VALUE = st.recursive(_PLAIN, _nested, max_leaves=4)
_CALLS = ("choice", "range", "interval", "glob", "sort", "shuffle", "tag", "int", "str", "extend_list", "nope")
_SWEPT = st.one_of(
    st.lists(_VALUE, min_size=2, max_size=3).map(",".join),
    st.tuples(st.sampled_from(_CALLS), st.lists(_VALUE, max_size=3)).map(
        lambda call: f"{call[0]}({','.join(call[1])})"
    ),
)
_OVERRIDE = st.one_of(
    st.tuples(st.sampled_from(["", "", "", "+", "++", "~"]), _KEY, st.just("="), _VALUE | _VALUE | _SWEPT).map("".join),
    st.sampled_from(_OPTIONS),
    st.tuples(st.sampled_from(["", "+", "~"]), st.sampled_from(_OPTIONS)).map("".join),
    st.tuples(st.sampled_from(["~", ""]), _KEY).map("".join),
    st.tuples(st.sampled_from(_GROUPS), st.just("@"), _KEY, st.just("="), _WORD).map("".join),
)
_FLAGS = """
-m --multirun --cfg --cfg=job --resolve --help --package -cn --config-dir --config-name=x --config-path=conf --version
--pdb --lr --optimizer.lr=1 -x -- --- --info --hydra-help
"""
_FLAG = st.sampled_from(_FLAGS.split())
_LINES = [shlex.split(line) for line in VALID.strip().splitlines()]


def _with_flags(words: tuple[list[str], list[str]]) -> list[str]:
    flags, overrides = words
    return [word for pair in zip(flags, overrides, strict=False) for word in pair]


@st.composite
def _with_characters_changed(draw: st.DrawFn) -> list[str]:
    """Return a valid line in which characters are added, removed or replaced."""
    words = list(draw(st.sampled_from(_LINES)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(words) - 1))
        place, removed = draw(st.integers(0, len(words[at]))), draw(st.integers(0, 1))
        new = draw(st.sampled_from([*"=,.[]{}()+~@:$'\"\\ -_/aeE10", "${", "é", "\t", ""]))
        words[at] = words[at][:place] + new + words[at][place + removed :]
    return words


@st.composite
def _with_words_changed(draw: st.DrawFn) -> list[str]:
    """Return two valid lines as one, with words removed, doubled, divided or given another value."""
    words = [*draw(st.sampled_from(_LINES)), *draw(st.sampled_from([[], *_LINES]))]
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, max(0, len(words) - 1)))
        word = "".join(words[at : at + 1])
        key, _, value = word.partition("=")
        changes = (
            [],
            [word, word],
            [f"{key}=", value],
            [f"{key}={draw(_VALUE)}"],
            [draw(st.sampled_from("+~-")) + word],
        )
        words[at : at + 1] = draw(st.sampled_from(changes))
    return words


def _can_run(words: list[str]) -> bool:
    if any("in_channels" in word for word in words):  # an error inside a model is a traceback: it has the shapes
        return False
    return not any(part in word if len(part) > 2 else word.startswith(part) for part in _COSTLY for word in words)


_OWN_KEYS = (
    "my my.samples my.a.b num_classes hooks.mine hooks.mine.priority hooks.mine.on_error hooks.mine.every "
    "hooks.mine._target_ task.model.width task.model._target_ data.train.root data.train._target_"
)
_HYDRAS_KEYS = (
    "hydra hydra.mode hydra.run.dir hydra.sweep.dir hydra.sweep.subdir hydra.job.name hydra.job.env_set.A "
    "hydra.job.chdir hydra.verbose hydra.searchpath hydra.callbacks hydra.callbacks.a._target_ hydra.launcher.n_jobs "
    "hydra/launcher hydra/sweeper hydra/callbacks hydra/job_logging hydra.sweeper.params hydra.output_subdir"
)
_OWN = st.lists(
    st.sampled_from(["my_project.hooks.MyHook", "my_project.nope.Nope", "os.system"]), min_size=1, max_size=1
)


def _at(keys: str) -> st.SearchStrategy[list[str]]:
    """Return command lines that set such keys, some of them beside an own hook."""
    override = st.tuples(st.sampled_from(["", "", "+", "++", "~"]), st.sampled_from(keys.split()), st.just("="), _VALUE)
    hook = _OWN.map(lambda target: [f"+hooks.mine._target_={target[0]}"])
    return st.tuples(st.just([]) | hook, st.lists(override.map("".join), min_size=1, max_size=2)).map(
        lambda parts: [*parts[0], *parts[1]]
    )


def _can_run_on_a_run(words: list[str]) -> bool:
    """Return whether a command starts no long training and no processes, and names no other directory."""
    return not any(part in word for part in ("compile", "nproc", "nnodes", "run.dir", "workers") for word in words)


KINDS = {
    "keys and classes of one's own": _at(_OWN_KEYS),
    "options of Hydra": _at(_HYDRAS_KEYS),
    "one override": _OVERRIDE.map(lambda word: [word]),
    "several overrides": st.lists(_OVERRIDE, min_size=2, max_size=4),
    "overrides and flags": st.tuples(st.lists(_FLAG, min_size=1), st.lists(_OVERRIDE, min_size=1)).map(_with_flags),
    "valid, characters changed": _with_characters_changed(),
    "valid, words changed": _with_words_changed(),
}
"""Command lines of dry runs."""
_COMMANDS = "resume evaluate predict export runs status attach results report stop sync new evalute show"
_RUNS = (FINISHED, FINISHED, FINISHED, f"{FINISHED}/checkpoints", "outputs/nope", "conf", "lr=0.1", "", "-x")
_ARGUMENTS = (
    "split=val split=nope split= checkpoint=best checkpoint=last checkpoint=nope output=a.jsonl output=/nope/a.npz "
    "format=safetensors format=zip spilt=val --json --sort=accuracy --sort --dry-run --pdb --help --kill -m "
    "optimizer=sgd +optimizer=sgd +hooks=[ema] ~hooks.ema engine.max_epochs=1 seed=1,2 detach=true"
)
COMMAND_KINDS = {
    "commands": st.tuples(
        st.sampled_from(_COMMANDS.split()),
        st.lists(st.sampled_from(_RUNS), min_size=0, max_size=2),
        st.lists(st.sampled_from(_ARGUMENTS.split()) | _OVERRIDE, max_size=2),
    )
    .map(lambda parts: [parts[0], *parts[1][:1], *parts[2]])
    .filter(_can_run_on_a_run)
}
"""Commands with what follows their name."""
_SIMPLE = _NUMBER | st.sampled_from(["true", "false", "null", "auto", "0", "1", "2"])
RUN_KINDS = {
    "run, one value": st.tuples(st.sampled_from(_KEYS), _SIMPLE)
    .map("=".join)
    .map(lambda word: [word])
    .filter(_can_run),
    "run, characters changed": KINDS["valid, characters changed"].filter(_can_run),
    "run, words changed": KINDS["valid, words changed"].filter(_can_run),
}
"""Command lines of runs."""
