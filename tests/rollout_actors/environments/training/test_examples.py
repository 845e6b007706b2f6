"""Spec trajectories, 6 (horizontal training processing) with the issue's corrections, and the
merged form of append-only trajectories.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.advantages import token_advantages
from rollout_actors.environments.rewards import set_advantages
from rollout_actors.environments.training.examples import (
    merge_trajectories_for_training,
    process_trajectories_for_training,
)
from rollout_actors.environments.types import State
from shared.trajectory import TrainingExample

FAILED = {"reward": 0.0, "advantage": None, "error": "RolloutError: its process has ended"}


def step(prompt_ids: list[int], completion_ids: list[int], **changes: Any) -> dict[str, Any]:
    """The k-th sampled token has the log-probability -1 - k / 8."""
    tokens = {
        "prompt_ids": prompt_ids,
        "prompt_mask": [0] * len(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": [1] * len(completion_ids),
        "completion_logprobs": [-1.0 - k / 8 for k in range(len(completion_ids))],
    }
    fields = {"prompt": [], "completion": [], "response": None, "extras": {}}
    return {**fields, "tokens": tokens, "reward": None, "advantage": None} | changes


def rollout(*steps: dict[str, Any], example_id: Any = 0, task: str = "t", **changes: Any) -> State:
    fields = {"reward": 1.0, "advantage": 0.5, "error": None} | changes
    row = {"prompt": [], "example_id": example_id, "task": task}
    return State(input=row, trajectory=list(steps), **fields)


def apart(*states: Any) -> list[TrainingExample]:
    return process_trajectories_for_training(states)


def merged(*states: Any) -> list[TrainingExample]:
    return merge_trajectories_for_training(states).examples


BOTH = pytest.mark.parametrize("examples_of", [apart, merged])


# One example for each step


def test_each_trajectory_step_becomes_one_training_example():
    first, second = apart(rollout(step([1, 2], [3, 4]), step([1, 2, 3, 4, 5], [6])))
    assert first.token_ids == [1, 2, 3, 4]
    assert first.logprobs == [0.0, 0.0, -1.0, -1.125]
    assert first.mask == [0, 0, 1, 1]
    assert second.token_ids == [1, 2, 3, 4, 5, 6]
    assert second.logprobs == [0.0] * 5 + [-1.0]
    assert second.mask == [0] * 5 + [1]
    assert (first.steps, second.steps) == ((0,), (1,))


def test_steps_without_tokens_are_skipped():
    without = step([1], [2], tokens=None)
    (only,) = apart(rollout(without, step([1], [3])), rollout(without), rollout())
    assert (only.token_ids, only.steps, only.rollout) == ([1, 3], (1,), 0)


@pytest.mark.parametrize("field", ["reward", "advantage"])
@pytest.mark.parametrize(
    ("of_step", "of_rollout", "expected"),
    [(None, 0.75, 0.75), (0.25, 0.75, 0.25), (0.0, -0.75, 0.0), (None, None, None)],
)
def test_reward_and_advantage_are_the_steps_if_not_none_else_the_rollouts(
    field, of_step, of_rollout, expected
):
    (only,) = apart(rollout(step([1], [2], **{field: of_step}), **{field: of_rollout}))
    assert getattr(only, field) == (0.0 if field == "reward" and expected is None else expected)


def test_without_masked_prompts_every_token_is_learned():
    states = [rollout(step([1, 2], [3]))]
    (only,) = process_trajectories_for_training(states, mask_prompts=False)
    assert only.mask == [1, 1, 1]


@BOTH
def test_masks_are_those_of_the_steps_tokens(examples_of):
    tokens = step([1, 2], [3, 4])["tokens"] | {"prompt_mask": [0, 1], "completion_mask": [1, 0]}
    (only,) = examples_of(rollout(step([], [], tokens=tokens)))
    assert only.mask == [0, 1, 1, 0]


@BOTH
@pytest.mark.parametrize(
    ("rollouts", "group_rewards"),
    [
        (
            [{"example_id": 7}, {"example_id": 7, "reward": 0.0}, {"example_id": "x"}],
            [(1.0, 0.0), (1.0, 0.0), (1.0,)],
        ),
        (
            [{"task": "one"}, {"task": "other", "reward": 0.0}, {"task": "one", "reward": 0.5}],
            [(1.0, 0.5), (0.0,), (1.0, 0.5)],
        ),
        # A failure before the rollout was scored.
        ([{}, {"error": "ValueError: no", "reward": None}], [(1.0,), None]),
        ([FAILED, {}, FAILED, {"reward": 0.5}], [None, (1.0, 0.5), None, (1.0, 0.5)]),
        ([{}, {"reward": None}], [(), ()]),
    ],
    ids=[
        "of one row",
        "rows of two tasks share an id",
        "a failure is not among them",
        "and has no example",
        "one is not scored",
    ],
)
def test_examples_name_their_rollout_and_the_rewards_of_their_group(
    examples_of, rollouts, group_rewards
):
    examples = examples_of(*[rollout(step([1], [2]), **fields) for fields in rollouts])
    assert [(one.rollout, one.group_rewards) for one in examples] == [
        (number, rewards) for number, rewards in enumerate(group_rewards) if rewards is not None
    ]
    assert [one.example_id for one in examples] == [
        rollouts[one.rollout].get("example_id", 0) for one in examples
    ]


def test_the_weight_version_and_the_engine_are_what_the_client_or_the_endpoint_says():
    notes = [
        ({"weight_version": 4, "engine": "a"}, SimpleNamespace(weight_version=9, engine="b")),
        ({}, SimpleNamespace(weight_version=5, engine="b")),
        ({}, SimpleNamespace()),
        ({}, SimpleNamespace(weight_version="default", engine=7)),
    ]
    steps = [step([1], [2], extras=extras, response=response) for extras, response in notes]
    assert [(one.weight_version, one.engine) for one in apart(rollout(*steps))] == [
        (4, "a"),
        (5, "b"),
        (None, None),
        (None, None),
    ]


# One example for as many steps as extend each other


def test_an_append_only_trajectory_is_one_example():
    state = rollout(step([1, 2], [3]), step([1, 2, 3, 8], [4, 5]), step([1, 2, 3, 8, 4, 5], [6]))
    (only,), num_splits = merge_trajectories_for_training([state])
    assert only.token_ids == [1, 2, 3, 8, 4, 5, 6]
    assert only.mask == [0, 0, 1, 0, 1, 1, 1]
    assert only.logprobs == [0.0, 0.0, -1.0, 0.0, -1.0, -1.125, -1.0]
    assert (only.steps, num_splits) == ((0, 1, 2), 0)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (
            [step([1], [2]), step([1, 9], [3]), step([1, 9, 3, 4], [5])],
            [([1, 2], [0, 1], (0,)), ([1, 9, 3, 4, 5], [0, 0, 1, 0, 1], (1, 2))],
        ),
        # Two calls go on from the same turn: a branch.
        (
            [step([1], [2]), step([1, 2, 3], [4]), step([1, 2, 5], [6])],
            [([1, 2, 3, 4], [0, 1, 0, 1], (0, 1)), ([1, 2, 5, 6], [0, 0, 0, 1], (2,))],
        ),
        # A helper is asked between the turns; the third call goes on from the first.
        (
            [
                step([1, 2], [3, 4]),
                step([1], [2]),
                step([1, 2, 3, 4, 5], [6]),
                step([1, 2, 9], [7]),
            ],
            [
                ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], (0, 2)),
                ([1, 2, 9, 7], [0, 1, 0, 1], (1, 3)),
            ],
        ),
    ],
    ids=[
        "a prompt that does not begin with what was before",
        "what a later prompt repeats of another example is masked there",
        "the longest matching prefix among the open ones is extended",
    ],
)
def test_a_prompt_begins_an_example_unless_it_extends_one_and_that_is_counted(steps, expected):
    examples, num_splits = merge_trajectories_for_training([rollout(*steps), rollout(steps[0])])
    first = [(one.token_ids, one.mask, one.steps) for one in examples if one.rollout == 0]
    assert first == expected
    assert len(examples) == 3
    assert num_splits == 1


@pytest.mark.parametrize(
    ("advantages", "by_token", "advantage"),
    [((None, -2.0), [0.0, 0.5, 0.5, 0.0, -2.0], 0.5), ((2.0, 2.0), None, 2.0)],
)
def test_tokens_of_merged_steps_keep_the_advantages_of_their_steps(advantages, by_token, advantage):
    first, second = advantages
    steps = [step([1], [2, 3], advantage=first), step([1, 2, 3, 4], [5], advantage=second)]
    (only,) = merged(rollout(*steps))
    assert (only.token_advantages, only.advantage) == (by_token, advantage)


@pytest.mark.parametrize("own_advantage", [-0.5, 0.5])
def test_an_advantage_of_its_own_is_not_divided_though_a_sibling_has_the_same_whether_merged_or_not(
    own_advantage,
):
    """The second step's -0.5 is what the other rollout has of the group: 1 - 0.5."""
    steps = [step([1], [2]), step([1, 2], [3], advantage=own_advantage)]
    sibling = rollout(step([1], [4]), reward=0.0, advantage=None)
    states = [rollout(*steps, advantage=None), sibling]
    set_advantages(states)
    by_example = [token_advantages(one, std_epsilon=0.0) for one in apart(*states)]
    divided = 0.5 / math.sqrt(0.5)
    last = [advantages[-1] for advantages in by_example]
    assert last == pytest.approx([divided, own_advantage, -divided])
    of_merged = token_advantages(merged(*states)[0], std_epsilon=0.0)
    assert of_merged == pytest.approx([0.0, divided, own_advantage])


