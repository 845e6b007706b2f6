"""Trajectories with images: a packed step is what transformers computes of each example alone, with
the images that its tokens have placeholders of.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

import pytest
import torch
import trajectory_jobs
from called_rollouts import Call, examples_of
from config_support import GROUP, trajectory_config
from learner_support import finish_step, gradients_of_update
from tiny_qwen import TOWERS, make_stock_model
from trajectory_support import ALONE, begin, make_learner, picture
from transformers import AutoModelForImageTextToText, AutoProcessor

from learner.segments import decode_image
from shared.errors import RolloutError
from shared.metrics import merge_reports
from shared.schedule import RunSchedule
from shared.trajectory import TrainingExample

pytestmark = pytest.mark.slow

ROLLOUTS = 3 * GROUP
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
# Patches of 8 pixels, two by two merged: 24 tokens, 20, 12.
SIZES = ((96, 64), (64, 80), (48, 64))
PATCHES = "model.visual.patch_embed.proj.weight"


@pytest.fixture(scope="module", params=TOWERS)
def checkpoint(request, tmp_path_factory):
    return make_stock_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def config(checkpoint, tmp_path_factory):
    """Rows of 400 tokens: several segments, with images and without."""
    settings = {
        "environment__max_images_per_prompt": 3,
        "global_max_length": 400,
        "training__max_grad_norm": None,
    }
    return lambda **changes: trajectory_config(
        checkpoint, tmp_path_factory.mktemp("run"), **settings | changes
    )


@pytest.fixture(scope="module")
def whole(checkpoint):
    """Transformers' own model and processor."""
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    return Whole(model, AutoProcessor.from_pretrained(checkpoint))


class Part(NamedTuple):
    """Of what an engine reads and samples."""

    text: str
    images: tuple = ()
    is_learned: bool = False


class Whole:
    """What transformers makes of an example alone, in one piece and over the whole vocabulary."""

    def __init__(self, model, processor):
        self.model, self.processor = model, processor
        keys = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        self._banned = [getattr(model.config, key) for key in keys]

    def example(self, *parts: Part) -> TrainingExample:
        """With the log-probabilities of these weights."""
        token_ids, mask = [], []
        for part in parts:
            images = [decode_image(image) for image in part.images]
            encoded = self.processor(text=[part.text], images=images or None)["input_ids"][0]
            token_ids += encoded
            mask += [int(part.is_learned)] * len(encoded)
        images = tuple(image for part in parts for image in part.images)
        example = TrainingExample(
            token_ids, [0.0] * len(mask), mask, reward=0.0, weight_version=0, images=images
        )
        with torch.no_grad():
            logprobs = [0.0, *self.logprobs(example).tolist()]
        learned = [value * flag for value, flag in zip(logprobs, mask, strict=True)]
        return replace(example, logprobs=learned)

    def logprobs(self, example: TrainingExample) -> torch.Tensor:
        """Of each token but the first."""
        logits = self.logits(example).double()
        logits[:, self._banned] = -torch.inf
        return logits.log_softmax(-1).gather(1, torch.tensor(example.token_ids[1:])[:, None])[:, 0]

    def logits(self, example):
        """[L - 1, V], nothing banned."""
        ids = torch.tensor([example.token_ids])
        return self.model(input_ids=ids, **self.shown(example), use_cache=False).logits[0, :-1]

    def shown(self, example):
        if not example.images:
            return {}
        encoded = self.processor(
            text=[IMAGE * len(example.images)],
            images=[decode_image(image) for image in example.images],
            return_tensors="pt",
        )
        modality = [
            [int(token_id == self.model.config.image_token_id) for token_id in example.token_ids]
        ]
        return {
            "mm_token_type_ids": torch.tensor(modality),
            "pixel_values": encoded["pixel_values"],
            "image_grid_thw": encoded["image_grid_thw"],
        }

    def step(self, answers):
        """Loss and gradient of policy gradients, example by example; the ratio of each token is 1,
        which no clip takes away.
        """
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        for group in answers:
            mean = fmean(rollout.reward for rollout in group)
            for rollout, example in ((one, example) for one in group for example in one.examples):
                learned = torch.tensor(example.mask[1:], dtype=torch.bool)
                engine = torch.tensor(example.logprobs[1:])[learned]
                ratio = torch.exp(self.logprobs(example)[learned] - engine)
                loss = -(ratio * (rollout.reward - mean)).mean() / ROLLOUTS
                loss.backward()
                total += loss.item()
        named = self.model.named_parameters()
        return total, {name: weight.grad for name, weight in named if weight.grad is not None}


