"""Texts that a service can take."""

from __future__ import annotations


def in_unicode(text: str) -> str:
    """The text, with a question mark for each byte of a command line or file name that was no UTF-8.

    Python keeps these as surrogates, which nothing that writes UTF-8 takes.
    """
    return text.encode(errors="replace").decode()