def test_a_merged_example_is_of_its_oldest_weights_and_of_the_engine_of_all_its_steps():
    notes = [
        {"weight_version": 4, "engine": "a"},
        {"weight_version": 3, "engine": "a"},
        {"engine": "b"},
    ]
    steps = [
        step(list(range(1, number + 2)), [number + 2], extras=extras)
        for number, extras in enumerate(notes)
    ]
    (of_two,) = merged(rollout(*steps[:2]))
    (of_three,) = merged(rollout(*steps))
    assert (of_two.weight_version, of_two.engine) == (3, "a")
    assert (of_three.weight_version, of_three.engine) == (3, None)


# Any trajectories


@st.composite
def trajectories(draw: st.DrawFn) -> list[State]:
    """Few different tokens, prompts that mostly extend something: branches, repetitions and splits
    of every kind.
    """
    token = st.integers(0, 2)
    states = []
    for _ in range(draw(st.integers(0, 3))):
        steps: list[dict[str, Any]] = []
        for _ in range(draw(st.integers(0, 6))):
            tokens_so_far = [one["tokens"] for one in steps if one["tokens"] is not None]
            seen = [one["prompt_ids"] + one["completion_ids"] for one in tokens_so_far]
            prompt = list(draw(st.sampled_from(seen))) if seen and draw(st.integers(0, 3)) else []
            prompt += draw(st.lists(token, max_size=2))
            drawn = step(prompt, draw(st.lists(token, max_size=3)))
            drawn["advantage"] = draw(st.sampled_from([None, None, 1.0, -1.0]))
            tokens = drawn["tokens"]
            tokens["completion_logprobs"] = [
                -draw(st.floats(0.0, 9.0)) for _ in tokens["completion_ids"]
            ]
            steps.append(drawn if draw(st.integers(0, 4)) else drawn | {"tokens": None})
        example_id = draw(st.integers(0, 1))
        advantage = draw(st.sampled_from([None, 0.5]))
        states.append(rollout(*steps, example_id=example_id, advantage=advantage))
    return states


