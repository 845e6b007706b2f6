"""What `vf-eval` can be told."""

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

from openai.resources.chat.completions import AsyncCompletions as AsyncChats
from openai.resources.completions import AsyncCompletions

from rollout_actors.environments.loading import environment_names
from shared.errors import ConfigError

# The sampling arguments of `vf-eval`, as the client of the OpenAI API takes them.


_SAID_ELSEWHERE = {
    "model": "-m names it",
    "messages": "the environment says them",
    "prompt": "the environment says it",
    "tools": "the environment brings them",
    "functions": "the environment brings tools",
    "stream": "a rollout needs whole answers",
    "stream_options": "a rollout needs whole answers",
}


def sampling_of(sampling: Mapping[str, Any], message_type: str) -> dict[str, Any]:
    """What every call is sent. ConfigError with every name that the calls would fail of, one
    rollout after the other.
    """
    create = AsyncCompletions.create if message_type == "completion" else AsyncChats.create
    known = [name for name in inspect.signature(create).parameters if name != "self"]
    problems = []
    for name, value in sampling.items():
        if name in _SAID_ELSEWHERE:
            problems.append(
                f"-S: {name} is not for -S to say: {_SAID_ELSEWHERE[name]}; leave it out"
            )
        elif name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            beyond = json.dumps({"extra_body": {name: value}}, ensure_ascii=False)
            problems.append(
                f"-S: {name} is no argument of OpenAI's API{meant}; what the endpoint has beyond it"
                f" goes into extra_body: -S '{beyond}'"
            )
    if sampling.get("n") not in (None, 1):
        problems.append(
            f"-S: n is {sampling['n']!r}, and a rollout takes one answer; leave it out, -r says how"
            " many rollouts there are of an example"
        )
    if not isinstance(sampling.get("extra_body") or {}, Mapping):
        problems.append(
            f'-S: extra_body is {sampling["extra_body"]!r}, not an object; write it like {{"top_k":'
            " 20}"
        )
    if problems:
        raise ConfigError(problems)
    # There it is their number.
    counts = message_type == "completion" and sampling.get("logprobs") is True
    return {**sampling, "logprobs": 1} if counts else dict(sampling)


NUM_EXAMPLES, ROLLOUTS_PER_EXAMPLE, MAX_CONCURRENT = 5, 3, 32
KEY_VARIABLE = "OPENAI_API_KEY"
OUTPUT = Path("outputs/evals")

