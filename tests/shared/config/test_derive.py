"""The batch algebra, and which step is on which channel."""

from __future__ import annotations

from math import floor

import pytest

from shared.config.derive import batch_algebra
from shared.config.pipeline import Channel
from shared.config.stage2_ab import ScheduleSection

ACTORS = "rollout_matching.vllm.actors"


def test_32_rollouts_on_three_actors_that_decode_6_are_two_rounds_of_16(load):
    algebra = batch_algebra(load({}))
    assert (algebra.raw_rollouts_per_step, algebra.round_capacity, algebra.round_sizes) == (32, 18, (16, 16))
    assert algebra.shares == ((6, 6, 4), (6, 6, 4))
    assert algebra.share_per_rank == (32,)
    assert (algebra.updates, algebra.warmup_steps, algebra.a_steps, algebra.b_steps) == (100, 20, 20, 80)
    assert (algebra.packing_length, algebra.packing_window) == (2048, 8)


@pytest.mark.parametrize("num_actors", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@pytest.mark.parametrize("decode_batch_size", [1, 5, 6, 64])
@pytest.mark.parametrize("rollouts", [1, 7, 32, 33])
def test_no_device_decodes_more_than_decode_batch_size_and_every_rollout_is_generated_once(load, num_actors, tensor_parallel_size, decode_batch_size, rollouts):
    changes = {f"{ACTORS}.num_actors": num_actors, f"{ACTORS}.tensor_parallel_size": tensor_parallel_size}
    algebra = batch_algebra(load({**changes, "rollout_matching.decode_batch_size": decode_batch_size, "stage2_ab.channel_b.rollouts_per_step": rollouts}))
    assert sum(algebra.round_sizes) == sum(algebra.share_per_rank) == rollouts
    assert [sum(shares) for shares in algebra.shares] == list(algebra.round_sizes)
    assert all(len(shares) == num_actors and max(shares) <= decode_batch_size * tensor_parallel_size for shares in algebra.shares)


@pytest.mark.parametrize(
    ("changes", "accumulation", "effective"),
    [
        ({"training.effective_batch_size": 32}, 32, 32),
        ({"training.effective_batch_size": 33, "training.per_device_train_batch_size": 4}, 9, 36),
        ({"training.effective_batch_size": ..., "training.gradient_accumulation_steps": 5}, 5, 5),
        ({"training.effective_batch_size": ..., "training.per_device_train_batch_size": 3}, 1, 3),
    ],
)
def test_rollouts_per_step_defaults_to_the_derived_effective_batch_size(load, changes, accumulation, effective):
    algebra = batch_algebra(load({**changes, "stage2_ab.channel_b.rollouts_per_step": ...}))
    assert (algebra.gradient_accumulation_steps, algebra.effective_batch_size, algebra.raw_rollouts_per_step) == (accumulation, effective, effective)


def test_the_algebra_reads_as_lines(load):
    assert batch_algebra(load({})).describe() == (
        "updates         100 = 20 channel A (20 of them warm-up) + 80 channel B, one per step",
        "channel-A step  32 samples = 1 per micro-step x 1 learner rank x 32 accumulation steps",
        "channel-B step  32 raw rollouts in 2 rounds (16 + 16); per learner rank 32",
        "round           at most 18 rollouts over 3 actors of 1 device, at most 6 per device at a time; shares per actor 6+6+4 | 6+6+4",
        "rows            packed to at most 2048 tokens, taken after every 8 rollouts and at the step's end",
    )


def test_a_run_without_rollouts_has_no_rounds(load):
    algebra = batch_algebra(load({"custom.trainer_variant": "stage1_sft", "training.packing": False}))
    assert (algebra.raw_rollouts_per_step, algebra.round_sizes, algebra.a_steps, algebra.b_steps) == (0, (), 100, 0)
    assert algebra.describe()[-1] == "rows            one segment each, of at most 2048 tokens"
    assert len(algebra.describe()) == 3


def test_a_warm_up_longer_than_the_run_leaves_channel_a_alone(load):
    algebra = batch_algebra(load({"training.max_steps": 10}))
    assert (algebra.warmup_steps, algebra.a_steps, algebra.b_steps) == (10, 10, 0)


@pytest.mark.parametrize("percent", [0, 1, 25, 29, 50, 70, 99, 100])
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_a_step_is_channel_b_where_the_floor_of_s_times_b_rises_counting_after_the_warm_up(percent, warmup_steps):
    schedule = ScheduleSection(b_ratio=percent / 100, warmup_steps=warmup_steps)
    expected = [Channel.A] * warmup_steps + [Channel.B if (s + 1) * percent // 100 > s * percent // 100 else Channel.A for s in range(300)]
    assert [schedule.channel(step) for step in range(warmup_steps + 300)] == expected
    assert schedule.num_b_steps(warmup_steps + 300) == expected.count(Channel.B) == 3 * percent
    assert schedule.num_b_steps(0) == 0


def test_the_schedule_is_the_rule_in_floats_where_floats_are_exact():
    schedule = ScheduleSection(b_ratio=0.375)
    assert all((schedule.channel(s) is Channel.B) == (floor((s + 1) * 0.375) > floor(s * 0.375)) for s in range(200))
