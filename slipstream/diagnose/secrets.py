"""Secrets: recognized in settings, environments, texts and addresses, and left out of what leaves the machine."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

LEFT_OUT = "(left out)"
_KEY = (
    r"(?:api[-_]?key|(?<!tik)token|secret|passw(?:or)?d|passphrase|credentials?|authorization|private[-_]?key|"
    r"access[-_]?key)"
)
_SECRET_KEY = re.compile(rf"(?:^|[-_.a-z]){_KEY}$|^(?:headers|cookie)$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(rf"{_KEY}|_KEY$|COOKIE|^AWS_|HEADERS", re.IGNORECASE)
_MIN_KNOWN = 6
"""Characters of a value below which every text would hold it by accident."""
_NO_VALUE = rf"(?!None|null|\(|{re.escape(LEFT_OUT)})"
_ISSUED = (
    r"\b(?:sk|pk|rk)-[\w-]{16,}", r"\bhf_\w{16,}", r"\bgh[opsru]_\w{16,}", r"\bgithub_pat_\w{16,}",
    r"\bglpat-[\w-]{16,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}", r"\bxox[abprs]-[\w-]{8,}", r"\bAIza[\w-]{30,}",
    r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
)  # fmt: skip
"""Forms that issuers give their keys."""
_PATTERNS = (
    # User and password of an address, and options with such a name.
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/@\s'\"]*@", re.IGNORECASE), rf"\1{LEFT_OUT}@"),
    (re.compile(rf"([?&;][\w.-]*{_KEY}=)[^&\s'\"]+", re.IGNORECASE), rf"\1{LEFT_OUT}"),
    (re.compile(r"(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1{LEFT_OUT}"),
    (re.compile(rf"(\b[\w.-]*{_KEY}['\"]?\s*[=:]\s*['\"]?){_NO_VALUE}[^\s'\",}}]+", re.IGNORECASE), rf"\1{LEFT_OUT}"),
    (re.compile("|".join(_ISSUED)), LEFT_OUT),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), LEFT_OUT),
)


def known_secrets(environment: Mapping[str, str] = os.environ, *others: str) -> set[str]:
    """Return the values that must not appear anywhere: those of variables with such a name, and `others`."""
    found = {value for name, value in environment.items() if _SECRET_VARIABLE.search(name)}
    # A header variable holds several, each behind its name.
    parts = {part.partition("=")[2].strip() for value in found for part in value.split(",")}
    return {value for value in found | parts | set(others) if len(value) >= _MIN_KNOWN}


def mask(text: str, *, known: Iterable[str] = ()) -> str:
    """Return the text without what is known to be secret, or looks like it."""
    for value in sorted(known, key=len, reverse=True):
        text = text.replace(value, LEFT_OUT)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def without_secrets(data: Any, *, known: Iterable[str] = ()) -> Any:
    """Return plain data with the values of keys such as `api_key`, and secrets within its texts, left out."""
    if isinstance(data, dict):
        return {key: _value(str(key), value, known=known) for key, value in data.items()}
    if isinstance(data, list):
        return [without_secrets(each, known=known) for each in data]
    return mask(data, known=known) if isinstance(data, str) else data


def _value(key: str, value: Any, *, known: Iterable[str]) -> Any:
    # A number is a limit, such as max_tokens.
    if _SECRET_KEY.search(key) and value and not isinstance(value, int | float):
        return LEFT_OUT
    return without_secrets(value, known=known)
