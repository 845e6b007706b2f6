"""The model endpoint of `vf-eval`: its URL, its API key, and a check before the start."""

from __future__ import annotations

import asyncio
import ipaddress
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import openai
from openai.pagination import AsyncPage
from tqdm import tqdm

from launch.run_folder.console import escaped
from launch.tools.vf_eval.arguments import KEY_VARIABLE
from shared.config.rollout import is_loopback
from shared.errors import ConfigError, UnreachableError

T = TypeVar("T")

URL_VARIABLE = "OPENAI_BASE_URL"
OPENAI_URL = "https://api.openai.com/v1"
LIST_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 60.0
"""Timeout in seconds of a call that samples one token."""
START_S = 600.0
"""Maximum seconds to wait while a server answers 503, because it is loading its model."""
START_PAUSE_S = 2.0
"""Seconds between two attempts to reach a server that is loading its model."""
_NUM_SHOWN = 10


def say(text: str) -> None:
    """Print a line to stderr, above the progress bar if there is one."""
    tqdm.write(escaped(text), file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """URL and API key of a model: `Endpoint("http://127.0.0.1/v1", "none", "OPENAI_API_KEY")`."""

    url: str
    key: str
    """The API key; the text `none` if no key is needed."""
    key_variable: str

    def client(self, headers: Mapping[str, str]) -> openai.AsyncOpenAI:
        """Return a client of the endpoint, which the caller closes.

        The client does not retry calls. The rollouts that use it do, and log each retry.
        """
        # A proxy from the environment cannot reach this machine's own address.
        http_client = None
        if is_loopback(urlsplit(self.url).hostname or ""):
            http_client = openai.DefaultAsyncHttpxClient(trust_env=False)
        return openai.AsyncOpenAI(
            base_url=self.url,
            api_key=self.key,
            default_headers=headers,
            http_client=http_client,
            max_retries=0,
        )


def find_endpoint(
    url: str | None, key_variable: str | None, environ: Mapping[str, str]
) -> Endpoint:
    """Return the model endpoint that options and environment variables give.

    Raises ConfigError if the address is invalid, or the variable of a required key is not set.
    """
    chosen = url or environ.get(URL_VARIABLE) or OPENAI_URL
    parts = urlsplit(chosen)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"-b: {chosen!r} is not an HTTP address; write it like http://127.0.0.1:8000/v1"
        )
    if parts.username or parts.password or parts.query:
        bare = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
        raise ConfigError(
            f"-b: the address {bare} is given with a user name, a password or a query, which would"
            " be stored with the results; write only the address, and give secrets in a variable"
            " (-k) or with --header, which are not stored"
        )
    name = key_variable or KEY_VARIABLE
    is_local = _is_local(parts.hostname)
    # The user's key is sent to a local server only if -k asks for it.
    if is_local and key_variable is None:
        return Endpoint(chosen, "none", name)
    if key := environ.get(name):
        return Endpoint(chosen, key, name)
    if is_local:
        raise ConfigError(
            f"-k: the variable {name} is not set; leave -k out, or `export {name}=...`"
        )
    remedy = f"`export {name}=...`, or name another variable with -k"
    if chosen == OPENAI_URL:
        remedy += f", or give your own endpoint with -b or {URL_VARIABLE}"
    raise ConfigError(f"-k: the variable {name} is not set, and {chosen} needs a key; {remedy}")


