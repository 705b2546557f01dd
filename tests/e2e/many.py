"""A script: runs the command lines given as JSON on standard input in one process, and writes what came of them."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import sys
from pathlib import Path

import hydraloop


def main() -> None:
    """Each line as `train.py` would run it, its exit code and output into many.json."""
    gc.set_threshold(100_000)  # configs are millions of small objects: a fifth of the time goes into looking for cycles
    commands = json.loads(sys.stdin.read())
    folder = Path.cwd()
    sys.path[0] = str(folder)
    done = []
    for arguments in commands:
        sys.argv = ["train.py", *arguments]
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                hydraloop.main(folder=folder)
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
        done.append({"code": code, "out": out.getvalue(), "err": err.getvalue()})
    (folder / "many.json").write_text(json.dumps(done), encoding="utf-8")


if __name__ == "__main__":
    main()
