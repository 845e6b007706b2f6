"""Compare parts of a learner's step that save work with the same parts without it.

`python -m benchmarks.learner_parts [PART ...] [--layers 6] [--hidden 384] [--words 49152]
[--updates 5] [--calls 2000]` (CPU, one thread, random weights). Processor time, in turns; both ways
must give the same result:

- groups: steps of four groups, of which three have equal rewards. By default a step leaves such
  groups out; `environment.drop_equal_groups: false` learns them.
- calls: the ratios of `ratio_level: call_mean` for a row of many model calls, and the same ratios
  from a table of all calls x all tokens.
- embedding: the backward of an embedding that adds its gradient in place, and torch's.
- adamw: the update with torch's fused kernel, and without it.
- logits: the logits of a row that fit into one chunk, kept for the backward, and computed again.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from launch.tools.demo.language_model import make_config, make_tokenizer
from learner.learner import Learner
from learner.model.optimizer.adamw import InPlaceEmbedding
from learner.model.ranks import RankTopology, ReceiverGroup
from learner.objectives.base import LearnedSupervision
from learner.objectives.coord_math import Normalizer, OverVocabulary, read_logits
from learner.objectives.policy_gradient import log_ratios
from shared.config import load_config
from shared.config.pipeline import EXAMPLE_POLICY_GRADIENT
from shared.metrics import merge_reports
from shared.schedule import RunSchedule
from shared.trajectory import EnvironmentRequest, EnvironmentRollout, ExampleCounts, TrainingExample
from shared.weight_sync.transports import TransportKind

GROUPS = 4
SIZE = 8
"""Number of groups of a step, and of rollouts of a group. Only the first group has signal."""
PROMPT = 34
ANSWER = 12
"""Tokens of a rollout."""
TOLERANCE = 1e-4
"""Largest relative difference of two results."""
ROW = 400
"""Tokens of a row."""
REPEATS = 5


def compare(what: str, ways: dict[str, Callable[[], Any]]) -> None:
    """Print the processor time of two ways, and their ratio. The first call is a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + REPEATS):
        results = []
        for name, way in ways.items():
            started = time.process_time()
            results.append(way())
            times[name].append(time.process_time() - started)
        torch.testing.assert_close(*results, rtol=TOLERANCE, atol=1e-6)
    (ours, first), (other, second) = (
        (name, 1e3 * statistics.median(of_way[1:])) for name, of_way in times.items()
    )
    ratio = first / second
    print(f"{what}: {ours} {first:.2f} ms, {other} {second:.2f} ms, ratio {ratio:.3f}", flush=True)


def make_model(folder: Path, layers: int, hidden: int) -> None:
    tokenizer = make_tokenizer()
    values = make_config(tokenizer).to_dict()
    del values["layer_types"]
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**values | sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_learner(model: Path, updates: int, drops: bool | None) -> tuple[Learner, RunSchedule]:
    config = load_config(
        {
            "model": {"path": str(model), "gradient_checkpointing": False},
            "global_max_length": 512,
            "training": {
                "seed": 0,
                "max_steps": updates,
                "learning_rate": 1e-4,
                "effective_batch_size": GROUPS * SIZE,
            },
            "custom": {"trainer_variant": "trajectory_pg"},
            "environment": {
                "id": "copy_digits",
                "rollouts_per_example": SIZE,
                "drop_equal_groups": drops,
            },
            "rollout_matching": {
                "rollout_backend": "hf",
                "max_new_tokens": ANSWER,
                "decoding": {"temperature": 1.0},
                # The rollouts are random tokens, whose log-probabilities no engine computed.
                "logprob_tolerance": 100.0,
                "pipeline": {"objective": [EXAMPLE_POLICY_GRADIENT], "diagnostics": []},
            },
            "learner": {"cpu_threads": 1},
        }
    )
    place = RankTopology(TransportKind.GLOO, (ReceiverGroup(1),))
    learner = Learner(config, place, None, ExampleCounts(train=100, held_out=0))
    return learner, RunSchedule(config)


def answers(
    requests: Sequence[EnvironmentRequest], vocabulary: int
) -> Iterator[tuple[EnvironmentRollout, ...]]:
    """Yield each request's group of rollouts, of random tokens that follow from its positions."""
    for request in requests:
        (group,) = request.groups
        has_signal = group.positions.start == 0
        rewards = [float(place % 2) if has_signal else 0.5 for place in range(SIZE)]
        rollouts = []
        for position, reward in zip(group.positions, rewards, strict=True):
            draw = np.random.default_rng((request.step, position))
            example = TrainingExample(
                draw.integers(0, vocabulary, PROMPT + ANSWER).tolist(),
                [-float(np.log(vocabulary))] * (PROMPT + ANSWER),
                [0] * PROMPT + [1] * ANSWER,
                reward=reward,
                advantage=reward - 0.5,
                group_rewards=tuple(rewards),
                example_id=group.example,
                rollout=position,
                weight_version=0,
            )
            rollouts.append(
                EnvironmentRollout(
                    position=position,
                    example=group.example,
                    reward=reward,
                    metrics={},
                    error=None,
                    is_truncated=False,
                    num_turns=1,
                    num_tokens=ANSWER,
                    num_length_limited=0,
                    num_splits=0,
                    examples=(example,),
                    prompt=None,
                    completion=None,
                    actor="random",
                    started_s=0.0,
                    generate_s=1.0,
                )
            )
        yield tuple(rollouts)


