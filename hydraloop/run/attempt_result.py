"""An attempt to resume a run: one that comes to nothing leaves the run as it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from hydraloop.run import atomic, attempts
from hydraloop.run.result import FILENAME


@dataclass(frozen=True)
class Attempt:
    """What `result.json` said before the attempt.

    One that fails before it has trained anything (another model, a cut-off file) must not replace the run's result; its
    own goes to the attempt's folder, `.hydra/resume_<n>/result.json`.
    """

    result: Path
    text: bytes | None
    folder: Path | None
    """The attempt's folder; None: the run is new."""

    @classmethod
    def in_job(cls, run_dir: Path) -> Attempt:
        """As it is now, in a job of Hydra's."""
        result, records = run_dir / FILENAME, run_dir / (HydraConfig.get().output_subdir or "")
        folder = records if attempts.is_attempt(records) else None
        return cls(result, result.read_bytes() if result.exists() else None, folder)

    @property
    def has_result(self) -> bool:
        """Whether the attempt has written the file."""
        return self.result.exists() and self.result.read_bytes() != self.text

    def put_back(self) -> None:
        """Undo what an attempt that has failed before its first iteration did to the file."""
        if self.folder is None or not self.result.exists():
            return
        if self.text is None:
            self.result.replace(self.folder / FILENAME)
            return
        atomic.write_bytes(self.folder / FILENAME, self.result.read_bytes())
        atomic.write_bytes(self.result, self.text)
