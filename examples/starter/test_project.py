"""Tests of this project: `pip install pytest`, then `pytest`."""

import torch
from model import Net

import hydraloop


def test_the_model_returns_a_logit_for_each_class():
    assert Net(num_classes=3)(torch.zeros(5, 2)).shape == (5, 3)


def test_a_short_run_learns(tmp_path):
    cfg = hydraloop.compose(["engine.max_epochs=3", "optimizer.lr=1e-2", "hooks=[weight_norm]"])
    result = hydraloop.build(cfg, run_dir=tmp_path / "run").train()
    assert result.status == "finished"
    assert result.val_metrics["accuracy"] > 0.6
