"""ReportHook: writes the report of the run when it ends."""

from __future__ import annotations

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.tracking.report_process import check_installed, write_report


class ReportHook(Hook):
    """Writes `<run_dir>/report.html` at the end of the run, as `python -m hydraloop report <run_dir>` does.

    The page has the curves, the pictures, the config and the hooks of the run, and needs no network. A run that failed
    has one, too. A run that was interrupted has none, because it is continued. Another process writes the page. If that
    fails, a warning says why.

    Priority LOWEST: other hooks have written their records and pictures. Runs on rank 0 only. Cost: some seconds after
    training. No host sync. No state. Options: `ReportHookConf`.

    Raises:
        UserError: plotly is not installed.
    """

    priority = Priority.LOWEST
    on_error = "warn"
    rank_zero_only = True

    def __init__(self) -> None:
        check_installed(self.key)

    def after_run(self, engine: Engine) -> None:
        """Write the page."""
        if engine.result is not None and engine.result.status != "interrupted":
            write_report(engine.run_dir)
