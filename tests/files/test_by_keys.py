"""Whether high values of a metric are good, from its name."""

from __future__ import annotations

from hydraloop.files.result import by_keys


def test_an_exact_match_counts_first_then_a_part_of_the_name() -> None:
    assert by_keys("val_accuracy") is True
    assert by_keys("Loss") is False
    assert by_keys("mae") is None
    assert by_keys("acc", ["loss"], ["acc"]) is False
