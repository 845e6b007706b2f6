"""Compare the learner's step on groups of rollouts with and without `training.share_prompts`.

`python -m benchmarks.shared_prompts` (CPU, float32): a text model of the shape of SmolLM2-135M with
random weights, or a checkpoint (`--model`), or a small Qwen3-VL with an image in each prompt
(`--image`). A step packs the rollouts of all groups, trains the rows, and updates the weights. Both
ways alternate. They must have the same loss and gradient. Printed are the rows, the tokens in them,
the least processor time of each way, and the ratio (repeated / shared) of the rows and of the step.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.learner_step import END, IMAGE, START, TRAINING, make_model
from benchmarks.segments import ImageIds, random_segment
from learner.algorithms.advantages import TokenAdvantages
from learner.collate import collate
from learner.model.attention import attend_by_segments
from learner.model.optimizer.adamw import Optimizer
from learner.model.ranks import Ranks
from learner.objectives.coord_math import Normalizer
from learner.objectives.registry import build_objectives
from learner.packing import Row, packing_policy
from learner.segments import EncodedPrompt, Segment
from learner.step import train_row
from learner.targets import AdvantageTarget, TextWeights
from shared.config.pipeline import Channel, PipelineSection
from shared.config.run import RowRule

WAYS = {"repeated": False, "shared": True}
"""The two ways to measure, with their `training.share_prompts`."""
CLIP = {"clip": "none", "clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 3.0}
ENTRY = {
    "name": "policy_gradient",
    "enabled": True,
    "weight": 1.0,
    "channels": ["B"],
    "config": CLIP | {"normalize": "step", "advantage_std": False},
}
LIMIT = 1e-5
"""Largest relative difference of loss and gradient, in float32."""


def make_text_model(arguments: argparse.Namespace) -> Any:
    """Load the checkpoint, or make a Llama like SmolLM2-135M with random weights."""
    if arguments.model is not None:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    else:
        config = LlamaConfig(
            hidden_size=64 * arguments.heads,
            intermediate_size=1536 * arguments.heads // 9,
            num_hidden_layers=arguments.layers,
            num_attention_heads=arguments.heads,
            num_key_value_heads=arguments.heads // 3,
            vocab_size=arguments.words,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    attend_by_segments(model)
    return model.train()


def make_prompt(number: int, length: int, image: int, num_words: int) -> EncodedPrompt:
    """Return a random prompt of `length` tokens, or with an image of `image` x `image` tokens."""
    if image:
        ids = ImageIds(START, IMAGE, END)
        words = range(2000, num_words)
        length = image**2 + 100  # only its prompt is used
        segment = random_segment(
            number, length, image=image, image_ids=ids, words=words, coord_ids=words[:1000]
        )
        return segment.prompt
    draw = np.random.default_rng(number)
    return EncodedPrompt.from_text(draw.integers(5, num_words, length).tolist())


def make_groups(arguments: argparse.Namespace, num_words: int) -> list[Segment]:
    """Return the rollouts of all groups. Answers have half to one and a half times the mean."""
    draw = np.random.default_rng(0)
    segments = []
    for group in range(arguments.groups):
        prompt = make_prompt(group, arguments.prompt, arguments.image, num_words)
        for _ in range(arguments.rollouts):
            count = int(draw.integers(arguments.answer // 2, arguments.answer * 3 // 2 + 1))
            # Near the log-probabilities of a model that has learned nothing.
            engine = tuple((draw.normal(0, 0.1, count) - np.log(num_words)).tolist())
            advantages = (float(draw.normal()),) * count
            weights = (1.0 / count,) * count
            credit = TokenAdvantages(tuple(range(count)), engine, advantages, weights, (0,) * count)
            answer = tuple(draw.integers(2000 % num_words, num_words, count).tolist())
            # A prompt of its own, as each rollout brings one.
            own = replace(prompt)
            segments.append(
                Segment(len(segments), own, AdvantageTarget("x", answer, credit, engine))
            )
    return segments


class Step:
    """The learner's step with one value of `training.share_prompts`."""

    def __init__(self, model: Any, arguments: argparse.Namespace, *, share_prompts: bool) -> None:
        self.model = model
        self.share_prompts = share_prompts
        self.capacity = arguments.row
        self.training = TRAINING.model_copy(update={"share_prompts": share_prompts})
        pipeline = PipelineSection(objective=[ENTRY], diagnostics=[])
        self.objectives = build_objectives(pipeline, Channel.B, torch.arange(0))
        self.rope_index = model.model.get_rope_index if arguments.image else None
        self.num_rows = 0
        self.num_tokens = 0

    def run(self, segments: list[Segment]) -> float:
        """Pack the segments and train the rows. Return the loss; gradients stay in the model."""
        self.model.zero_grad(set_to_none=True)
        policy = packing_policy(RowRule.STEP, self.training, self.capacity)
        rows: list[Row] = [row for segment in segments for row in policy.add(segment)]
        loss = 0.0
        self.num_rows = self.num_tokens = 0
        for of_row in rows + policy.finish_step():
            row = collate(
                of_row,
                text_weights=TextWeights(1.0, 1.0),
                rope_index=self.rope_index,
                share_prompts=self.share_prompts,
            )
            loss += train_row(self.model, row, self.objectives, Normalizer()).loss
            self.num_rows += 1
            self.num_tokens += row.num_tokens
        return loss


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def require_same(steps: dict[str, Step], segments: list[Segment], model: Any) -> None:
    """Check that both ways have the same loss and gradient, and print by how much they differ."""
    losses = []
    gradients = []
    for step in steps.values():
        losses.append(step.run(segments))
        gradients.append(gradient_of(model))
    norm = float(gradients[0].norm())
    of_loss = abs(losses[1] - losses[0]) / abs(losses[0])
    of_gradient = float((gradients[1] - gradients[0]).norm()) / norm
    assert norm > 0.0
    assert max(of_loss, of_gradient) <= LIMIT, (of_loss, of_gradient)
    print(f"relative difference: loss {of_loss:.1e}, gradient {of_gradient:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a checkpoint of a text model")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9, help="of 64 values; a multiple of 3")
    parser.add_argument("--words", type=int, default=49_152, help="size of the vocabulary")
    parser.add_argument("--image", type=int, default=0, help="side of an image, in tokens")
    parser.add_argument("--prompt", type=int, default=34, help="tokens of a prompt without image")
    parser.add_argument("--answer", type=int, default=11, help="mean tokens of an answer")
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts of a group")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--row", type=int, default=2048, help="global_max_length")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.image:
        model = make_model("small", torch.device("cpu"), torch.float32)
    else:
        model = make_text_model(arguments)
    segments = make_groups(arguments, model.config.get_text_config().vocab_size)
    steps = {way: Step(model, arguments, share_prompts=shares) for way, shares in WAYS.items()}
    parameters = sum(one.numel() for one in model.parameters())
    print(
        f"{parameters / 1e6:.0f} M parameters, {torch.get_num_threads()} threads;"
        f" {arguments.groups} groups of {arguments.rollouts} rollouts, prompts of"
        f" {len(segments[0].prompt.token_ids)} tokens, answers of {arguments.answer}"
    )
    require_same(steps, segments, model)
    updater = Optimizer(model, TRAINING, Ranks())
    rows_s: dict[str, list[float]] = {way: [] for way in WAYS}
    update_s = []
    for repeat in range(arguments.repeats):
        for way, step in steps.items():
            started = time.process_time()
            step.run(segments)
            learned = time.process_time()
            updater.update(repeat, len(segments))
            rows_s[way].append(learned - started)
            update_s.append(time.process_time() - learned)
    for way, step in steps.items():
        print(
            f"{way:9} {step.num_rows:3} rows {step.num_tokens:6} tokens"
            f" {min(rows_s[way]):8.3f} s, with the update {min(rows_s[way]) + min(update_s):8.3f} s"
        )
    repeated_s, shared_s = (min(seconds) for seconds in rows_s.values())
    of_step = (repeated_s + min(update_s)) / (shared_s + min(update_s))
    print(f"ratio of the rows {repeated_s / shared_s:.2f}, of the step {of_step:.2f}")


if __name__ == "__main__":
    main()
