"""Let Hydra show a config or itself. Secrets are masked."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.utils import env_override

from hydraloop.cli.console import end_with_reader
from hydraloop.errors import UserError
from hydraloop.safety import hydra_versions
from hydraloop.safety.secrets import mask_text


def show(argv: Sequence[str], folder: Path, name: str) -> None:
    """Let Hydra show what a command line asks for, with secrets masked. Nothing is trained.

    Args:
        argv: the flags and the overrides.
        folder: with the config files; `name` is that of the primary config.

    Raises:
        UserError: the flags do not go together.
    """
    end_with_reader()
    before, sys.argv = sys.argv, [sys.argv[0], *argv]  # which Hydra reads
    try:
        # Errors are raised; else Hydra prints them without their traceback and exits.
        with env_override({"HYDRA_FULL_ERROR": "1"}), contextlib.redirect_stdout(io.StringIO()) as shown:
            hydra.main(config_path=str(folder), config_name=name, **hydra_versions.main_options())(lambda cfg: None)()
    except ValueError as error:
        raise UserError(str(error), key=argv[0], remedy="Leave one of the flags out.") from error
    finally:
        sys.argv = before
    print(mask_text(shown.getvalue()), end="")
