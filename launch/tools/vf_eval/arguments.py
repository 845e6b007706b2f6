"""The command line of `vf-eval`."""

from __future__ import annotations

import argparse
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from rollout_actors.environment_names import environment_names
from shared.errors import ConfigError

NUM_EXAMPLES = 5
ROLLOUTS_PER_EXAMPLE = 3
MAX_CONCURRENT = 32
KEY_VARIABLE = "OPENAI_API_KEY"
OUTPUT = Path("outputs/evals")

_NOT_FOR_SAMPLING = {
    "model": "-m sets it",
    "messages": "the environment sets them",
    "prompt": "the environment sets it",
    "tools": "the environment provides them",
    "functions": "the environment provides tools",
    "stream": "a rollout needs whole answers",
    "stream_options": "a rollout needs whole answers",
}
_USAGE = """vf-eval ENVIRONMENT [-m MODEL] [-b URL] [-n EXAMPLES] [-r ROLLOUTS] [options]
       vf-eval --resume FOLDER [options]"""
_EPILOG = """
examples:
  vf-eval arithmetic -m gpt-4.1-mini -n 20 -r 3 -s
  vf-eval my_env -b http://127.0.0.1:8000/v1 -n -1 -T 0.7 -t 512 -a '{"max_turns": 4}'
  vf-eval --resume outputs/evals/my_env--demo/20261121-180500

Each finished rollout is written at once to rollouts.jsonl in the evaluation's folder.
Exit status: 0 done, 1 failed (endpoint, disk, hub, or every rollout), 2 invalid arguments or
files, 130 interrupted.
"""


