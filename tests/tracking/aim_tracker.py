"""A tracker for Aim, which stores one value for each step, so a repeated call changes nothing."""

from hydraloop.tracking import Tracker, TrackerHook


class AimTracker(Tracker):
    aim = None

    def open(self):
        from aim.sdk.run import Run  # takes seconds: only the sender imports it

        if self.aim is None:
            self.aim = Run(
                self.memory.get("hash"),
                repo=self.options["repo"],
                experiment=self.run.experiment,
                system_tracking_interval=None,
                capture_terminal_logs=False,
            )
        self.memory["hash"] = self.aim.hash
        self.aim.name = self.run.name
        self.aim["params"] = self.run.attempt.params

    def send(self, records):
        for record in records:
            for name, value in record.metrics.items():
                self.aim.track(value, name=name, step=record.iteration, epoch=record.epoch)

    def finish(self, finish):
        self.aim["status"] = finish.status

    def close(self):
        if self.aim is not None:
            self.aim.close()


class Aim(TrackerHook):
    kind = "my_project.aim_tracker.AimTracker"
    library = "aim"  # a missing package is reported before training

    def __init__(self, *, repo: str = ".", flush_timeout: float = 10.0):
        super().__init__(flush_timeout=flush_timeout, options={"repo": repo})
