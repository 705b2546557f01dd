"""Tables in Markdown, which all suites print."""

from __future__ import annotations


def head(*names: str) -> None:
    """Print the head of a table."""
    row(*names)
    print(f"|{'---|' * len(names)}")


def row(*cells: object) -> None:
    """Print a row."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
