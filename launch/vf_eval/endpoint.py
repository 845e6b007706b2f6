"""The endpoint that `vf-eval` asks: its address and key, whether it is there and has the model
before any rollout, and that it is there until the last one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import urlsplit

import openai
from openai.pagination import AsyncPage

from launch.vf_eval.arguments import KEY_VARIABLE
from shared.config.rollout import is_loopback
from shared.errors import ConfigError, UnreachableError

URL_VARIABLE, OPENAI_URL = "OPENAI_BASE_URL", "https://api.openai.com/v1"
LIST_S, CALL_S = 10.0, 60.0
"""The longest that a list of models, and one call for a token, may take."""
REFUSALS = 3
"""Looks in a row that find no endpoint, until it is taken for gone."""
NO_LIST = (ValueError, AttributeError)
"""What openai's client raises of an answer that is no list of models but, perhaps, a page."""
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Pace:
    """Of the looks at an endpoint that is in use; together about as long as a rollout goes on
    trying.
    """

    look_s: float = 5.0
    again_s: float = 2.0
    """Where the last look found nothing."""
    silent_s: float = 180.0
    """The longest that it may take connections and say nothing: it may be busy."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str
    key: str
    key_variable: str

    def client(self) -> openai.AsyncOpenAI:
        """To be closed. A proxy of the environment is no way to this machine's own address, and
        calls are tried again by who makes them, who says so.
        """
        http_client = (
            openai.DefaultAsyncHttpxClient(trust_env=False)
            if is_loopback(urlsplit(self.url).hostname or "")
            else None
        )
        return openai.AsyncOpenAI(
            base_url=self.url, api_key=self.key, http_client=http_client, max_retries=0
        )


def endpoint_of(url: str | None, key_variable: str | None, environ: Mapping[str, str]) -> Endpoint:
    """ConfigError for an address that is none, and where a key is needed and its variable is not
    set.
    """
    chosen = url or environ.get(URL_VARIABLE) or OPENAI_URL
    parts = urlsplit(chosen)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"-b: {chosen!r} is no address of an endpoint; write it like http://127.0.0.1:8000/v1"
        )
    is_local = _is_local(parts.hostname)
    # The key of somebody's account is sent to a server of this network only when that is asked for.
    key = "" if is_local and key_variable is None else environ.get(key_variable or KEY_VARIABLE, "")
    if not key and (key_variable is not None or not is_local):
        name = key_variable or KEY_VARIABLE
        if is_local:
            raise ConfigError(
                f"-k: was given, and the variable {name} is not set; leave -k out, or `export"
                f" {name}=...`"
            )
        elsewhere = (
            ""
            if chosen != OPENAI_URL
            else f", or name an endpoint of your own with -b or {URL_VARIABLE}"
        )
        raise ConfigError(
            f"-k: the variable {name} is not set, and {chosen} needs a key; `export {name}=...`, or"
            f" name another variable with -k{elsewhere}"
        )
    return Endpoint(chosen, key or "none", key_variable or KEY_VARIABLE)


def _is_local(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith((".local", ".internal", ".localhost"))
    return address.is_loopback or address.is_private or address.is_link_local


async def checked_model(
    client: openai.AsyncOpenAI, endpoint: Endpoint, model: str | None, message_type: str
) -> str:
    """The model's name, once the endpoint has answered and is known to have it: asked for its list
    of models, and where that leaves a doubt, for one token.

    `model` is None where the only one is meant. Raises UnreachableError, and ConfigError for a key
    that is refused and a model that is not there.
    """
    served = await _served(client, endpoint)
    if model is None:
        if len(served or ()) != 1:
            there = f"{endpoint.url} serves {_listed(served)}; name one with -m"
            if served is None:
                there = (
                    f"{endpoint.url} has no list of models; does -b end in /v1? If it does, name"
                    " one with -m"
                )
            raise ConfigError(f"-m: which model? {there}")
        return served[0]  # type: ignore[index]
    if served is None or model not in served:
        await _call(client, endpoint, model, message_type, served)
    return model


async def _served(client: openai.AsyncOpenAI, endpoint: Endpoint) -> list[str] | None:
    """None where it has no such list."""
    try:
        page = await client.with_options(max_retries=0, timeout=LIST_S).models.list()
    except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
        raise _refused(endpoint, error) from error
    except (openai.APIConnectionError, openai.InternalServerError) as error:
        raise _unreachable(endpoint, error) from error
    except openai.APIStatusError:
        return None
    except (openai.APIError, *NO_LIST) as error:  # what it says is no JSON
        raise UnreachableError(
            f"answers, but not as the OpenAI API does ({error}); does -b end in /v1?",
            actor=endpoint.url,
            phase="check",
        ) from error
    if not isinstance(page, AsyncPage) or not isinstance(page.data, list):
        raise UnreachableError(
            "answers, but not as the OpenAI API does; does -b end in /v1?",
            actor=endpoint.url,
            phase="check",
        )
    return [one.id for one in page.data]


async def _call(
    client: openai.AsyncOpenAI,
    endpoint: Endpoint,
    model: str,
    message_type: str,
    served: list[str] | None,
) -> None:
    asked = client.with_options(max_retries=0, timeout=CALL_S)
    try:
        if message_type == "completion":
            await asked.completions.create(model=model, prompt="1", max_tokens=1)
        else:
            await asked.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "1"}], max_tokens=1
            )
    except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
        raise _refused(endpoint, error) from error
    except openai.NotFoundError as error:
        if served is None:
            raise UnreachableError(
                f"has neither a list of models nor {model!r} ({_short(error)}); does -b end in"
                " /v1?",
                actor=endpoint.url,
                phase="check",
            ) from error
        raise ConfigError(
            f"-m: {endpoint.url} has no model {model!r}; it serves {_listed(served)}"
        ) from error
    except (openai.APIConnectionError, openai.InternalServerError) as error:
        raise _unreachable(endpoint, error) from error
    except openai.APIStatusError:
        # it is there, and has something against this call: of those that are meant, it says for
        # itself what
        return


async def watch(client: openai.AsyncOpenAI, endpoint: Endpoint, pace: Pace = Pace()) -> NoReturn:
    """Goes on until the endpoint has gone, and raises UnreachableError then: what has not been
    rolled out would only fail, one rollout after the other.
    """
    refusals, heard_s = 0, time.monotonic()
    while True:
        await asyncio.sleep(pace.again_s if refusals else pace.look_s)
        error = await _look(client)
        if error is None:
            refusals, heard_s = 0, time.monotonic()
            continue
        is_silent = isinstance(error, openai.APITimeoutError)
        refusals += not is_silent
        if refusals == REFUSALS or (is_silent and time.monotonic() - heard_s > pace.silent_s):
            raise _gone(endpoint, error) from error


async def check_there(client: openai.AsyncOpenAI, endpoint: Endpoint) -> None:
    """UnreachableError where one look finds nothing."""
    if (error := await _look(client)) is not None:
        raise _gone(endpoint, error) from error


async def _look(client: openai.AsyncOpenAI) -> openai.APIError | None:
    """Why nothing is there; None where something is, whatever it says."""
    try:
        await client.with_options(max_retries=0, timeout=LIST_S).models.list()
    except (openai.APIConnectionError, openai.InternalServerError) as error:
        return error
    except (openai.APIError, *NO_LIST):
        return None
    return None


def _refused(endpoint: Endpoint, error: openai.APIStatusError) -> ConfigError:
    sent = (
        "no key was sent; name its variable with -k"
        if endpoint.key == "none"
        else (
            f"the key in {endpoint.key_variable} is not accepted; correct it, or name another"
            " with -k"
        )
    )
    return ConfigError(f"-k: {endpoint.url} answered {error.status_code} ({_short(error)}): {sent}")


def _unreachable(endpoint: Endpoint, error: openai.APIError) -> UnreachableError:
    return UnreachableError(
        f"no answer ({_cause(error)}); check that it runs, and the address (-b)",
        actor=endpoint.url,
        phase="check",
    )


def _gone(endpoint: Endpoint, error: openai.APIError) -> UnreachableError:
    return UnreachableError(
        f"it answers no more ({_cause(error)}); check that it still runs, and go on",
        actor=endpoint.url,
        phase="generate",
    )


def _cause(error: openai.APIError) -> str:
    cause = error.__cause__
    return f"{type(cause).__name__}: {cause}" if cause is not None and str(cause) else _short(error)


def _short(error: openai.APIError) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."


def _listed(names: list[str] | None) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
