"""Takes what may be a secret out of text from workers, before it is shown or logged. Pure."""

import re

_PATTERNS = (
    # name = value, name: value, "name": "value"
    re.compile(
        r"(?i)([\w-]*(?:api[_-]?key|secret|password|passwd|access[_-]?token|auth[_-]?token)"
        r"[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&}]+"
    ),
    re.compile(r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"(://[^/\s:@]+:)[^/\s@]+(?=@)"),
    re.compile(r"()\b(?:sk|rk|hf|ghp|xox[bp])[-_][A-Za-z0-9_-]{8,}"),
)


def redacted(text: str, limit: int = 1000) -> str:
    """`text` without keys, tokens and passwords as far as they can be told, cut at `limit`
    characters; lone surrogates are replaced.
    """
    for pattern in _PATTERNS:
        text = pattern.sub(r"\1[hidden]", text)
    return text[:limit].encode("utf-8", "replace").decode()