def parts_of(position):
    """By the position's remainder of 3: an image in the prompt; besides it a second one in the
    second turn; none.
    """
    row = position // GROUP
    question = f" Locate every object of {row}.\n"
    answer = Part(f'{{"object_{position}": ', is_learned=True)
    if position % 3 == 2:
        return Part(question), answer
    first = (Part(f"user\n{IMAGE}{question}", (picture(*SIZES[row], seed=row),)), answer)
    if position % 3 == 0:
        return first
    second = picture(*SIZES[position % 2], seed=100 + position)
    return (*first, Part(f"user\nAnd of {IMAGE}?", (second,)), Part("bbox_2d", is_learned=True))


def begun(config, whole, examples_of=None):
    """A fresh learner, and the answers to its first step."""
    learner = make_learner(config)
    examples_of = examples_of or (lambda position: [whole.example(*parts_of(position))])
    return learner, begin(learner, RunSchedule(config).plan(0), examples_of=examples_of)


class Learned:
    """The first step of a fresh learner: its metrics, and the gradient of its update."""

    def __init__(self, config, whole, examples_of=None):
        learner, self.answers = begun(config, whole, examples_of)
        self.gradients = gradients_of_update(learner)
        learner.accumulate(self.answers)
        self.metrics = finish_step(learner).metrics


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name],
            gradient,
            rtol=1e-3,
            atol=5e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )


# Loss and gradient


@pytest.mark.parametrize(
    "changes",
    [{}, {"training__packing": False}, {"training__share_prompts": True}],
    ids=["packed", "alone", "shared"],
)
def test_loss_and_gradient_of_a_step_are_those_of_each_example_alone(config, whole, changes):
    step = Learned(config(**changes), whole)
    loss, gradients = whole.step(step.answers)
    rollouts = [rollout for group in step.answers for rollout in group]
    learned = sum(example.num_learned for rollout in rollouts for example in rollout.examples)
    assert step.metrics["loss/total"] == pytest.approx(loss, abs=2e-6)
    assert step.metrics["packing/num_segments"] == ROLLOUTS
    is_packed = "training__packing" not in changes
    assert (step.metrics["packing/num_rows"] < ROLLOUTS / 2) is is_packed, (
        "rows of several segments are what is looked at"
    )
    num_once = step.metrics["packing/num_learned_tokens"] - step.metrics["packing/num_tokens"]
    assert (num_once > 0) is ("training__share_prompts" in changes)
    assert_same_gradients(step.gradients, gradients)
    assert step.gradients[PATCHES].any(), "the vision tower takes part"
    assert step.metrics["rollout/num_compared_tokens"] == learned > ROLLOUTS
    assert step.metrics["policy/logprob_difference"] < 1e-4


def test_an_image_behind_the_last_learned_token_is_left_out(config, whole):
    behind = Part(f"user\n{IMAGE} Right?", (picture(64, 64, seed=200),))

    def followed(position):
        return [whole.example(*parts_of(position), behind)]

    learner, answers = begun(config(), whole, followed)
    segments = list(learner.steps[0].segments(answers, version=0))
    shown = [len(segment.prompt.image_grid_I3) for segment in segments]
    assert shown == [(1, 2, 0)[position % 3] for position in range(ROLLOUTS)]
    for segment in segments:
        # Patches come two by two.
        assert len(segment.modality) == len(segment)
        assert len(segment.prompt.pixel_values_RD) == 4 * segment.modality.sum()
    short, long = Learned(config(), whole), Learned(config(), whole, followed)
    assert long.metrics["loss/total"] == pytest.approx(short.metrics["loss/total"], abs=1e-6)
    assert_same_gradients(long.gradients, short.gradients)


