"""Which names say that what they name is a secret, by the words they are made of; and which values are none all the
same. Without torch."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Literal

Secrecy = Literal["none", "likely", "sure"]
"""`likely`: a name that ends with `key` and says nothing else; it is as often the name of a column."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PART = re.compile(r"[.:/@\[\]]+")
_ALWAYS = _words(
    "password passwords passwd pwd passphrase passphrases passcode secret secrets credential credentials "
    "authorization apikey apikeys apitoken authtoken accesstoken accesskey secretkey privatekey"
)
_ENDS_WITH = ("password", "passwd", "passphrase", "apikey", "authtoken", "accesstoken", "secretkey", "accesskey")
"""Words written as one: `dbpassword`."""
_OPENS = _words(
    "api access account admin app auth authentication bearer client deploy encryption license master oauth private "
    "refresh root secret security service session signing ssh storage write"
)
"""In front of `keys` or `tokens`, or of `key` to make it sure: what such a one opens."""
_PASSED = _words("admin db database email ftp http login mail mysql proxy root smtp user")
"""In front of `pass`."""
_OF_TEXT = _words(
    "additional audio begin blank bos by class cls decoder dist dummy each encoder end eos eot eod fim first image "
    "last mask max min n newline next num pad padding per prefix prev previous query register sep sos space special "
    "start stop suffix text unk unknown video vision"
)
"""In front of `token`: one of a tokenizer's."""
_OF_DATA = _words(
    "batch cache caption column dict feature features field foreign group image images img index input inputs "
    "join label labels loss mask metric metrics monitor output outputs partition pred prediction public sort state "
    "target targets text"
)
"""In front of `key`: it names an entry of something that is no secret."""
_ABOUT = _words(
    "budget class column count counts dim dims directory dir dropout endpoint env environ expiry field file filename "
    "files folder format index kind len length level limit loss mode name names number path paths policy position "
    "prob provider rate ratio required size source style target timeout ttl type uri url usage variable weight"
)
"""At the end: what is named is not the secret, but something about it (`token_url`, `password_file`)."""
_NOT_SECRETS = frozenset({"PWD", "OLDPWD"})
"""What shells call the working directory."""
_HARMLESS = re.compile(
    r"|\?\?\?|\*\*\*|(?i:none|null|auto|true|false|default)"
    r"|<[^<>]{1,40}>|\[[A-Z]{2,10}\]"  # a tokenizer's: <pad>, [MASK]
    r"|\$\{[\w.:@/-]+(?:,\s*(?:null|''|\"\")?)?\}"  # says where it is, not what
)
_RANDOM = re.compile(r"(?=(?:\D*\d){3})(?=.*[A-Za-z])[\w+/=~-]{16,}")


@functools.lru_cache(maxsize=8192)
def secrecy(key: str) -> Secrecy:
    """How surely a key names a secret.

    Args:
        key: as in a config (`api_key`), dotted (`hooks.mine.api_key`), of the environment, or of a command line
            (`--api-key`). What is below a sure one is as sure: `credentials.user`, though not `credentials._target_`.
    """
    parts = [part for part in _PART.split(key) if part and not part.isdigit()]
    if not parts or parts[-1] in _NOT_SECRETS or is_hydras(parts[-1]):
        return "none"
    found = _of_part(parts[-1])
    return "sure" if found != "sure" and any(_of_part(part) == "sure" for part in parts[:-1]) else found


def looks_secret(key: str) -> bool:
    """Whether a key names a token, key, password or secret, in whatever spelling; see `secrecy`."""
    return secrecy(key) != "none"


def is_hydras(key: str) -> bool:
    """Whether a key is one that Hydra reads: `_target_`, `_partial_`."""
    return len(key) > 2 and key.startswith("_") and key.endswith("_")


def is_harmless(value: str) -> bool:
    """Whether a string is no secret even under a secret key: empty, an interpolation, `auto`, `<pad>`."""
    return _HARMLESS.fullmatch(value) is not None


def looks_random(value: str) -> bool:
    """Whether a string is long, without blanks, and of letters and digits mixed: no word that somebody chose."""
    return _RANDOM.fullmatch(value[:256]) is not None


def _of_part(part: str) -> Secrecy:
    words = [word.lower() for word in _WORD.findall(part)]
    if not words or words[-1] in _ABOUT:
        return "none"
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if any(word in _ALWAYS or word.endswith(_ENDS_WITH) for word in words):
        return "sure"
    if any(word in ("key", "keys") and opens in _OPENS for opens, word in itertools.pairwise(words)):
        return "sure"
    if last == "token":
        return "none" if before in _OF_TEXT else "sure"
    if last == "tokens":
        return "sure" if before in _OPENS else "none"
    if last == "pass":
        return "sure" if before in _PASSED else "none"
    return "likely" if last == "key" and before not in _OF_DATA else "none"