def compare_groups(options: argparse.Namespace) -> None:
    updates = options.updates
    seconds: dict[bool | None, list[float]] = {None: [], False: []}
    norms: dict[bool | None, list[float]] = {None: [], False: []}
    with tempfile.TemporaryDirectory(prefix="rollmatch-") as folder:
        make_model(Path(folder), options.layers, options.hidden)
        learners = {drops: make_learner(Path(folder), updates, drops) for drops in seconds}
        for number in range(updates):
            for drops, (learner, schedule) in learners.items():
                plan = schedule.plan(number)
                vocabulary = len(learner.loaded.tokenizer)
                groups = list(answers(learner.next_requests(plan), vocabulary))
                started = time.process_time()
                learner.accumulate(groups)
                metrics = merge_reports([learner.finish_step()]).metrics
                seconds[drops].append(time.process_time() - started)
                norms[drops].append(metrics["optim/grad_norm"])
                left_out = 0 if drops is False else (GROUPS - 1) * SIZE
                assert metrics["rollout/num_left_out"] == left_out
                assert metrics["rollout/num_groups_without_signal"] == GROUPS - 1
        for learner, _ in learners.values():
            learner.close()
    difference = max(abs(a / b - 1) for a, b in zip(norms[None], norms[False], strict=True))
    assert min(norms[None]) > 0
    assert difference < TOLERANCE, norms
    # The first update creates the moments.
    left_out, learned = (statistics.median(of_kind[1:]) for of_kind in seconds.values())
    print(
        f"a step with {GROUPS - 1} of {GROUPS} groups without signal: left out {left_out:.3f} s,"
        f" learned {learned:.3f} s, ratio {left_out / learned:.2f}; gradient norms differ by at"
        f" most {difference:.0e}"
    )


def by_table(logprobs_M: torch.Tensor, learned: LearnedSupervision) -> torch.Tensor:
    is_of_CM = learned.call == torch.arange(learned.num_calls)[:, None]
    log_ratio_M = logprobs_M - learned.engine_logprobs
    sum_C = torch.where(is_of_CM, log_ratio_M, 0.0).sum(dim=1)
    return (sum_C / is_of_CM.sum(dim=1))[learned.call]


def compare_calls(options: argparse.Namespace) -> None:
    num_calls = options.calls
    torch.manual_seed(num_calls)
    call = torch.arange(num_calls).repeat_interleave(torch.randint(1, 2 * ANSWER, (num_calls,)))
    logprobs_M, engine_M = torch.randn(2, len(call))
    ones_M = torch.ones(len(call))
    learned = LearnedSupervision(torch.arange(len(call)), engine_M, ones_M, ones_M, call, num_calls)
    compare(
        f"call_mean of {num_calls} calls, {len(call)} tokens",
        {
            "log_ratios": lambda: log_ratios(logprobs_M, learned, "call_mean"),
            "table": lambda: by_table(logprobs_M, learned),
        },
    )


def compare_embeddings(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    ours = InPlaceEmbedding(options.words, options.hidden)
    plain = nn.Embedding(options.words, options.hidden)
    ids = torch.randint(options.words, (1, ROW))
    gradient = torch.randn(1, ROW, options.hidden)

    def add(embedding: nn.Embedding) -> torch.Tensor:
        embedding(ids).backward(gradient)
        assert embedding.weight.grad is not None
        return embedding.weight.grad[ids]

    size = f"{options.words} x {options.hidden}"
    compare(
        f"backward of an embedding of {size}",
        {"in place": lambda: add(ours), "torch": lambda: add(plain)},
    )


def compare_adamw(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    start = torch.randn(options.words, options.hidden)
    gradient = torch.randn_like(start)
    ways: dict[str, Callable[[], Any]] = {}
    for fused in (True, False):
        weight = nn.Parameter(start.clone())
        weight.grad = gradient
        optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=fused)

        def update(
            optimizer: torch.optim.AdamW = optimizer, weight: nn.Parameter = weight
        ) -> torch.Tensor:
            optimizer.step()
            return weight

        ways["fused" if fused else "not fused"] = update
    compare(f"update of {start.numel() / 1e6:.1f} M weights", ways)


def compare_logits(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    head = nn.Linear(options.hidden, options.words, bias=False)
    hidden_ND = torch.randn(ROW, options.hidden, requires_grad=True)
    token_ids_N = torch.randint(options.words, (ROW,))
    nothing = torch.empty(0, dtype=torch.int64)

    def learn(*, again: bool) -> torch.Tensor:
        first: list[OverVocabulary] = []

        def read(part_ND: torch.Tensor) -> torch.Tensor:
            reading = read_logits(
                head(part_ND), token_ids_N, nothing, nothing, (Normalizer(),), first=first
            )
            return (reading.log_normalizers_N[0] - reading.token_logits_N).mean()

        hidden_ND.grad = head.weight.grad = None
        loss = checkpoint(read, hidden_ND, use_reentrant=False) if again else read(hidden_ND)
        loss.backward()
        assert hidden_ND.grad is not None
        return hidden_ND.grad

    compare(
        f"logits of {ROW} positions, {options.words} words",
        {"kept": lambda: learn(again=False), "again": lambda: learn(again=True)},
    )


PARTS = {
    "groups": compare_groups,
    "calls": compare_calls,
    "embedding": compare_embeddings,
    "adamw": compare_adamw,
    "logits": compare_logits,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; none: all"
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--words", type=int, default=49_152)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    for part in options.parts or PARTS:
        PARTS[part](options)


if __name__ == "__main__":
    main()
