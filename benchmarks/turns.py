"""Compare the processor time of a turn with the published package `verifiers`.

`python -m benchmarks.turns --beside /path/to/verifiers/venv/bin/python [--rollouts 1000]
[--turns 3] [--rounds 10]`. That interpreter has `verifiers==0.1.8` and nothing of this repository.
The same script runs with both interpreters in alternating processes. It has an environment of
several turns, a client in the same process that answers immediately, and one reward function. The
three kinds: an asynchronous function, a plain one, and answers without tokens (an asynchronous
function). Measured is the processor time of one `generate` call after two warm-up calls, and the
ratio of consecutive processes. Rewards, completions and tokens must be the same in both.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_IDS = list(range(64))
IDS = list(range(100, 116))
SAID = "the answer is 4"
WARM_UP = 2
BOUNDS = {"asynchronous": 0.8, "plain": 0.9, "without tokens": 1.0}
"""Largest ratio of processor times that we want, by kind."""
RARELY = (50_000, 20, 100)
"""Garbage collector thresholds of an environment actor
(`rollout_actors.environments.training.actor`).
"""


def response(*, has_tokens: bool = True) -> Any:
    """Return an answer of a vLLM server (without tokens: any server) as openai returns it."""
    from openai.types.chat import ChatCompletion

    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": SAID},
    }
    fields = {}
    if has_tokens:
        logprobs = [
            {"token": f"token_id:{one}", "logprob": -0.5, "top_logprobs": []} for one in IDS
        ]
        choice |= {"logprobs": {"content": logprobs}, "token_ids": IDS}
        fields = {"prompt_token_ids": PROMPT_IDS}
    return ChatCompletion.construct(
        id="1", object="chat.completion", created=0, model="model", choices=[choice], **fields
    )


class Client:
    """A client with openai's `chat.completions.create` that always returns the same answer."""

    def __init__(self, *, has_tokens: bool = True) -> None:
        self._response = response(has_tokens=has_tokens)
        self.chat = self.completions = self

    async def create(self, **arguments: Any) -> Any:
        return self._response


async def ends_well(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].endswith(answer))


def ends_well_plainly(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].endswith(answer))


def environment(library: str, num_turns: int, reward: Any) -> Any:
    """Return the measured environment, made with one of the libraries (they use the same names)."""
    if library == "rollmatch":
        from rollout_actors import environments as vf
    else:
        import verifiers as vf  # type: ignore[no-redef, import-not-found]

    class Talk(vf.MultiTurnEnv):  # type: ignore[name-defined, misc]
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [{"role": "user", "content": "go on"}]

    from datasets import Dataset

    # verifiers refuses an environment without a dataset
    dataset = Dataset.from_list([{"question": "2 + 2", "answer": "4"}])
    return Talk(dataset=dataset, max_turns=num_turns, rubric=vf.Rubric(funcs=[reward]))


def measure(
    library: str, num_rollouts: int, num_turns: int, kind: str, collects_rarely: bool
) -> dict[str, Any]:
    """Generate rollouts; return milliseconds of processor time per turn and a digest of results."""
    talk = environment(library, num_turns, ends_well_plainly if kind == "plain" else ends_well)
    client = Client(has_tokens=kind != "without tokens")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"2 + {i}"}],
            "answer": "4",
            "info": {"i": i},
            "example_id": i,
            "task": "default",
        }
        for i in range(num_rollouts)
    ]

    async def timed() -> tuple[float, Any]:
        began_s = time.process_time()
        results = await talk.generate(rows, client, "model", use_tqdm=False)
        return time.process_time() - began_s, results

    for _ in range(WARM_UP):
        asyncio.run(timed())
    former = gc.get_threshold()
    gc.collect()
    if collects_rarely:
        gc.freeze()
        gc.set_threshold(*RARELY)
    spent_s, results = asyncio.run(timed())
    gc.unfreeze()
    gc.set_threshold(*former)
    # one library returns them in the order of completion
    states = sorted(results["state"], key=lambda state: state["example_id"])
    found = [
        [
            state["info"],
            state["reward"],
            state["completion"],
            [
                [step["prompt"], step["tokens"] and step["tokens"]["completion_ids"]]
                for step in state["trajectory"]
            ],
        ]
        for state in states
    ]
    for state in states:
        for step in state["trajectory"]:
            if kind == "without tokens":
                assert step["tokens"] is None
                continue
            assert step["tokens"]["prompt_ids"] == PROMPT_IDS
            assert step["tokens"]["completion_logprobs"] == [-0.5] * len(IDS)
    return {
        "ms": 1000 * spent_s / (num_rollouts * num_turns),
        "digest": hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest(),
    }


def in_process(
    python: str, library: str, options: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Run `measure` for all kinds in a new process of the Python interpreter `python`.

    Return two results for each kind: with Python's garbage collector, and with an actor's.
    """
    root = Path(__file__).resolve().parents[1]
    command = [
        python,
        str(Path(__file__).resolve()),
        "--library",
        library,
        "--rollouts",
        str(options.rollouts),
        "--turns",
        str(options.turns),
    ]
    paths = {"PYTHONPATH": str(root)} if library == "rollmatch" else {"PYTHONPATH": ""}
    done = subprocess.run(
        command,
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{library} under {python} failed: {done.stderr.strip()[-2000:]}")
    answer: dict[str, list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", help="an interpreter with verifiers")
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--library", choices=("rollmatch", "verifiers"), help="measure once, here")
    options = parser.parse_args()
    if options.library is not None:
        found = {
            kind: [
                measure(options.library, options.rollouts, options.turns, kind, collects_rarely)
                for collects_rarely in (False, True)
            ]
            for kind in BOUNDS
        }
        print(json.dumps(found))
        return
    if options.beside is None:
        parser.error(
            "--beside is missing; give the interpreter of a separate virtual environment with"
            " verifiers==0.1.8"
        )
    pairs = [
        (
            in_process(sys.executable, "rollmatch", options),
            in_process(options.beside, "verifiers", options),
        )
        for _ in range(options.rounds)
    ]
    collectors = ("as Python sets it", "as in environment actors")
    for (name, bound), (index, collector) in itertools.product(
        BOUNDS.items(), enumerate(collectors)
    ):
        here = [one[name][index] for one, _ in pairs]
        theirs = [other[name][index] for _, other in pairs]
        assert len({one["digest"] for one in (*here, *theirs)}) == 1, "the results differ"
        ratios = [one["ms"] / other["ms"] for one, other in zip(here, theirs, strict=True)]
        print(
            f"{name}, collector {collector}:"
            f" {statistics.median(one['ms'] for one in here):.4f} ms of processor time per turn,"
            f" {statistics.median(one['ms'] for one in theirs):.4f} in verifiers, ratio"
            f" {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}; limit"
            f" {bound})",
            flush=True,
        )


if __name__ == "__main__":
    main()
