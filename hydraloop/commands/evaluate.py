"""`python train.py evaluate`: the metrics of a finished run, as JSON."""

from __future__ import annotations

import json

from hydraloop.commands.finished_run import FinishedRunCommand
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.files.config_yaml import plain


class Evaluate(FinishedRunCommand):
    """Evaluates the model on one split."""

    def run(self, ranks: Distributed) -> str:
        """Return the metrics as JSON."""
        engine = self.engine(ranks, self.split)
        self.data(engine)
        return json.dumps(plain(engine.test() if self.split == "test" else engine.validate()))
