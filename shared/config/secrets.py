"""Find secrets in configurations and texts, and replace them in files and messages.

A value is a secret because of its key (`api_key`, `hf_token`, `password`) or its place in a URL.
`redacted` also finds the values of environment variables with such names, and the values that were
passed to `hide`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from shared.config.base import leaves

MASK = "<secret>"
"""The text that replaces a secret."""

_SECRET = re.compile(
    ".*(secret|password|passwd|pwd|apikey|authtoken|accesskey|secretkey)"
    "|auth|bearer|passphrase|credential|authorization|cookie|signature|sig"
)
_OF_DATA = re.compile(
    "answer|banned|bos|box|class|cls|column|coord|count|cut|dict|end|eos|example|field|foreign"
    "|group|id|image|index|input|item|json|label|list|map|mask|max|min|new|num|object|output|pad"
    "|primary|prompt|question|repeat|response|reward|row|sample|score|sep|sort|special|start|state"
    "|stop|target|task|text|time|unk|user|value|vision"
)
"""Words before "key" and "token" that mark a name as data, not as a secret."""
_SHORTEST = 6
"""Minimum length of a secret that is searched for. Shorter values occur inside other words."""
_USER = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]*(?=@)|(?<=https://)[^/\s@]+(?=@)")
"""User and password of a URL. In an https URL a user without a password may be a token."""
_QUERY = re.compile(r"(?P<start>[?&](?P<key>[\w.-]+)=)[^&#\s'\"]+")

_FOLDERS = ("PWD", "OLDPWD")
"""Variables that hold a shell's working folders."""

_hidden: set[str] = set()


def is_secret(key: str) -> bool:
    """Return whether the values of a key are secrets.

    Example: yes for `api_key`, `OPENAI_API_KEY`, `hfToken`, `X-Api-Key` and `credentials`; no for
    `tokenizer`, `token_env`, `max_tokens`, `answer_key` and `keys`.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", key)]
    if not words:
        return False
    *before, last = words
    one = last.removesuffix("s")
    if ("private", "key") in pairwise(words):
        return True
    if _SECRET.fullmatch(one):
        return True
    if one not in ("key", "token"):
        return False
    if one != last:
        return bool(before) and before[-1] in ("access", "api", "auth", "hf", "private", "secret")
    return not before or not _OF_DATA.fullmatch(before[-1])


def masked(value: Any, *, in_secret: bool = False) -> Any:
    """Copy a JSON value with all secrets replaced by `MASK`.

    `in_secret`: the value belongs to a secret key, so all of its texts and numbers are masked.

    Example:
        >>> masked({"mode": "ok", "api_key": "sk-1", "url": "https://me:pw@host/?token=1"})
        {'mode': 'ok', 'api_key': '<secret>', 'url': 'https://<secret>@host/?token=<secret>'}
    """
    if isinstance(value, Mapping):
        return {
            key: masked(item, in_secret=in_secret or is_secret(str(key)))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(masked(item, in_secret=in_secret) for item in value)
    if in_secret and value not in (None, "") and not isinstance(value, bool):
        return MASK
    return _without_url_secrets(value) if isinstance(value, str) else value


def masked_keys(values: Mapping[str, object]) -> list[str]:
    """Return the dotted keys whose values contain `MASK`, the text that replaces a secret."""
    return [key for key, value in leaves(values).items() if MASK in str(value)]


def hide(values: Mapping[str, object]) -> None:
    """Make `redacted` also replace the secrets in this configuration, in this process."""
    _hidden.update(_secrets_in(values))


def redacted(text: str) -> str:
    """Return the text with all secrets that this process knows replaced by `MASK`."""
    of_variables = (
        value for name, value in os.environ.items() if is_secret(name) and name not in _FOLDERS
    )
    known = {value for value in (*_hidden, *of_variables) if len(value) >= _SHORTEST}
    # The longest first, because one secret may contain another. All in one pass, because a secret
    # may be part of the mask.
    either = "|".join(re.escape(value) for value in sorted(known, key=len, reverse=True))
    return _without_url_secrets(re.sub(either, MASK, text) if known else text)


def _secrets_in(value: object, in_secret: bool = False) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets_in(item, in_secret or is_secret(str(key)))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _secrets_in(item, in_secret)
    elif in_secret and value is not None and not isinstance(value, bool):
        yield str(value)


def _without_url_secrets(text: str) -> str:
    if "://" not in text:
        return text
    return _QUERY.sub(
        lambda found: found["start"] + MASK if is_secret(found["key"]) else found[0],
        _USER.sub(MASK, text),
    )
