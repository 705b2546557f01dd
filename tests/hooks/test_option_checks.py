"""Options that are refused when a hook is made: the error names the option and how to fix it."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest

from hydraloop import hooks
from hydraloop.errors import UserError
from hydraloop.schemas.option_checks import CHECKPOINTS, check_choice

TWO_NAMES = {"save_best": ["a", "b"]}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("CheckInvalidLossHook", {"interval": 0}, "interval", "Use 1 or more."),
    ("CheckpointHook", {"interval": 0}, "interval", "Use 1 or more, or null to switch it off."),
    ("CheckpointHook", {"rule": "bigger"}, "rule", "greater"),
    ("CheckpointHook", {**TWO_NAMES, "rule": ["less"] * 3}, "rule", "one rule for each"),
    ("CheckpointHook", {"published_keys": ["weights"]}, "published_keys", "[meta,state_dict]"),
    ("EarlyStoppingHook", {"min_delta": nan}, "min_delta", "0 or more"),
    ("EarlyStoppingHook", {"rule": "bigger"}, "rule", "greater"),
    ("EMAHook", {"ema_type": "exponental"}, "ema_type", "Did you mean exponential"),
    ("EMAHook", {"ema_type": None}, "ema_type", "Known: "),
    ("EMAHook", {"momentum": 0.0}, "momentum", "0.0002, not 0.9998"),
    ("EMAHook", {"begin_iter": 5, "begin_epoch": 2}, "begin_iter", "only begin_epoch"),
    ("EMAHook", {"begin_iter": 5, "by_epoch": True}, "begin_iter", "by_epoch=false"),
    ("EMAHook", {"gamma": 7}, "gamma", "Leave it out, or use another type."),
    ("EMAHook", {"ema_type": "stochastic", "momentum": 0.1}, "momentum", "Leave it out"),
    ("EMAHook", {"ema_type": "momentum_annealing", "warmup": False}, "warmup", "Leave it out"),
    ("EMAHook", {"interval": 2.5}, "", "1, 2, 3"),
    ("FreezeHook", {"epochs": 1, "iters": 1}, "epochs", "one of them to null"),
    ("GradClipHook", {"max_norm": 0.0}, "max_norm", "above 0, or null"),
    ("GradClipHook", {"max_norm": 1.0, "clip_value": 1.0}, "clip_value", "to null"),
    ("ProfilerHook", {"on_trace_ready": "tb"}, "on_trace_ready", "tb_trace"),
    ("ProfilerHook", {"on_trace_ready": ["log_trace", {"type": "tb_trace"}]}, "on_trace_ready", "_target_"),
    ("ProfilerHook", {"activity_with_npu": None, "on_trace_ready": "log_trace"}, "on_trace_ready", "tb_trace"),
    ("ProgressHook", {"enabled": "maybe"}, "enabled", "auto"),
    ("SyncRandomSizeHook", {"max_ratio": 0.6}, "max_ratio", "1.3"),
    ("TestTimeAugmentationHook", {"transforms": ["identity", "hflipp"]}, "transforms", "Did you mean hflip"),
    ("TestTimeAugmentationHook", {"transforms": []}, "transforms", "[identity,hflip]"),
    ("TestTimeAugmentationHook", {"merge": "probability"}, "merge", "Did you mean probabilities"),
]


@pytest.mark.parametrize(("cls", "options", "key", "remedy"), REFUSED, ids=str)
def test_an_option_out_of_range_is_refused_with_its_fix(
    cls: str, options: dict[str, Any], key: str, remedy: str
) -> None:
    with pytest.raises(UserError) as caught:
        getattr(hooks, cls)(**options)
    assert (caught.value.key or "") == key
    assert caught.value.remedy
    assert remedy in caught.value.remedy


def test_choices_of_checkpoints() -> None:
    check_choice(CHECKPOINTS, checkpoints=None, others="best", more="all")
    with pytest.raises(UserError, match="'none' is not one of best, last, all") as caught:
        check_choice(CHECKPOINTS, checkpoints="none")
    assert (caught.value.key, caught.value.remedy) == ("checkpoints", "Known: all, best, last.")
