"""`hydraloop …` or `python -m hydraloop …`: the commands, without the code of a project."""

from hydraloop.importing import deferred

with deferred():
    from hydraloop.commands.command_line import without_project


def main() -> None:
    """The command `hydraloop`, which is the same as `python -m hydraloop`."""
    without_project()


if __name__ == "__main__":
    main()