def called(whole, position, *, merges):
    """Examples of a rollout of two calls, of which the second shows an image more.

    In every second rollout the second prompt goes on from the first call; the others' history is
    rewritten.
    """
    row = position // GROUP
    question = Part(f"user\n{IMAGE} Locate {position}.\n", (picture(*SIZES[row], seed=row),))
    second = Part(f"user\nAnd of {IMAGE}?", (picture(*SIZES[position % 2], seed=100 + position),))
    answer = Part(f'{{"object_{position}": ', is_learned=True)
    other = Part("bbox_2d", is_learned=True)
    history = [question, answer] if position % 2 else [question]
    calls = []
    for parts in ([question, answer], [*history, second, other]):
        read = whole.example(*parts)
        size = len(read.token_ids) - len(whole.example(parts[-1]).token_ids)
        calls.append(
            Call(read.token_ids[:size], read.token_ids[size:], read.logprobs[size:], read.images)
        )
    return examples_of(calls, merges=merges)


@pytest.mark.parametrize("normalize", ["step", "rollout"])
def test_merging_calls_with_images_gives_the_loss_and_gradient_of_each_call_as_an_example_of_its_own(
    config, whole, normalize
):
    settings = config(objective={"normalize": normalize})
    apart = Learned(settings, whole, lambda position: called(whole, position, merges=False))
    merged = Learned(settings, whole, lambda position: called(whole, position, merges=True))
    assert apart.metrics["packing/num_segments"] == 2 * ROLLOUTS
    assert merged.metrics["packing/num_segments"] == 1.5 * ROLLOUTS
    assert merged.metrics["loss/total"] == pytest.approx(apart.metrics["loss/total"], abs=1e-6)
    assert apart.gradients[PATCHES].any(), "the vision tower takes part"
    for name, gradient in apart.gradients.items():
        torch.testing.assert_close(merged.gradients[name], gradient, rtol=0, atol=1e-6)


def only_text(whole, position):
    return whole.example(Part(f"user\n Locate {position}."), Part("bbox 7", is_learned=True))


