"""Trajectories with images: a packed step is what transformers computes of each example alone, with
the images that its tokens have placeholders of.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import pytest
import torch
from called_rollouts import Call, examples_of
from config_support import GROUP, trajectory_config
from tiny_qwen import FAMILIES, make_stock_model
from trajectory_support import begin, finish_step, make_learner, picture
from transformers import AutoModelForImageTextToText, AutoProcessor

from learner.segments import decode_image
from shared.errors import RolloutError
from shared.schedule import RunSchedule
from shared.trajectory import TrainingExample

pytestmark = pytest.mark.slow

ROLLOUTS = 3 * GROUP
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
# Patches of 8 pixels, two by two merged: 24 tokens, 20, 12.
SIZES = ((96, 64), (64, 80), (48, 64))
PATCHES = "model.visual.patch_embed.proj.weight"


@pytest.fixture(scope="module", params=FAMILIES)
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
        made = TrainingExample(
            token_ids, [0.0] * len(mask), mask, reward=0.0, weight_version=0, images=images
        )
        with torch.no_grad():
            logprobs = self.logprobs(made)
        return replace(
            made,
            logprobs=[
                0.0,
                *(
                    value * learned
                    for value, learned in zip(logprobs.tolist(), mask[1:], strict=True)
                ),
            ],
        )

    def logprobs(self, example: TrainingExample) -> torch.Tensor:
        """Of each token but the first."""
        logits = (
            self.model(
                input_ids=torch.tensor([example.token_ids]), **self.shown(example), use_cache=False
            )
            .logits[0, :-1]
            .double()
        )
        logits[:, self._banned] = -torch.inf
        return logits.log_softmax(-1).gather(1, torch.tensor(example.token_ids[1:])[:, None])[:, 0]

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
            for rollout in group:
                for example in rollout.examples:
                    learned = torch.tensor(example.mask[1:], dtype=torch.bool)
                    ratio = torch.exp(
                        self.logprobs(example)[learned]
                        - torch.tensor(example.logprobs[1:])[learned]
                    )
                    loss = -(ratio * (rollout.reward - mean)).mean() / ROLLOUTS
                    loss.backward()
                    total += loss.item()
        return total, {
            name: parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }


def parts_of(position):
    """By the position's remainder of 3: an image in the prompt; besides it a second one in the
    second turn; none.
    """
    row, of_row, own = (
        position // GROUP,
        picture(*SIZES[position // GROUP], seed=position // GROUP),
        picture(*SIZES[position % 2], seed=100 + position),
    )
    question, answer = (
        f" Locate every object of {row}.\n",
        Part(f'{{"object_{position}": ', is_learned=True),
    )
    if position % 3 == 2:
        return Part(question), answer
    first = (Part(f"user\n{IMAGE}{question}", (of_row,)), answer)
    return (
        first
        if position % 3 == 0
        else (*first, Part(f"user\nAnd of {IMAGE}?", (own,)), Part("bbox_2d", is_learned=True))
    )


def begun(config, whole, examples_of=None):
    """A fresh learner, and the answers to its first step."""
    learner = make_learner(config)
    made = examples_of or (lambda position: [whole.example(*parts_of(position))])
    return learner, begin(learner, RunSchedule(config).plan(0), examples_of=made)


class Learned:
    """The first step of a fresh learner: its metrics, and the gradient of its update."""

    def __init__(self, config, whole, examples_of=None):
        learner, self.answers = begun(config, whole, examples_of)
        learner.optimizer.optimizer.register_step_pre_hook(self._note)
        self._model, self.gradients = learner.loaded.model, {}
        learner.accumulate(self.answers)
        self.metrics = finish_step(learner).metrics

    def _note(self, *_):
        self.gradients = {
            name: parameter.grad.clone()
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None
        }


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


@pytest.mark.parametrize("changes", [{}, {"training__packing": False}], ids=["packed", "alone"])
def test_loss_and_gradient_of_a_step_are_those_of_each_example_alone(config, whole, changes):
    step = Learned(config(**changes), whole)
    loss, gradients = whole.step(step.answers)
    assert step.metrics["loss/total"] == pytest.approx(loss, abs=2e-6)
    assert step.metrics["packing/num_segments"] == ROLLOUTS
    assert (step.metrics["packing/num_rows"] < ROLLOUTS / 2) is (not changes), (
        "rows of several segments are what is looked at"
    )
    assert_same_gradients(step.gradients, gradients)
    assert step.gradients[PATCHES].any(), "the vision tower takes part"


def test_every_sampled_token_is_compared_and_the_learners_own_log_probabilities_pass(config, whole):
    step = Learned(config(), whole)
    learned = sum(
        example.num_learned
        for group in step.answers
        for rollout in group
        for example in rollout.examples
    )
    assert step.metrics["rollout/num_compared_tokens"] == learned > ROLLOUTS
    assert step.metrics["policy/logprob_difference"] < 1e-4


def test_a_step_whose_environment_may_show_images_and_shows_none_is_one_of_text(config, whole):
    def text(position):
        return [
            whole.example(
                Part(f"user\n Locate {position // GROUP}."),
                Part(f"bbox {position}", is_learned=True),
            )
        ]

    with_images, without = (
        Learned(config(), whole, text),
        Learned(config(environment__max_images_per_prompt=0), whole, text),
    )
    # Of the first update: ratios of 1 and advantages whose sum is 0.
    assert with_images.metrics["loss/total"] == without.metrics["loss/total"]
    assert any(gradient.any() for gradient in with_images.gradients.values()), "it learns"
    assert not any(
        ".visual." in name and gradient.any() for name, gradient in with_images.gradients.items()
    )


def test_an_image_behind_the_last_learned_token_is_left_out(config, whole):
    def followed(position):
        return [
            whole.example(
                *parts_of(position), Part(f"user\n{IMAGE} Right?", (picture(64, 64, seed=200),))
            )
        ]

    learner, answers = begun(config(), whole, followed)
    segments = list(learner.steps[0].segments(answers, version=0))
    assert [len(segment.prompt.image_grid_I3) for segment in segments] == [
        (1, 2, 0)[position % 3] for position in range(ROLLOUTS)
    ]
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
    row, own = (
        picture(*SIZES[position // GROUP], seed=position // GROUP),
        picture(*SIZES[position % 2], seed=100 + position),
    )
    question, second = (
        Part(f"user\n{IMAGE} Locate {position}.\n", (row,)),
        Part(f"user\nAnd of {IMAGE}?", (own,)),
    )
    answer, other = (
        Part(f'{{"object_{position}": ', is_learned=True),
        Part("bbox_2d", is_learned=True),
    )
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
    steps = [
        Learned(
            config(objective={"normalize": normalize}),
            whole,
            lambda position, merges=merges: called(whole, position, merges=merges),
        )
        for merges in (False, True)
    ]
    apart, merged = steps
    assert [step.metrics["packing/num_segments"] for step in steps] == [
        2 * ROLLOUTS,
        1.5 * ROLLOUTS,
    ]
    assert merged.metrics["loss/total"] == pytest.approx(apart.metrics["loss/total"], abs=1e-6)
    assert apart.gradients[PATCHES].any(), "the vision tower takes part"
    for name, gradient in apart.gradients.items():
        torch.testing.assert_close(merged.gradients[name], gradient, rtol=0, atol=1e-6)


# What contradicts the learner


def learn(learner, answers):
    learner.accumulate(answers)
    learner.finish_step()


def with_images(whole, at, image, **changes):
    """The examples of a step, of which the one at this position brings this image last, in place of
    its own.
    """

    def made(position):
        example = whole.example(*parts_of(position))
        return [
            (
                example
                if position != at
                else replace(example, images=(*example.images[:-1], image), **changes)
            )
        ]

    return made


@pytest.mark.parametrize("at", [3, 4], ids=["in the prompt", "in a later turn"])
def test_another_image_of_the_same_size_is_noticed_by_its_log_probabilities(config, whole, at):
    (own,) = parts_of(at)[0 if at == 3 else 2].images
    other = picture(*decode_image(own).size, seed=300)
    learner, answers = begun(config(), whole, with_images(whole, at, other, engine="actor-2"))
    with pytest.raises(
        RolloutError, match=r"has log-probability .* in the engine and .* in the learner"
    ) as caught:
        learn(learner, answers)
    assert (caught.value.actor, caught.value.phase) == ("actor-2", "check")


@pytest.mark.parametrize(
    ("at", "told"),
    [
        (3, r"\[24\] tokens of its images, the learner \[16\]"),
        (4, r"\[20, 24\] tokens of its images, the learner \[20, 16\]"),
    ],
)
def test_an_image_with_another_number_of_tokens_ends_the_run_with_the_engines_name(
    config, whole, at, told
):
    learner, answers = begun(
        config(), whole, with_images(whole, at, picture(64, 64), engine="actor-2")
    )
    with pytest.raises(
        RolloutError,
        match=(
            rf"example \d+: the engine has {told}; engines and learner must load the same"
            r" checkpoint"
        ),
    ) as caught:
        learner.accumulate(answers)
    assert (caught.value.actor, caught.value.phase) == ("actor-2", "check")


def test_an_image_that_cannot_be_decoded_ends_the_run_with_the_engines_name(config, whole):
    damaged = replace(picture(96, 64), data=b"no picture", sha256="damaged")
    learner, answers = begun(config(), whole, with_images(whole, 3, damaged, engine="actor-2"))
    with pytest.raises(
        RolloutError, match=r"example \d+: images: .* is no readable image"
    ) as caught:
        learner.accumulate(answers)
    assert caught.value.actor == "actor-2"


def quoting(whole, blind):
    """The examples of a step, of which those of odd positions have a placeholder that is text; or
    `blind`, an image that nobody knows any more.
    """
    shown = whole.example(*parts_of(0))
    text = whole.example(Part("tell me about <|image_pad|> please"), Part("ee ff", is_learned=True))
    return lambda position: [
        (replace(shown, images=()) if blind else text) if position % 2 else shown
    ]


@pytest.mark.parametrize(
    "blind", [False, True], ids=["placeholder in a text", "image that is missing"]
)
def test_an_example_whose_placeholders_are_not_those_of_its_images_ends_the_run_with_the_example_and_what_to_do(
    config, whole, blind
):
    """In a row with others it would be shown their patches."""
    learner, answers = begun(config(), whole, quoting(whole, blind))
    told = (
        r"example \d+: its tokens have places for 1 images, and it brings 0; an environment leaves"
        r" the text of placeholders out of its messages"
    )
    with pytest.raises(RolloutError, match=told) as caught:
        learner.accumulate(answers)
    assert caught.value.phase == "check"


def test_a_placeholder_in_the_text_of_an_example_with_images_is_told_as_one(config, whole):
    shown = whole.example(*parts_of(0))
    pad = whole.processor.image_token_id
    first, *others = shown.token_ids
    both = replace(
        shown,
        token_ids=[first, pad, *others],
        mask=[0, *shown.mask],
        logprobs=[0.0, *shown.logprobs],
    )
    learner, answers = begun(config(), whole, lambda _: [both])
    with pytest.raises(
        RolloutError,
        match=r"its tokens have places for 2 images, and it brings 1; an environment leaves",
    ):
        learner.accumulate(answers)


# What syncs are proved by


@pytest.mark.parametrize("number", [0, 1, 3])
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
    expected = torch.log_softmax(plain_logits(whole, ids, images), -1).gather(
        1, torch.tensor(ids[1:])[:, None]
    )[:, 0]
    assert probe.expected_logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@torch.no_grad()
def plain_logits(whole, token_ids, images):
    """[L - 1, V], nothing banned."""
    example = TrainingExample(
        token_ids, [0.0] * len(token_ids), [0] * len(token_ids), reward=0.0, images=images
    )
    return whole.model(
        input_ids=torch.tensor([token_ids]), **whole.shown(example), use_cache=False
    ).logits[0, :-1]