_EPILOG = """
examples:
  vf-eval arithmetic -m gpt-4.1-mini -n 20 -r 3 -s
  vf-eval my_env -b http://127.0.0.1:8000/v1 -n -1 -T 0.7 -t 512 -a '{"max_turns": 4}'
  vf-eval --resume outputs/evals/my_env--demo/20261121-180500

Every finished rollout is written down at once, in rollouts.jsonl of the evaluation's folder.
Exit status: 0 done, 1 failed (endpoint, disk, hub, or every rollout), 2 a mistake in what was
asked, 130 interrupted.
"""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The command line. None where nothing was said."""

    environment: str | None
    env_args: dict[str, Any] | None
    model: str | None
    base_url: str | None
    key_variable: str | None
    num_examples: int | None
    rollouts_per_example: int | None
    sampling_args: dict[str, Any] | None
    """Of `-t`, `-T` and `-S` together."""
    tokens: bool
    state_columns: tuple[str, ...] | None
    max_concurrent: int
    max_concurrent_generation: int | None
    max_concurrent_scoring: int | None
    interleave_scoring: bool
    rollout_timeout_s: float | None
    scoring_timeout_s: float | None
    save: bool
    push: bool
    dataset_name: str | None
    solved_at: float
    output: Path | None
    resume: Path | None
    verbose: bool


def read_options(arguments: Sequence[str]) -> EvalOptions:
    """Exits with 2 where argparse refuses, with 0 after `--help`. ConfigError for what contradicts
    itself.
    """
    given = _parser().parse_args(arguments)
    if given.environment is None and given.resume is None:
        raise ConfigError(
            f"ENVIRONMENT: which one is to be evaluated? `vf-eval NAME`: {_environments()}"
        )
    if given.dataset_name is not None and not given.push:
        raise ConfigError("-D: names the dataset that -H pushes; give -H too, or leave it out")
    if given.output is not None and given.resume is not None:
        raise ConfigError(
            "-o: an evaluation goes on in its own folder, which --resume names; leave one of the"
            " two out"
        )
    sampling = dict(given.sampling_args or {})
    for flag, name, value in (
        ("-t", "max_tokens", given.max_tokens),
        ("-T", "temperature", given.temperature),
    ):
        if value is None:
            continue
        if sampling.get(name, value) != value:
            raise ConfigError(
                f"{flag}: is {value:g}, and {name} in -S is {sampling[name]!r}; keep one of the two"
            )
        sampling[name] = value
    says_sampling = given.sampling_args is not None or bool(sampling)
    return EvalOptions(
        environment=given.environment,
        env_args=given.env_args,
        model=given.model,
        base_url=given.base_url,
        key_variable=given.key_variable,
        num_examples=given.num_examples,
        rollouts_per_example=given.rollouts_per_example,
        sampling_args=sampling if says_sampling else None,
        tokens=given.tokens,
        state_columns=given.state_columns,
        max_concurrent=given.max_concurrent,
        max_concurrent_generation=given.max_concurrent_generation,
        max_concurrent_scoring=given.max_concurrent_scoring,
        interleave_scoring=not given.no_interleave_scoring,
        rollout_timeout_s=given.rollout_timeout,
        scoring_timeout_s=given.scoring_timeout,
        save=given.save,
        push=given.push,
        dataset_name=given.dataset_name,
        solved_at=given.solved_at,
        output=given.output,
        resume=given.resume,
        verbose=given.verbose,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "vf-eval",
        usage=(
            "vf-eval ENVIRONMENT [-m MODEL] [-b URL] [-n EXAMPLES] [-r ROLLOUTS] [options]\n      "
            " vf-eval --resume FOLDER [options]"
        ),
        description=(
            "Roll out an environment's held-out examples with a model behind an OpenAI endpoint,"
            " score them, and say what came of it."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("environment", nargs="?", metavar="ENVIRONMENT", help=_environments())
    add(
        "-a",
        "--env-args",
        type=_json_object,
        metavar="JSON",
        help="keyword arguments of load_environment, a JSON object",
    )
    where = parser.add_argument_group("model")
    add = where.add_argument
    add(
        "-m",
        "--model",
        metavar="NAME",
        help="as the endpoint calls it (default: the only one that it serves)",
    )
    add(
        "-b",
        "--api-base-url",
        dest="base_url",
        metavar="URL",
        help="of the endpoint, up to /v1 (default: $OPENAI_BASE_URL, or OpenAI's)",
    )
    add(
        "-k",
        "--api-key-var",
        dest="key_variable",
        metavar="VARIABLE",
        help=(
            f"environment variable that holds the key (default: {KEY_VARIABLE}; an endpoint on this"
            " machine or in its network needs none)"
        ),
    )
    add(
        "-t",
        "--max-tokens",
        type=_positive,
        metavar="N",
        help="most tokens of one answer: max_tokens of every call",
    )
    add("-T", "--temperature", type=_not_negative, metavar="T", help="of every call")
    add(
        "-S",
        "--sampling-args",
        type=_json_object,
        metavar="JSON",
        help=(
            'further arguments of every call, a JSON object: \'{"top_p": 0.9, "extra_body":'
            " {...}}'"
        ),
    )
    add(
        "--tokens",
        action="store_true",
        help=(
            "ask for token ids and log-probabilities, which vLLM has and OpenAI refuses; they are"
            " in the state column trajectory"
        ),
    )
    amount = parser.add_argument_group("how much")
    add = amount.add_argument
    add(
        "-n",
        "--num-examples",
        type=_some_or_all,
        metavar="N",
        help=f"examples, from the first on; -1: all (default: {NUM_EXAMPLES})",
    )
    add(
        "-r",
        "--rollouts-per-example",
        type=_positive,
        metavar="N",
        help=f"rollouts of each (default: {ROLLOUTS_PER_EXAMPLE})",
    )
    add(
        "-c",
        "--max-concurrent",
        type=_some_or_all,
        default=MAX_CONCURRENT,
        metavar="N",
        help=(
            "most rollouts that are generated, and that are scored, at a time; -1: all (default:"
            " %(default)s)"
        ),
    )
    add(
        "--max-concurrent-generation",
        type=_some_or_all,
        metavar="N",
        help="the same of generating alone (default: -c)",
    )
    add(
        "--max-concurrent-scoring",
        type=_some_or_all,
        metavar="N",
        help="the same of scoring alone (default: -c)",
    )
    add(
        "--no-interleave-scoring",
        action="store_true",
        help="score when all are generated, instead of each as soon as it is there",
    )
    add(
        "--rollout-timeout",
        type=_seconds,
        metavar="S",
        help=(
            "a rollout that is not done after so many seconds has failed (default: none is cut off)"
        ),
    )
    add(
        "--scoring-timeout",
        type=_seconds,
        metavar="S",
        help=(
            "a reward function that is not done after so many seconds has failed (default: that of"
            " --rollout-timeout)"
        ),
    )
    results = parser.add_argument_group("results")
    add = results.add_argument
    add(
        "-s",
        "--save-results",
        dest="save",
        action="store_true",
        help=(
            "write the dataset of all rollouts: results.jsonl and metadata.json in the same folder"
        ),
    )
    add(
        "-C",
        "--state-columns",
        type=_names,
        metavar="A,B.C",
        help="fields of the state that become columns too: timing.total_ms,trajectory",
    )
    add(
        "-H",
        "--save-to-hf-hub",
        dest="push",
        action="store_true",
        help="push the dataset to the Hugging Face hub",
    )
    add(
        "-D",
        "--hf-hub-dataset-name",
        dest="dataset_name",
        metavar="NAME",
        help="of the pushed dataset (default: ENVIRONMENT-results)",
    )
    add(
        "-o",
        "--output-dir",
        dest="output",
        type=Path,
        metavar="FOLDER",
        help=f"where the evaluation gets a folder (default: {OUTPUT})",
    )
    add(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help=(
            "go on with an evaluation: only what is missing or failed is rolled out; what is not"
            " said is as it was"
        ),
    )
    add(
        "--solved-at",
        type=_finite,
        default=1.0,
        metavar="REWARD",
        help="reward from which on a rollout counts for pass@k (default: %(default)g)",
    )
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="show the first rollout; say every retry, and the traceback of what fails",
    )
    return parser


def _environments() -> str:
    return (
        f"one of {', '.join(environment_names())}, or any module or .py file that has"
        " load_environment"
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1] if text.strip() else text
        place = (
            f"line {error.lineno}, column {error.colno}"
            if error.lineno > 1
            else f"column {error.colno}"
        )
        raise argparse.ArgumentTypeError(
            f"is not JSON: {error.msg} at {place}\n  {line}\n  {' ' * (error.colno - 1)}^"
        ) from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f'is {type(value).__name__}, not an object like {{"name": 1}}: {text}'
        )
    return value


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if not names:
        raise argparse.ArgumentTypeError(
            f"names nothing: {text!r}; write it like timing.total_ms,trajectory"
        )
    return names


def _positive(text: str) -> int:
    return _whole(text, lambda number: number > 0, "a whole number from 1 on")


def _some_or_all(text: str) -> int:
    return _whole(
        text, lambda number: number > 0 or number == -1, "a whole number from 1 on, or -1 for all"
    )


def _whole(text: str, allows: Callable[[int], bool], what: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not allows(number):
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
    return number


def _not_negative(text: str) -> float:
    number = _number(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, got {text!r}")
    return number


def _seconds(text: str) -> float:
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds over 0, got {text!r}")
    return number


def _finite(text: str) -> float:
    number = _number(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return number


def _number(text: str) -> float:
    """NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
