"""Spec trajectories, 6 (horizontal training processing) with the issue's corrections, and the
merged form of append-only trajectories.
"""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.advantages import token_advantages
from rollout_actors.environments.rubric import Rubric, set_advantages, settle
from rollout_actors.environments.training.examples import (
    merge_trajectories_for_training,
    process_trajectories_for_training,
)
from rollout_actors.environments.types import State


def step(prompt_ids: list[int], completion_ids: list[int], **changes: Any) -> dict[str, Any]:
    """The k-th sampled token has the log-probability -1 - k / 8."""
    tokens = {
        "prompt_ids": prompt_ids,
        "prompt_mask": [0] * len(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": [1] * len(completion_ids),
        "completion_logprobs": [-1.0 - k / 8 for k in range(len(completion_ids))],
    }
    return {
        "prompt": [],
        "completion": [],
        "response": None,
        "tokens": tokens,
        "reward": None,
        "advantage": None,
        "extras": {},
    } | changes


def rollout(
    *steps: dict[str, Any],
    example_id: Any = 0,
    reward: float | None = 1.0,
    advantage: float | None = 0.5,
    task: str = "t",
    **fields: Any,
) -> State:
    given = {"prompt": [], "example_id": example_id, "task": task}
    return (
        State(input=given, trajectory=list(steps), reward=reward, advantage=advantage, error=None)
        | fields
    )


# One example for each step


def test_each_trajectory_step_becomes_one_training_example():
    first, second = process_trajectories_for_training(
        [rollout(step([1, 2], [3, 4]), step([1, 2, 3, 4, 5], [6]))]
    )
    assert (first.token_ids, first.logprobs, first.mask) == (
        [1, 2, 3, 4],
        [0.0, 0.0, -1.0, -1.125],
        [0, 0, 1, 1],
    )
    assert (second.token_ids, second.logprobs, second.mask) == (
        [1, 2, 3, 4, 5, 6],
        [0.0] * 5 + [-1.0],
        [0] * 5 + [1],
    )
    assert (first.steps, second.steps) == ((0,), (1,))


def test_steps_without_tokens_are_skipped():
    (only,) = process_trajectories_for_training(
        [
            rollout(step([1], [2], tokens=None), step([1], [3])),
            rollout(step([1], [2], tokens=None)),
            rollout(),
        ]
    )
    assert (only.token_ids, only.steps, only.rollout) == ([1, 3], (1,), 0)


@pytest.mark.parametrize(
    ("own", "rollouts", "expected"),
    [(None, 0.75, 0.75), (0.25, 0.75, 0.25), (0.0, 0.75, 0.0), (None, None, 0.0)],
)
def test_the_reward_is_the_steps_if_it_is_not_none_else_the_rollouts(own, rollouts, expected):
    (only,) = process_trajectories_for_training(
        [rollout(step([1], [2], reward=own), reward=rollouts)]
    )
    assert only.reward == expected


@pytest.mark.parametrize(
    ("own", "rollouts", "expected"),
    [(None, -0.5, -0.5), (0.25, -0.5, 0.25), (0.0, -0.5, 0.0), (None, None, None)],
)
def test_the_advantage_is_the_steps_if_it_is_not_none_else_the_rollouts(own, rollouts, expected):
    (only,) = process_trajectories_for_training(
        [rollout(step([1], [2], advantage=own), advantage=rollouts)]
    )
    assert only.advantage == expected


def test_without_masked_prompts_every_token_is_learned():
    (only,) = process_trajectories_for_training([rollout(step([1, 2], [3]))], mask_prompts=False)
    assert only.mask == [1, 1, 1]


def test_masks_are_those_of_the_steps_tokens():
    tokens = step([1, 2], [3, 4])["tokens"] | {"prompt_mask": [0, 1], "completion_mask": [1, 0]}
    state = rollout(step([], [], tokens=tokens))
    assert (
        process_trajectories_for_training([state])[0].mask
        == merge_trajectories_for_training([state]).examples[0].mask
        == [0, 1, 1, 0]
    )


def test_examples_name_their_row_their_rollout_and_the_rewards_of_their_group():
    states = [
        rollout(step([1], [2]), example_id=i, reward=reward)
        for i, reward in [(7, 1.0), (7, 0.0), ("x", 0.5)]
    ]
    for examples in (
        process_trajectories_for_training(states),
        merge_trajectories_for_training(states).examples,
    ):
        assert [(one.example_id, one.rollout, one.group_rewards) for one in examples] == [
            (7, 0, (1.0, 0.0)),
            (7, 1, (1.0, 0.0)),
            ("x", 2, (0.5,)),
        ]


def test_a_rollout_without_tokens_is_of_its_group_all_the_same():
    (only,) = process_trajectories_for_training([rollout(step([1], [2])), rollout(reward=0.0)])
    assert only.group_rewards == (1.0, 0.0)


def test_a_rollout_that_failed_makes_no_example_and_its_reward_is_not_among_its_groups():
    failed = rollout(
        step([1], [2]),
        step([5], [6]),
        reward=0.0,
        advantage=None,
        error="RolloutError: generate on actor-0: its process has ended",
    )
    states = [
        failed,
        rollout(step([1], [3]), reward=1.0),
        failed,
        rollout(step([1], [4]), reward=0.5),
    ]
    merged = merge_trajectories_for_training(states)
    for examples in (process_trajectories_for_training(states), merged.examples):
        assert [(one.token_ids, one.rollout, one.group_rewards) for one in examples] == [
            ([1, 3], 1, (1.0, 0.5)),
            ([1, 4], 3, (1.0, 0.5)),
        ]
    assert merged.num_splits == 0
    assert (
        process_trajectories_for_training([failed])
        == merge_trajectories_for_training([failed]).examples
        == []
    )


def test_a_rollout_that_failed_before_it_was_scored_leaves_its_group_scored():
    (only,) = process_trajectories_for_training(
        [rollout(step([1], [2])), rollout(reward=None, error="ValueError: no")]
    )
    assert only.group_rewards == (1.0,)


def test_rows_of_two_tasks_are_two_groups_though_they_share_an_id():
    states = [
        rollout(step([1], [2]), reward=reward, task=task)
        for task, reward in (("one", 1.0), ("other", 0.0), ("one", 0.5))
    ]
    for examples in (
        process_trajectories_for_training(states),
        merge_trajectories_for_training(states).examples,
    ):
        assert [one.group_rewards for one in examples] == [(1.0, 0.5), (0.0,), (1.0, 0.5)]


def test_a_group_of_which_one_was_not_scored_has_no_rewards():
    assert (
        process_trajectories_for_training([rollout(step([1], [2])), rollout(reward=None)])[
            0
        ].group_rewards
        == ()
    )


def test_the_weight_version_is_what_the_client_or_the_endpoint_says():
    states = [
        rollout(
            step([1], [2], extras={"weight_version": 4}, response=SimpleNamespace(weight_version=9))
        ),
        rollout(step([1], [2], response=SimpleNamespace(weight_version=5))),
        rollout(step([1], [2], response=SimpleNamespace())),
        rollout(step([1], [2], response=SimpleNamespace(weight_version="default"))),
    ]
    assert [one.weight_version for one in process_trajectories_for_training(states)] == [
        4,
        5,
        None,
        None,
    ]


def test_states_with_nothing_but_a_trajectory_are_taken():
    bare = {"trajectory": [{"tokens": step([1], [2])["tokens"]}]}
    (only,) = process_trajectories_for_training([bare, {}])
    assert (only.token_ids, only.reward, only.advantage) == ([1, 2], 0.0, None)
    assert merge_trajectories_for_training([bare, {}]).examples == [only]


def test_states_are_as_before_and_share_no_list_with_the_examples():
    states = [rollout(step([1], [2]), step([1, 2, 3], [4]))]
    before = deepcopy(states)
    for one in (
        *process_trajectories_for_training(states),
        *merge_trajectories_for_training(states).examples,
    ):
        one.token_ids.append(0)
        one.logprobs.append(0.0)
        one.mask.append(0)
    assert states == before


# One example for as many steps as extend each other


def test_an_append_only_trajectory_is_one_example():
    (only,), num_splits = merge_trajectories_for_training(
        [rollout(step([1, 2], [3]), step([1, 2, 3, 8], [4, 5]), step([1, 2, 3, 8, 4, 5], [6]))]
    )
    assert only.token_ids == [1, 2, 3, 8, 4, 5, 6]
    assert only.mask == [0, 0, 1, 0, 1, 1, 1]
    assert only.logprobs == [0.0, 0.0, -1.0, 0.0, -1.0, -1.125, -1.0]
    assert (only.steps, num_splits) == ((0, 1, 2), 0)


def test_a_prompt_that_does_not_begin_with_what_was_before_begins_an_example_and_is_counted():
    examples, num_splits = merge_trajectories_for_training(
        [
            rollout(step([1], [2]), step([1, 9], [3]), step([1, 9, 3, 4], [5])),
            rollout(step([1], [2])),
        ]
    )
    assert [(one.token_ids, one.rollout, one.steps) for one in examples] == [
        ([1, 2], 0, (0,)),
        ([1, 9, 3, 4, 5], 0, (1, 2)),
        ([1, 2], 1, (0,)),
    ]
    assert num_splits == 1


def test_what_a_later_prompt_repeats_of_another_example_is_masked_there():
    """Two calls go on from the same turn: a branch."""
    examples, num_splits = merge_trajectories_for_training(
        [rollout(step([1], [2]), step([1, 2, 3], [4]), step([1, 2, 5], [6]))]
    )
    assert [(one.token_ids, one.mask) for one in examples] == [
        ([1, 2, 3, 4], [0, 1, 0, 1]),
        ([1, 2, 5, 6], [0, 0, 0, 1]),
    ]
    assert num_splits == 1


def test_the_longest_matching_prefix_among_the_open_ones_is_extended():
    """The second call's prompt is shorter than what is there, as of a helper that is asked between
    the turns; the third goes on from the first.
    """
    examples, _ = merge_trajectories_for_training(
        [
            rollout(
                step([1, 2], [3, 4]),
                step([1], [2]),
                step([1, 2, 3, 4, 5], [6]),
                step([1, 2, 9], [7]),
            )
        ]
    )
    assert [one.steps for one in examples] == [(0, 2), (1, 3)]


def test_a_reward_of_a_merged_example_is_the_rollouts_and_where_it_has_none_the_last_steps():
    steps = [step([1], [2], reward=0.25), step([1, 2], [3], reward=0.75)]
    assert merge_trajectories_for_training([rollout(*steps)]).examples[0].reward == 1.0
    assert (
        merge_trajectories_for_training([rollout(*steps, reward=None)]).examples[0].reward == 0.75
    )


def test_tokens_of_merged_steps_keep_the_advantages_of_their_steps():
    merged = merge_trajectories_for_training(
        [rollout(step([1], [2, 3]), step([1, 2, 3, 4], [5], advantage=-2.0))]
    )
    assert merged.examples[0].token_advantages == [0.0, 0.5, 0.5, 0.0, -2.0]
    assert merged.examples[0].advantage == 0.5


def test_tokens_of_merged_steps_are_relative_where_their_advantage_is_the_groups():
    """Which is in units of the rewards; a step's own is not, nor one that somebody gives the
    rollout.
    """
    states = [
        rollout(
            step([1], [2]),
            step([1, 2], [3], advantage=-2.0),
            step([1, 2, 3], [4]),
            reward=reward,
            advantage=None,
        )
        for reward in (0.0, 2.0)
    ]
    set_advantages(states)
    states[1]["trajectory"][0]["advantage"] = 9.0
    assert [one.token_is_relative for one in merge_trajectories_for_training(states).examples] == [
        [1, 1, 0, 1],
        [0, 0, 0, 1],
    ]
    states[0]["advantage"] = 5.0
    settle(states, Rubric())
    assert [one.token_is_relative for one in merge_trajectories_for_training(states).examples] == [
        [0, 0, 0, 0],
        [0, 0, 0, 1],
    ]


def test_an_advantage_of_its_own_is_not_divided_though_a_sibling_has_the_same_whether_merged_or_not():
    """The second step's -0.5 is what the other rollout has of the group: 1 - 0.5."""
    for own in (-0.5, 0.5):
        steps = [step([1], [2]), step([1, 2], [3], advantage=own)]
        states = [
            rollout(*steps, reward=1.0, advantage=None),
            rollout(step([1], [4]), reward=0.0, advantage=None),
        ]
        set_advantages(states)
        apart = process_trajectories_for_training(states)
        merged = merge_trajectories_for_training(states).examples
        assert [token_advantages(one, std_epsilon=0.0)[-1] for one in apart] == [1.0, own, -1.0]
        assert token_advantages(merged[0], std_epsilon=0.0) == [0.0, 1.0, own]


def test_merged_steps_of_one_advantage_have_it_as_their_own():
    merged = merge_trajectories_for_training(
        [rollout(step([1], [2], advantage=2.0), step([1, 2, 4], [5], advantage=2.0))]
    )
    assert (merged.examples[0].token_advantages, merged.examples[0].advantage) == (None, 2.0)


def test_the_weight_version_of_a_merged_example_is_the_oldest():
    steps = [
        step([1], [2], extras={"weight_version": 4}),
        step([1, 2], [3], extras={"weight_version": 3}),
        step([1, 2, 3], [4]),
    ]
    assert merge_trajectories_for_training([rollout(*steps)]).examples[0].weight_version == 3


# Any trajectories


@st.composite
def trajectories(draw: st.DrawFn) -> list[State]:
    """Few different tokens, prompts that mostly extend something: branches, repetitions and splits
    of every kind.
    """
    token, states = st.integers(0, 2), []
    for _ in range(draw(st.integers(0, 3))):
        steps: list[dict[str, Any]] = []
        for _ in range(draw(st.integers(0, 6))):
            seen = [
                one["tokens"]["prompt_ids"] + one["tokens"]["completion_ids"]
                for one in steps
                if one["tokens"] is not None
            ]
            prompt = list(draw(st.sampled_from(seen))) if seen and draw(st.integers(0, 3)) else []
            made = step(
                prompt + draw(st.lists(token, max_size=2)), draw(st.lists(token, max_size=3))
            )
            made["advantage"] = draw(st.sampled_from([None, None, 1.0, -1.0]))
            made["tokens"]["completion_logprobs"] = [
                -draw(st.floats(0.0, 9.0)) for _ in made["tokens"]["completion_ids"]
            ]
            steps.append(made if draw(st.integers(0, 4)) else made | {"tokens": None})
        states.append(
            rollout(
                *steps,
                example_id=draw(st.integers(0, 1)),
                advantage=draw(st.sampled_from([None, 0.5])),
            )
        )
    return states


def slowly_merged(
    states: list[State],
) -> tuple[list[tuple[int, list[tuple[int, float, int, float]]]], int]:
    """(rollout, [(token, logprob, mask, advantage)]) of each example, token by token, and the
    number of splits.
    """
    examples, num_splits = [], 0
    for place, state in enumerate(states):
        open_ones: list[list[tuple[int, float, int, float]]] = []
        for one in state["trajectory"]:
            if one["tokens"] is None:
                continue
            prompt, best = one["tokens"]["prompt_ids"], None
            for index, tokens in enumerate(open_ones):
                matches = len(tokens) <= len(prompt) and all(
                    tokens[i][0] == prompt[i] for i in range(len(tokens))
                )
                if matches and (best is None or len(tokens) >= len(open_ones[best])):
                    best = index
            if best is None:
                num_splits += 1 if open_ones else 0
                open_ones.append([])
                best = len(open_ones) - 1
            for token in prompt[len(open_ones[best]) :]:
                open_ones[best].append((token, 0.0, 0, 0.0))
            advantage = one["advantage"] if one["advantage"] is not None else state["advantage"]
            for token, logprob in zip(
                one["tokens"]["completion_ids"], one["tokens"]["completion_logprobs"], strict=True
            ):
                open_ones[best].append((token, logprob, 1, 0.0 if advantage is None else advantage))
        examples += [(place, tokens) for tokens in open_ones]
    return examples, num_splits


@pytest.mark.slow
@given(trajectories())
def test_merging_equals_a_slow_obvious_version(states):
    examples, num_splits = merge_trajectories_for_training(states)
    columns = []
    for one in examples:
        unscored = one.advantage is None and one.token_advantages is None
        advantages = (
            [0.0] * len(one.token_ids) if unscored else token_advantages(one, std_epsilon=None)
        )
        columns.append(
            (one.rollout, list(zip(one.token_ids, one.logprobs, one.mask, advantages, strict=True)))
        )
    assert (columns, num_splits) == slowly_merged(states)


@pytest.mark.slow
@given(trajectories())
def test_every_sampled_token_is_trained_exactly_once_with_its_own_log_probability(states):
    sampled = sorted(
        (place, token, logprob)
        for place, state in enumerate(states)
        for one in state["trajectory"]
        if one["tokens"] is not None
        for token, logprob in zip(
            one["tokens"]["completion_ids"], one["tokens"]["completion_logprobs"], strict=True
        )
    )
    for examples in (
        process_trajectories_for_training(states),
        merge_trajectories_for_training(states).examples,
    ):
        trained = [
            (one.rollout, token, logprob)
            for one in examples
            for token, logprob, is_learned in zip(
                one.token_ids, one.logprobs, one.mask, strict=True
            )
            if is_learned
        ]
        assert sorted(trained) == sampled


@pytest.mark.slow
@given(trajectories())
def test_every_step_with_tokens_is_in_one_merged_example_and_splits_are_the_examples_more_than_rollouts(
    states,
):
    examples, num_splits = merge_trajectories_for_training(states)
    steps = [(one.rollout, number) for one in examples for number in one.steps]
    with_tokens = [
        (place, number)
        for place, state in enumerate(states)
        for number, one in enumerate(state["trajectory"])
        if one["tokens"] is not None
    ]
    assert sorted(steps) == with_tokens
    assert num_splits == len(examples) - len({place for place, _ in with_tokens})


@pytest.mark.slow
@given(trajectories())
def test_every_token_is_learned_behind_exactly_the_tokens_that_the_engine_saw(states):
    """A merged example is read from its beginning: at each step's end it must be that step's prompt
    and completion.
    """
    for one in merge_trajectories_for_training(states).examples:
        for number in one.steps:
            tokens = states[one.rollout]["trajectory"][number]["tokens"]
            whole = tokens["prompt_ids"] + tokens["completion_ids"]
            assert one.token_ids[: len(whole)] == whole


def test_the_engine_is_what_the_client_or_the_endpoint_says_and_of_a_merged_example_the_one_of_all_its_steps():
    steps = [
        step([1], [2], extras={"engine": "a"}),
        step([1, 2], [3], response=SimpleNamespace(engine="a")),
        step([1, 2, 3], [4], extras={"engine": "b"}),
    ]
    assert [
        one.engine for one in process_trajectories_for_training([rollout(*steps, step([1], [2]))])
    ] == ["a", "a", "b", None]
    assert merge_trajectories_for_training([rollout(*steps[:2])]).examples[0].engine == "a"
    assert merge_trajectories_for_training([rollout(*steps)]).examples[0].engine is None