def _is_local(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith((".local", ".internal", ".localhost"))
    return address.is_loopback or address.is_private or address.is_link_local


async def find_model(
    client: openai.AsyncOpenAI, endpoint: Endpoint, model: str | None, message_type: str
) -> str:
    """Return the name of the model after checking that the endpoint serves it.

    The check uses the endpoint's list of models. If the list is missing or lacks the model, the
    check samples one token. A server that answers 503 is starting, and is asked again for `START_S`
    seconds.

    Args:
        model: None for the only model that the endpoint serves.
        message_type: `chat` or `completion`: the API to sample with.

    Raises:
        UnreachableError: there is no answer, or it does not follow OpenAI's protocol.
        ConfigError: the key is refused, or the endpoint does not have the model.
    """
    served = await _once_started(partial(list_models, client, endpoint), endpoint)
    if model is not None:
        if served is None or model not in served:
            ask = partial(_ask_for_a_token, client, endpoint, model, message_type, served)
            await _once_started(ask, endpoint)
        return model
    if served is not None and len(served) == 1:
        return served[0]
    answer = "has no list of models (does -b end in /v1?)"
    if served is not None:
        answer = f"serves {_joined(served)}"
    raise ConfigError(f"-m: is missing, and {endpoint.url} {answer}; name a model with -m")


async def _once_started(ask: Callable[[], Awaitable[T]], endpoint: Endpoint) -> T:
    """Call `ask`, again while the endpoint answers 503, for at most `START_S` seconds.

    Raises like `find_model`.
    """
    until_s = time.monotonic() + START_S
    has_said = False
    while True:
        try:
            return await ask()
        except UnreachableError as error:
            cause = error.__cause__
            starts = isinstance(cause, openai.APIStatusError) and cause.status_code == 503
            if not starts or time.monotonic() > until_s:
                raise
        if not has_said:
            limit = f"waiting up to {START_S:g} s"
            say(f"{endpoint.url} answers 503, like a server that is starting; {limit}")
            has_said = True
        await asyncio.sleep(START_PAUSE_S)


async def list_models(client: openai.AsyncOpenAI, endpoint: Endpoint) -> list[str] | None:
    """Return the names of the endpoint's models; None without a list. Raises like `find_model`."""
    try:
        with _translated_errors(endpoint):
            page = await client.with_options(timeout=LIST_TIMEOUT_S).models.list()
    except ConfigError:
        raise  # ConfigError is a ValueError too
    except openai.APIStatusError:
        return None
    # The client of openai raises the last two if the answer is not a list, such as a web page.
    except (openai.APIError, ValueError, AttributeError) as error:
        problem = f"answers, but not as the OpenAI API does ({error})"
        raise _not_an_endpoint(endpoint, problem) from error
    if not isinstance(page, AsyncPage) or not isinstance(page.data, list):
        raise _not_an_endpoint(endpoint, "answers, but not as the OpenAI API does")
    return [model.id for model in page.data]


async def _ask_for_a_token(
    client: openai.AsyncOpenAI,
    endpoint: Endpoint,
    model: str,
    message_type: str,
    served: list[str] | None,
) -> None:
    patient = client.with_options(timeout=CALL_TIMEOUT_S)
    try:
        with _translated_errors(endpoint):
            if message_type == "completion":
                await patient.completions.create(model=model, prompt="1", max_tokens=1)
            else:
                await patient.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": "1"}], max_tokens=1
                )
    except openai.NotFoundError as error:
        if served is None:
            problem = f"has no list of models and no model {model!r} ({_short(error)})"
            raise _not_an_endpoint(endpoint, problem) from error
        raise ConfigError(
            f"-m: {endpoint.url} has no model {model!r}; it serves {_joined(served)}"
        ) from error
    except openai.APIStatusError:
        # The model exists but refuses this call. Rollouts report the errors of their own calls.
        return


@contextmanager
def _translated_errors(endpoint: Endpoint) -> Iterator[None]:
    """Raise ConfigError for errors of the key, and UnreachableError for the connection."""
    try:
        yield
    except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
        remedy = "no key was sent; give its variable with -k"
        if endpoint.key != "none":
            remedy = (
                f"the key in {endpoint.key_variable} is not accepted; correct it, or give another"
                " with -k"
            )
        answer = f"answered {error.status_code} ({_short(error)})"
        raise ConfigError(f"-k: {endpoint.url} {answer}: {remedy}") from error
    except (openai.APIConnectionError, openai.InternalServerError) as error:
        cause = error.__cause__
        reason = f"{type(cause).__name__}: {cause}" if cause and str(cause) else _short(error)
        problem = f"no answer ({reason}); check that the server runs, and the address (-b)"
        raise UnreachableError(problem, actor=endpoint.url, phase="check") from error


def _not_an_endpoint(endpoint: Endpoint, problem: str) -> UnreachableError:
    return UnreachableError(f"{problem}; does -b end in /v1?", actor=endpoint.url, phase="check")


def _short(error: openai.APIError) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."


def _joined(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(names[:_NUM_SHOWN]) + more if names else "none"