TokenColumns = tuple[int, float, int, float]
"""Token, log-probability, mask and advantage."""


def slowly_merged(
    states: list[State],
) -> tuple[list[tuple[int, list[int], list[TokenColumns]]], int]:
    """Return the rollout, the steps and the tokens of each example, and the number of splits.

    Every sampled token is learned once, with its own log-probability, behind exactly the tokens
    that the engine saw.
    """
    examples = []
    num_splits = 0
    for index, state in enumerate(states):
        open_ones: list[tuple[int, list[int], list[TokenColumns]]] = []
        for number, one in enumerate(state["trajectory"]):
            tokens = one["tokens"]
            if tokens is None:
                continue
            prompt = tokens["prompt_ids"]
            best = None
            for example in open_ones:
                _, _, known = example
                is_extended = [token for token, *_ in known] == prompt[: len(known)]
                if is_extended and (best is None or len(known) >= len(best[2])):
                    best = example
            if best is None:
                num_splits += 1 if open_ones else 0
                best = (index, [], [])
                open_ones.append(best)
            _, steps, columns = best
            steps.append(number)
            columns += [(token, 0.0, 0, 0.0) for token in prompt[len(columns) :]]
            advantage = one["advantage"] if one["advantage"] is not None else state["advantage"]
            for token, logprob in zip(
                tokens["completion_ids"], tokens["completion_logprobs"], strict=True
            ):
                columns.append((token, logprob, 1, 0.0 if advantage is None else advantage))
        examples += open_ones
    return examples, num_splits


@pytest.mark.slow
@settings(deadline=None)
@given(trajectories())
def test_merging_equals_a_slow_obvious_version(states):
    examples, num_splits = merge_trajectories_for_training(states)
    found = []
    for one in examples:
        advantages = [0.0] * len(one.token_ids)
        if one.advantage is not None or one.token_advantages is not None:
            advantages = token_advantages(one, std_epsilon=None)
        columns = list(zip(one.token_ids, one.logprobs, one.mask, advantages, strict=True))
        found.append((one.rollout, list(one.steps), columns))
    assert (found, num_splits) == slowly_merged(states)
