"""The demands of `custom.trainer_variant: trajectory_pg` that are more than a line of
`tests/data/config_cases.txt`.
"""

from __future__ import annotations

import re
from itertools import product

import yaml
from config_changes import (
    BUDGET,
    OBJECTIVE,
    load,
    load_trajectories,
    problems,
    trajectory_problems,
)

BATCH = "training.effective_batch_size"
STEPS = "training.gradient_accumulation_steps"
PER_DEVICE = "training.per_device_train_batch_size"
RANKS = "learner.world_size"
HELD_OUT = "environment.num_eval_examples"
STOP = "rollout_matching.decoding.stop"
SIZE = "environment.rollouts_per_example"


def test_stop_texts_are_texts_of_environments():
    (line,) = problems({STOP: ["</answer>"]})
    assert line.startswith(f"{STOP}: ['</answer>'] is only for environments")
    assert any(line.startswith(STOP) for line in trajectory_problems({STOP: [""]}))
    run = load_trajectories({STOP: ["</answer>", "\n\n"]})
    decode = run.rollout_matching.decode_settings(stop_token_ids=(1,), banned_token_ids=())
    assert decode.stop == ("</answer>", "\n\n")


def test_the_entry_that_is_proposed_can_be_copied():
    (line,) = trajectory_problems({OBJECTIVE: []})
    assert trajectory_problems({OBJECTIVE: [yaml.safe_load(line.split("`")[1])]}) == []


def test_the_batch_size_that_a_refusal_of_cut_groups_proposes_is_accepted():
    """And so is every larger multiple of what it says."""
    num_refused = 0
    for size, ranks, per_device, asked in product(
        (2, 3, 16),
        (1, 2, 3, 5),
        (1, 3),
        ({BATCH: 7}, {BATCH: 16}, {BATCH: ..., STEPS: 5}, {BATCH: ...}, {BUDGET: 10}),
    ):
        changes = {SIZE: size, RANKS: ranks, PER_DEVICE: per_device, **asked}
        lines = trajectory_problems(changes)
        if not lines:
            continue
        num_refused += 1
        (line,) = lines
        path, number, unit = re.search(
            r"^([\w.]+): .*?(\d+), or a larger multiple of (\d+)$", line
        ).groups()
        replaced = {STEPS: None} if path == BATCH and STEPS in changes else {}
        for proposed in (int(number), int(number) + int(unit)):
            assert trajectory_problems({**changes, **replaced, path: proposed}) == [], line
    assert num_refused > 50


def test_the_group_of_an_example_and_the_batch_size_follow_from_the_sections():
    assert (load({}).group_size, load({}).raw_rollouts_per_step) == (1, 32)
    run = load_trajectories({SIZE: 16, BUDGET: 48})
    assert (run.group_size, run.raw_rollouts_per_step) == (16, 48)


def test_there_are_held_out_examples_unless_none_is_asked_for():
    assert load({}).has_held_out
    assert not load({"data.val": ...}).has_held_out
    runs = [load_trajectories({HELD_OUT: number}) for number in (None, 1, 0)]
    assert [run.has_held_out for run in runs] == [True, True, False]