@pytest.mark.processes
@pytest.mark.parametrize("num_shown", [GROUP, 0], ids=["one rank's", "none"])
def test_sharded_ranks_of_which_some_rows_show_images_learn_what_one_learns(
    two_ranks, config, whole, num_shown
):
    """A row is a segment here, and the first rank makes more of them."""
    examples = [
        [whole.example(*parts_of(at)) if at < num_shown else only_text(whole, at)]
        for at in range(ROLLOUTS)
    ]
    alone = trajectory_jobs.learn(
        ALONE, None, config(training__packing=False), 1, 3, examples=examples
    )
    sharded = config(training__packing=False, learner__world_size=2, learner__parallel="fsdp")
    ranks = two_ranks.run(partial(trajectory_jobs.learn, examples=examples), sharded, 1, 1)
    assert [rank.num_rows for rank in ranks] == [ROLLOUTS // 2] * 2, "of three groups"
    (one,), several = alone.reports, merge_reports([rank.reports[0] for rank in ranks])
    for name in ("loss/total", "optim/grad_norm", "packing/num_tokens", "packing/num_segments"):
        expected = merge_reports([one]).metrics[name]
        assert several.metrics[name] == pytest.approx(expected, rel=1e-4, abs=1e-5), name
    for name, weight in alone.weights.items():
        torch.testing.assert_close(ranks[0].weights[name], weight, rtol=0, atol=1e-6)


@pytest.mark.processes
def test_sharded_ranks_that_share_prompts_run_the_vision_tower_together(two_ranks, config, whole):
    """The rows of one rank end with an image that nobody learns from."""
    examples = [
        [whole.example(*parts_of(at)) if at < GROUP else only_text(whole, at)]
        for at in range(ROLLOUTS)
    ]
    alone = trajectory_jobs.learn(ALONE, None, config(), 1, 3, examples=examples)
    sharded = config(training__share_prompts=True, learner__world_size=2, learner__parallel="fsdp")
    ranks = two_ranks.run(partial(trajectory_jobs.learn, examples=examples), sharded, 1, 3)
    (one,), several = alone.reports, merge_reports([rank.reports[0] for rank in ranks])
    before = merge_reports([one]).metrics
    assert several.metrics["packing/num_tokens"] < before["packing/num_tokens"]
    for name in ("loss/total", "optim/grad_norm", "packing/num_segments"):
        assert several.metrics[name] == pytest.approx(before[name], rel=1e-4, abs=1e-5), name
    for name, weight in alone.weights.items():
        torch.testing.assert_close(ranks[0].weights[name], weight, rtol=0, atol=1e-6)


# What contradicts the learner


def with_images(whole, at, image):
    """The examples of a step, of which the one at this position brings this image last, in place of
    its own.
    """

    def examples(position):
        example = whole.example(*parts_of(position))
        if position == at:
            images = (*example.images[:-1], image)
            example = replace(example, images=images, engine="actor-2")
        return [example]

    return examples


DAMAGED = replace(picture(96, 64), data=b"no picture", sha256="damaged")


@pytest.mark.parametrize(
    ("at", "image", "message"),
    [
        (3, picture(64, 64), r"the engine has \[24\] tokens for its images, the learner \[16\]"),
        (3, DAMAGED, "images: .* is not a readable image"),
    ],
)
def test_an_image_that_the_learner_does_not_see_as_the_engine_ends_the_run_with_the_engines_name(
    config, whole, at, image, message
):
    learner, answers = begun(config(), whole, with_images(whole, at, image))
    with pytest.raises(RolloutError, match=rf"example \d+: {message}") as caught:
        learner.accumulate(answers)
    assert (caught.value.actor, caught.value.phase) == ("actor-2", "check")


def with_placeholder(example, pad):
    first, *others = example.token_ids
    mask, logprobs = [0, *example.mask], [0.0, *example.logprobs]
    return replace(example, token_ids=[first, pad, *others], mask=mask, logprobs=logprobs)


@pytest.mark.parametrize(
    ("case", "counts"),
    [
        ("placeholder in a text", "1 images, but the example has 0"),
        ("placeholder beside an image", "2 images, but the example has 1"),
    ],
)
def test_an_example_whose_placeholders_are_not_those_of_its_images_ends_the_run_with_the_example_and_what_to_do(
    config, whole, case, counts
):
    """In a row with others it would be shown their patches."""
    shown = whole.example(*parts_of(0))
    text = Part("tell me about <|image_pad|> please")
    wrong = {
        "placeholder in a text": whole.example(text, Part("ee ff", is_learned=True)),
        "placeholder beside an image": with_placeholder(shown, whole.processor.image_token_id),
    }[case]
    learner, answers = begun(config(), whole, lambda at: [wrong if at % 2 else shown])
    message = rf"example \d+: its tokens have places for {counts}; the environment must not write"
    with pytest.raises(RolloutError, match=message) as caught:
        learner.accumulate(answers)
    assert caught.value.phase == "check"


# What syncs are proved by


@pytest.mark.parametrize("number", [0, 3])
def test_the_fixed_sequence_has_an_image_exactly_where_prompts_may_have_some(config, whole, number):
    learner = make_learner(config(environment__max_images_per_prompt=number))
    fixed, images = learner.algorithm.fixed, learner.algorithm.fixed_images
    assert len(fixed.prompt.image_grid_I3) == len(images) == bool(number)
    assert bool(fixed.modality.any()) is bool(number)
    probe = learner.publisher.canary.probe()
    assert len(probe.images) == len(images)
    assert probe.token_ids.count(whole.processor.image_token_id) == len(images)
    assert all(map(math.isfinite, probe.expected_logprobs))
    ids = list(probe.expanded_token_ids)
    zeros = [0.0] * len(ids)
    example = TrainingExample(ids, zeros, [0] * len(ids), reward=0.0, images=images)
    with torch.no_grad():
        logprobs = whole.logits(example).log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert probe.expected_logprobs == pytest.approx(expected.tolist(), abs=1e-4)
