"""Secrets in plain text, given away by their shape or by the name in front of them. Without torch.

Every pattern takes linear time: none starts inside a word that another start has read, and what repeats is possessive.
"""

from __future__ import annotations

import re

from hydraloop.secret_names import is_harmless, looks_random, looks_secret, secrecy

MASK = "***"

_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{20,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-(?:[a-z]{2,8}\d{0,2}-){0,3}[A-Za-z0-9_]{20,}[\w-]*+|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"
    r"|wandb_v\d_[\w-]{20,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])|AIza[\w-]{35}"
    r"|xox[abeoprs]-[\w-]{10,}|pypi-[\w-]{50,}|npm_[A-Za-z0-9]{36}"
    r"|eyJ[\w-]{10,2000}+\.[\w-]{10,}\.[\w-]{10,}"
    r")"
)
"""Of Hugging Face, GitHub, GitLab, OpenAI and Anthropic, Stripe, W&B, AWS, Google, Slack, PyPI, npm; and JWTs."""
_SHAPE_HINT = re.compile(r"hf_|gh[pousr]_|github_pat_|glpat-|k[-_]|wandb_v|AKIA|ASIA|AIza|xox|pypi-|npm_|eyJ")
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)(?:[^-]|\n-(?!-)|\B-(?!-))*+")
_SLACK = re.compile(r"(hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/)[\w/-]+")
_USER = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{1,20}+://)([^\s/@:'\"]{0,200}+):(?!\$?\{|<)([^\s/'\"]{1,500})@")
_ONLY_USER = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{1,20}+://)[\w~-]{16,200}+@")
_QUERY = re.compile(r"([?&;](?P<name>[\w.-]{1,80}+)=)[^\s&;\"'<>#*]++")
_SIGNATURES = frozenset({"sig", "signature", "x-amz-signature", "x-goog-signature", "auth", "code"})
_BEARER = re.compile(r"\b([Bb]earer\s+)[\w.+/=~-]{8,}")

_HINT = re.compile(r"tok|pass|pwd|secret|cred|key|auth", re.IGNORECASE)
_NAME = re.compile(
    r"(?<![\w.])(?P<flag>--)?(?P<name>[A-Za-z_][\w.-]{1,160}+)"
    r"(?P<sep>\\?[\"']?\]?[ \t]{0,8}+(?::(?![=:/])|=(?!=))[ \t]{0,8}+|[ \t]++)"
)
"""A name and what is between it and its value; blanks alone are so behind a flag."""
_QUOTED = re.compile(r"[rbfRBF]{0,2}(?P<quote>\\*[\"'])(?P<value>(?:[^\\\n]|\\.)*?)(?P=quote)")
_BARE = re.compile(
    r"\$\{[^}\n]{0,200}\}|(?:(?:Bearer|Basic|Token|Digest)[ \t]+)?[^\s\"'`]+?"
    r"(?=[\s\"'`]|$|,[+~]{0,2}[\w./@]++[=:]|[\])},;]{1,8}(?:[\s\"'\\]|$))"
)
_MORE = re.compile(r"[,;)}\]]{0,8}[ \t]{1,8}+[^\s#]")
_REST = re.compile(r"[^\n#]*(?<!\s)")
_LINE_OF_YAML = re.compile(r"[+ -][ +-]*\\?[\"']?")
"""What is in front of a key in an indented line of YAML, or one in a diff."""
_CODE = re.compile(
    r"[A-Za-z_]\w*+(?:\.\w++)*+[(\[]|[(\[{]|\$[A-Z_]++(?!\w)"
    r"|(?:self|cls|cfg|config|conf|args|os|env|environ|settings|options|engine)\."
    r"|(?:str|int|float|bool|bytes|object|Any|None|True|False|null|true|false|lambda|not|SecretStr)(?![\w-])"
)
"""How an expression of Python begins, or a type."""
_SHORT_NUMBER = re.compile(r"[+-]?\d{0,5}(?:\.\d*)?(?:[eE][+-]?\d+)?[,;)}\]]*")
_MIXED = re.compile(r".*\d|.{16}|.*[a-z][A-Z]|.*[^\w.,;:!?'()-]")
"""What a word of a sentence has not."""


