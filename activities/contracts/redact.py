"""Removes possible secrets from text, before it is written to a history, the store or a log.

Nothing can know every secret. They are recognized by how they are written: as the value of
something named like a secret, in a URL, in a header, or with an issuer's prefix. Ordinary text
stays: bare names, numbers of tokens, and messages about what is wrong with a key. Redaction is
idempotent.
"""

import logging
import re
from typing import Any

HIDDEN = "[hidden]"
LONGEST = 20_000
"""Characters of an error or a log line; its middle is cut, since time grows with the text."""

_NAMES = (
    r"(?:api[_-]?key|secret|passw(?:or)?d|passphrase"
    r"|(?:access|auth|refresh|session|security|bearer|bot)[_-]?token"
    r"|(?:access|account|encryption|private|shared|signing|storage)[_-]?key)"
)
# Words that follow a secret's name in ordinary sentences about it.
_SAID = (
    r"(?!(?:an?|are|cannot|does|false|field|has|in|is|it|may|missing|must|needs?|no|none|not|null"
    r"|required|set|should|that|the|true|unknown|unset|was|were|with|key)(?![^\s\"'`,.;:!?)}\]])|…|\.\.\.|\[hidden\]"
    # A placeholder for a secret in a config names a variable.
    r"|\{[ \t]*\\?[\"']?env_var\b)"
)
# Without quotes up to a blank; where a known secret was, `configs.reference.HIDDEN` stands.
_BARE = r"(?:\(not shown\)|[^\s\"',;&}])+"
# In quotes up to the closing one, or else to the end of the line.
_VALUE = (
    r"(?:[bru]{0,2}(?P<q>\\?[\"'])(?!\[hidden\])(?:(?!(?P=q))(?:\\.|[^\n\\]))+"
    rf"|(?!\\?[\"']|\[hidden\]){_BARE})"
)
_QUOTE = r"\\?[\"']?"
_IS = r"[ \t]*(?:[=:]=?>?)[ \t]*+"


def _named(name: str, value: str = _VALUE, flags: int = re.IGNORECASE) -> re.Pattern[str]:
    """Something with that name, and its value; the value is hidden."""
    return re.compile(rf"(?P<before>{name}){value}", flags)


_PATTERNS = (
    re.compile(r"(?P<before>-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)(?:(?!-----END)[\s\S])+"),
    # Headers: in text, and as pairs in a list of them.
    _named(
        rf"\bauthorization{_QUOTE}{_IS}{_QUOTE}(?:(?:apikey|basic|bearer|digest|token)[ \t]+)?+",
        rf"{_SAID}{_BARE}",
    ),
    _named(rf"\bcookie{_QUOTE}{_IS}{_QUOTE}", r"(?!\[hidden\])[^\n\"'}]+"),
    _named(rf"\(b?[\"'][\w-]{{0,40}}(?:{_NAMES}|-token|cookie|authorization)[\"'],[ \t]*"),
    # Names of a secret, with any prefix and suffix: MY_SECRET_KEY=…, "password": "…".
    _named(rf"{_NAMES}(?![\w-]{{0,40}}_var\b)[\w-]{{0,40}}{_QUOTE}{_IS}{_SAID}"),
    _named(rf"--(?:[\w-]{{0,40}}-)?(?:{_NAMES}|token)(?:[\"'],)?[ \t]+{_SAID}"),
    # Environment variables: HF_TOKEN: …
    _named(
        rf"\b[A-Z][A-Z0-9_]{{0,60}}_(?:AUTH|KEY|PASS|PAT|PWD|TOKEN){_QUOTE}{_IS}"
        rf"(?i:{_SAID})(?!\d{{1,6}}(?![\w.-]))",
        flags=0,
    ),
    # 'token' alone often means a token of text: so no number, and no word after ':'.
    _named(
        r"(?<![A-Za-z])(?<!bos_)(?<!cls_)(?<!eos_)(?<!mask_)(?<!pad_)(?<!per_)(?<!sep_)(?<!unk_)"
        rf"token=(?![\d.]+\b|[<(\[]){_SAID}"
    ),
    _named(
        rf"(?:\btoken|[_-]token){_QUOTE}{_IS}{_QUOTE}",
        r"(?=[\w.~+/=-]{0,200}\d)(?=[\w.~+/=-]{0,200}[A-Za-z])[\w.~+/=-]{12,}",
    ),
    re.compile(
        r"(?P<before>\b(?i:bearer|basic)[ \t]+)"
        r"(?=[\w.~+/=-]{0,200}(?:\d|[a-z][A-Z]|[\w.~+/=-]{24}))[\w.~+/=-]{8,}"
    ),
    # URLs: user:password@, a long user alone, and signed queries.
    re.compile(r"(?P<before>://[^/\s:@]*:)[^/\s]+(?=@)"),
    re.compile(r"(?P<before>://)(?!\[hidden\])[\w.~%+-]{20,}(?=@)"),
    re.compile(
        r"(?P<before>[?&](?:(?:x-(?:amz|goog)-)?(?:credential|security-token|signature)|auth|code"
        r"|key|pwd|sig|token)=)[^&\s\"'#<>]+",
        re.IGNORECASE,
    ),
    # Prefixes of issuers.
    re.compile(
        r"(?P<before>)\b(?:(?:sk|rk)[-_](?=[\w-]{0,99}\d)[\w-]{8,}|hf_(?=\w{0,99}\d)[A-Za-z0-9]{10,}"
        r"|gh[oprsu]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|xox[abeprs]-[\w-]{8,}"
        r"|npm_[A-Za-z0-9]{20,}|dckr_pat_[\w-]{8,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}"
        r"|eyJ[\w-]{8,999}\.[\w-]{8,4096}\.[\w-]*)"
    ),
)
# Every match contains one of these: most texts have none, and are scanned only once.
_SUSPECT = re.compile(
    r"key|secret|passw|passphrase|token|authorization|cookie|bearer|basic|@|[?&]\w|sk[-_]|rk[-_]"
    r"|hf_|gh[oprsu]_|_pat|glpat|xox|npm_|akia|asia|aiza|eyj|_auth|_pass|_pwd",
    re.IGNORECASE,
)
_BREAK = re.compile(r"[\r\n]")


