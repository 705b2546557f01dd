"""`python -m hydraloop …`: the conf/ of the working directory."""

from pathlib import Path

from hydraloop.app import main

main(folder=Path.cwd())