def url_passwords(text: str) -> list[str]:
    """The passwords in the URLs of a text."""
    return [found[3] for found in _USER.finditer(text)] if "://" in text else []


def mask_shapes(text: str) -> str:
    """Mask what is a secret by its own shape: well-known tokens, private keys, user and password in a URL."""
    if _SHAPE_HINT.search(text):
        text = _SHAPES.sub(MASK, text)
    if "PRIVATE KEY-----" in text:
        text = _PRIVATE_KEY.sub(rf"\1{MASK}", text)
    if "://" in text:
        text = _USER.sub(rf"\1\2:{MASK}@", text)
        text = _ONLY_USER.sub(_mask_user, text)
        text = _SLACK.sub(rf"\1{MASK}", text)
    if "earer" in text:
        text = _BEARER.sub(rf"\1{MASK}", text)
    return text


def _mask_user(found: re.Match[str]) -> str:
    scheme = found[1]
    return f"{scheme}{MASK}@" if looks_random(found[0][len(scheme) : -1]) else found[0]


def _mask_query(found: re.Match[str]) -> str:
    name = found["name"]
    return found[1] + MASK if looks_secret(name) or name.lower() in _SIGNATURES else found[0]


def mask_values(text: str, *, strict: bool = False) -> str:
    """Mask what stands behind a secret name: `name=…`, `name: …`, `--name …`, quoted or not.

    Args:
        strict: whether a name that only ends with `key` is enough, and nothing is taken for code.
    """
    if "=" in text and ("?" in text or "&" in text):
        text = _QUERY.sub(_mask_query, text)
    if not _HINT.search(text):
        return text
    parts, done = [], 0
    for found in _NAME.finditer(text):
        if found.start() < done or not looks_secret(found["name"]):
            continue
        separated = not found["sep"].isspace()
        if not separated and not found["flag"]:
            continue
        span = _value(text, found, strict=strict or bool(found["flag"]))
        if span is not None:
            parts += [text[done : span[0]], MASK]
            done = span[1]
    return "".join([*parts, text[done:]]) if parts else text


def _value(text: str, found: re.Match[str], *, strict: bool) -> tuple[int, int] | None:
    """Where the value of a secret name begins and ends; None where there is none to mask."""
    name, at = found["name"], found.end()
    # `hooks.mine.key=…` is an override; `key=…` may be an argument in a program.
    strict = strict or ("." in name and found["sep"] == "=")
    sure = strict or secrecy(name) == "sure"
    quoted = _QUOTED.match(text, at)
    if quoted is not None:
        value = quoted["value"]
        return quoted.span("value") if _is_masked(value, sure=sure, quoted=True) else None
    bare = _BARE.match(text, at)
    if bare is None or MASK in bare[0]:
        return None
    value = bare[0]
    if not _is_masked(value, sure=sure, quoted=False) or (not strict and _is_code(value, name)):
        return None
    if ":" in found["sep"] and found["sep"][-1:].isspace() and _MORE.match(text, bare.end()):
        start = text.rfind("\n", max(0, found.start() - 200), found.start()) + 1
        if _LINE_OF_YAML.fullmatch(text, start, found.start()):
            rest = _REST.match(text, bare.end())
            return at, bare.end() if rest is None else rest.end()
        if not _MIXED.match(value):  # a sentence about it
            return None
    return bare.span()


def _is_masked(value: str, *, sure: bool, quoted: bool) -> bool:
    if is_harmless(value):
        return False
    if not quoted and _SHORT_NUMBER.fullmatch(value):
        return False
    return sure or looks_random(value)


def _is_code(value: str, name: str) -> bool:
    return _CODE.match(value) is not None or value.rstrip(",;)}]") in (name.rpartition(".")[2], name)