def check_sampling(sampling: Mapping[str, object], message_type: str) -> dict[str, object]:
    """Check sampling arguments for model calls; return them with their names in OpenAI's API.

    `message_type`: `chat` or `completion`, whose APIs differ.

    Raises ConfigError for names and values with which every call would fail.
    """
    # Imported here, so that `--help` does not wait for openai.
    from openai.resources.chat.completions import AsyncCompletions as AsyncChats
    from openai.resources.completions import AsyncCompletions

    create = AsyncCompletions.create if message_type == "completion" else AsyncChats.create
    known = [name for name in inspect.signature(create).parameters if name != "self"]
    problems = []
    for name, value in sampling.items():
        if name in _NOT_FOR_SAMPLING:
            why = _NOT_FOR_SAMPLING[name]
            problems.append(f"-S: cannot set {name}: {why}; leave it out")
        elif name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            beyond = json.dumps({"extra_body": {name: value}}, ensure_ascii=False)
            problems.append(
                f"-S: {name} is not an argument of OpenAI's API{hint}; additional arguments of the"
                f" endpoint go into extra_body: -S '{beyond}'"
            )
    if sampling.get("n") not in (None, 1):
        answers = f"n is {sampling['n']!r}, but a rollout takes one answer"
        problems.append(f"-S: {answers}; leave it out, and set the rollouts per example with -r")
    body = sampling.get("extra_body")
    if body and not isinstance(body, Mapping):
        problems.append(f'-S: extra_body is {body!r}, not an object; write it like {{"top_k": 20}}')
    if problems:
        raise ConfigError(problems)
    # Completions take a number for logprobs, chats a bool.
    takes_count = message_type == "completion" and sampling.get("logprobs") is True
    return {**sampling, "logprobs": 1} if takes_count else dict(sampling)


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The options of a `vf-eval` command line; None if an option was not given."""

    environment: str | None
    env_args: dict[str, object] | None
    model: str | None
    base_url: str | None
    key_variable: str | None
    headers: dict[str, str]
    """Headers to send with every call. They may be secret and are not stored."""
    num_examples: int | None
    rollouts_per_example: int | None
    sampling_args: dict[str, object] | None
    """Sampling arguments: `-t`, `-T` and `-S`, merged."""
    tokens: bool
    """Whether the endpoint is asked for the tokens of the answers."""
    state_columns: tuple[str, ...] | None
    max_concurrent: int
    max_concurrent_generation: int | None
    max_concurrent_scoring: int | None
    interleave_scoring: bool
    rollout_timeout_s: float | None
    scoring_timeout_s: float | None
    save: bool
    push: bool
    """Whether the results are pushed to the hub, as the dataset `dataset_name`."""
    dataset_name: str | None
    solved_at: float
    """Least reward of a solved rollout."""
    output: Path | None
    resume: Path | None
    verbose: bool


def read_options(arguments: Sequence[str]) -> EvalOptions:
    """Read `vf-eval`'s command line. Exits with 2 if it is malformed, and with 0 after `--help`.

    Raises ConfigError if options contradict each other, or no environment is given.
    """
    values = vars(_parser().parse_args(arguments))
    if values["environment"] is None and values["resume"] is None:
        raise ConfigError(f"ENVIRONMENT: is missing; write `vf-eval NAME`: {_environments()}")
    if values["dataset_name"] is not None and not values["push"]:
        raise ConfigError(
            "-D: has no effect without -H, which pushes the dataset; give -H too, or leave -D out"
        )
    if values["output"] is not None and values["resume"] is not None:
        raise ConfigError("-o: a resumed evaluation stays in its folder; leave out -o or --resume")
    values["headers"] = dict(values["headers"])
    del values["save_every"]
    sampling = values.pop("sampling_args")
    for flag, name in (("-t", "max_tokens"), ("-T", "temperature")):
        value = values.pop(name)
        if value is None:
            continue
        sampling = dict(sampling or {})
        if sampling.setdefault(name, value) != value:
            raise ConfigError(
                f"{flag}: is {value:g}, but {name} in -S is {sampling[name]!r}; keep one of the two"
            )
    return EvalOptions(sampling_args=sampling, **values)


def _parser() -> argparse.ArgumentParser:
    """Return the parser, with the fields of `EvalOptions` as destinations."""
    parser = argparse.ArgumentParser(
        "vf-eval",
        usage=_USAGE,
        description="Generate rollouts of an environment's held-out examples with a model at an"
        " OpenAI endpoint, score them, and print the results.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("environment", nargs="?", metavar="ENVIRONMENT", help=_environments())
    add("-a", "--env-args", type=_json_object, metavar="JSON", help="arguments of load_environment")

    add = parser.add_argument_group("model").add_argument
    add("-m", "--model", metavar="NAME", help="default: the only model of the endpoint")
    text = "address of the endpoint, up to /v1 (default: $OPENAI_BASE_URL, or OpenAI's)"
    add("-b", "--api-base-url", dest="base_url", metavar="URL", help=text)
    text = f"variable with the key (default: {KEY_VARIABLE}; none for a local endpoint)"
    add("-k", "--api-key-var", dest="key_variable", metavar="VARIABLE", help=text)
    text = "header of every call; not stored, so give it again with --resume; may be repeated"
    add(
        "--header",
        dest="headers",
        action="append",
        default=[],
        type=_header,
        metavar="'NAME: VALUE'",
        help=text,
    )
    add("-t", "--max-tokens", type=_POSITIVE, metavar="N", help="maximum tokens of one answer")
    add("-T", "--temperature", type=_NOT_NEGATIVE, metavar="T", help="temperature of every call")
    text = 'other arguments of every call: \'{"top_p": 0.9, "extra_body": {...}}\''
    add("-S", "--sampling-args", type=_json_object, metavar="JSON", help=text)
    text = "request token ids and log-probabilities, for -C trajectory; OpenAI refuses this"
    add("--tokens", action="store_true", help=text)

    add = parser.add_argument_group("how much").add_argument
    text = f"number of examples, from the first; -1: all (default: {NUM_EXAMPLES})"
    add("-n", "--num-examples", type=_SOME_OR_ALL, metavar="N", help=text)
    text = f"rollouts per example (default: {ROLLOUTS_PER_EXAMPLE})"
    add("-r", "--rollouts-per-example", type=_POSITIVE, metavar="N", help=text)
    text = "maximum concurrent rollouts, in generation and scoring; -1: all (default: %(default)s)"
    limit: dict[str, Any] = {"type": _SOME_OR_ALL, "metavar": "N"}
    add("-c", "--max-concurrent", default=MAX_CONCURRENT, help=text, **limit)
    add("--max-concurrent-generation", help="the same, only in generation (default: -c)", **limit)
    add("--max-concurrent-scoring", help="the same, only in scoring (default: -c)", **limit)
    text = "score after all rollouts are generated, instead of each when it is finished"
    add("-N", "--no-interleave-scoring", dest="interleave_scoring", action="store_false", help=text)
    seconds: dict[str, Any] = {"type": _SECONDS, "metavar": "S"}
    text = "time limit of a rollout in seconds; it fails after that (default: no limit)"
    add("--rollout-timeout", dest="rollout_timeout_s", help=text, **seconds)
    text = "the same for a call of a reward function (default: --rollout-timeout)"
    add("--scoring-timeout", dest="scoring_timeout_s", help=text, **seconds)

    add = parser.add_argument_group("results").add_argument
    text = "write the dataset of all rollouts: results.jsonl and metadata.json in the same folder"
    add("-s", "--save-results", dest="save", action="store_true", help=text)
    text = "has no effect: each finished rollout is written to rollouts.jsonl at once"
    add("-f", "--save-every", type=int, metavar="N", help=text)
    text = "additional columns, from fields of the state: timing.total_ms,trajectory"
    add("-C", "--state-columns", type=_names, metavar="A,B.C", help=text)
    add("-H", "--save-to-hf-hub", dest="push", action="store_true", help="push the dataset")
    text = "name of the pushed dataset (default: ENVIRONMENT-results)"
    add("-D", "--hf-hub-dataset-name", dest="dataset_name", metavar="NAME", help=text)
    text = f"folder for the folders of evaluations (default: {OUTPUT})"
    add("-o", "--output-dir", dest="output", type=Path, metavar="FOLDER", help=text)
    text = "continue: generate missing and failed rollouts, with the stored settings"
    add("--resume", type=Path, metavar="FOLDER", help=text)
    text = "minimum reward of a solved rollout, for pass@k (default: %(default)g)"
    add("--solved-at", type=_FINITE, default=1.0, metavar="REWARD", help=text)
    text = "show the first rollout, log every retry, and show tracebacks of failures"
    add("-v", "--verbose", action="store_true", help=text)
    return parser


def _environments() -> str:
    names = ", ".join(environment_names())
    return f"one of {names}, or a module or .py file with load_environment"


def _json_object(text: str) -> dict[str, JsonValue]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1] if text.strip() else text
        where = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise argparse.ArgumentTypeError(
            f"is not JSON: {error.msg} at {where}column {error.colno}\n  {line}\n"
            f"  {' ' * (error.colno - 1)}^"
        ) from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f'is {type(value).__name__}, not an object like {{"name": 1}}: {text}'
        )
    return value


def _header(text: str) -> tuple[str, str]:
    name, colon, value = (part.strip() for part in text.partition(":"))
    if not name or not colon:
        raise argparse.ArgumentTypeError(f"must be like 'Name: value', got {text!r}")
    return name, value


def _names(text: str) -> tuple[str, ...]:
    parts = [part.strip() for part in text.split(",")]
    names = tuple(dict.fromkeys(filter(None, parts)))
    if not names:
        raise argparse.ArgumentTypeError(f"has no name: {text!r}; write it like a,b.c")
    return names


def _number(
    kind: type[int] | type[float], allows: Callable[[float], bool], name: str
) -> Callable[[str], float]:
    """Return an argparse type for numbers of a range."""

    def read(text: str) -> float:
        try:
            number: float = kind(text)
        except ValueError:
            number = math.nan  # is in no range
        if not allows(number):
            raise argparse.ArgumentTypeError(f"must be {name}, got {text!r}")
        return number

    return read


_WHOLE = "an integer of at least 1"
_POSITIVE = _number(int, lambda number: number > 0, _WHOLE)
_SOME_OR_ALL = _number(int, lambda n: n > 0 or n == -1, f"{_WHOLE}, or -1 for all")
_NOT_NEGATIVE = _number(float, lambda number: 0 <= number < math.inf, "a number of at least 0")
_SECONDS = _number(float, lambda number: 0 < number < math.inf, "a number of seconds over 0")
_FINITE = _number(float, math.isfinite, "a number")