def _hidden(result: re.Match[str]) -> str:
    """The replacement of a secret: a value in quotes keeps its opening quote."""
    quote = result.groupdict().get("q") or ""
    return f"{result['before']}{quote}{HIDDEN}"


def redacted(text: str, limit: int | None = 1000) -> str:
    """`text` without keys, tokens and passwords as far as they can be recognized, cut at `limit`
    characters, if there is one; lone surrogates are replaced.
    """
    if _SUSPECT.search(text):
        for pattern in _PATTERNS:
            text = pattern.sub(_hidden, text)
    return text[:limit].encode("utf-8", "replace").decode()


def whole_lines(text: str) -> str:
    """The end of a longer text without the rest of the line that it begins in: half a secret may
    not look like one. A progress bar rewrites its line, and so begins others.
    """
    return "".join(_BREAK.split(text, maxsplit=1)[1:])


def redacted_end(text: str, limit: int) -> str:
    """The last `limit` characters of `text` without secrets; only some more than these are read."""
    read = 5 * limit
    return redacted(text if len(text) <= read else whole_lines(text[-read:]), None)[-limit:]


def redacted_all(value: Any, limit: int = 4000) -> Any:
    """Plain data, such as a memo, with every string in it redacted."""
    if isinstance(value, str):
        return redacted(value, limit)
    if isinstance(value, dict):
        return {key: redacted_all(item, limit) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted_all(item, limit) for item in value]
    return value


def writable(text: str) -> str:
    """An error or a line of a log as it may be written: redacted, at most LONGEST characters.

    A longer one loses its middle: the last line of a traceback names the exception.
    """
    half, read = (LONGEST - 1) // 2, 5 * LONGEST // 2
    if len(text) > 2 * read:
        return f"{redacted(text[:read], half)}…{redacted(whole_lines(text[-read:]), None)[-half:]}"
    text = redacted(text, None)
    return text if len(text) <= LONGEST else f"{text[:half]}…{text[-half:]}"


class RedactingFormatter(logging.Formatter):
    """Lines of a log without secrets, also those of a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as it is written."""
        return writable(super().format(record))


def log_without_secrets(level: int, form: str) -> None:
    """Sets up this process's log: standard error, from `level` on."""
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
