"""The batch algebra."""

from __future__ import annotations

from itertools import product

import pytest

from launch.runtime.batch_algebra import batch_algebra
from shared.chunking import rank_share
from shared.config.derive import (
    EngineLocation,
    RowRule,
    engines_in,
    is_sharded,
    remarks,
    rollout_servers,
)
from shared.config.pipeline import Channel
from shared.rollouts import DecodeMode

ACTORS = "rollout_matching.vllm.actors"


def test_32_rollouts_on_three_actors_that_decode_6_are_two_rounds_of_16(load):
    algebra = batch_algebra(load({}))
    assert (algebra.raw_rollouts_per_step, algebra.round_capacity, algebra.round_sizes) == (
        32,
        18,
        (16, 16),
    )
    assert algebra.shares == ((6, 6, 4), (6, 6, 4))
    assert algebra.share_per_rank == (32,)
    assert (algebra.updates, algebra.warmup_steps, algebra.a_steps, algebra.b_steps) == (
        100,
        20,
        20,
        80,
    )
    assert (algebra.packing_length, algebra.packing_window) == (2048, 8)


def test_the_positions_of_a_round_are_contiguous_within_each_rank_s_share_of_the_step(load):
    algebra = batch_algebra(
        load({"learner.world_size": 2, "stage2_ab.channel_b.rollouts_per_step": 33})
    )
    assert algebra.rounds == ((range(9), range(17, 25)), (range(9, 17), range(25, 33)))


@pytest.mark.parametrize("num_actors", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@pytest.mark.parametrize("decode_batch_size", [1, 5, 6, 64])
@pytest.mark.parametrize("rollouts", [1, 7, 32, 33])
def test_no_device_decodes_more_than_decode_batch_size_and_every_rollout_is_generated_once(
    load, num_actors, tensor_parallel_size, decode_batch_size, rollouts
):
    changes = {
        f"{ACTORS}.num_actors": num_actors,
        f"{ACTORS}.tensor_parallel_size": tensor_parallel_size,
    }
    algebra = batch_algebra(
        load(
            {
                **changes,
                "rollout_matching.decode_batch_size": decode_batch_size,
                "stage2_ab.channel_b.rollouts_per_step": rollouts,
            }
        )
    )
    assert sum(algebra.round_sizes) == sum(algebra.share_per_rank) == rollouts
    assert [sum(shares) for shares in algebra.shares] == list(algebra.round_sizes)
    assert all(
        len(shares) == num_actors and max(shares) <= decode_batch_size * tensor_parallel_size
        for shares in algebra.shares
    )


@pytest.mark.parametrize(
    ("changes", "accumulation", "effective"),
    [
        ({"training.effective_batch_size": 32}, 32, 32),
        ({"training.effective_batch_size": 33, "training.per_device_train_batch_size": 4}, 9, 36),
        ({"training.effective_batch_size": ..., "training.gradient_accumulation_steps": 5}, 5, 5),
        ({"training.effective_batch_size": ..., "training.per_device_train_batch_size": 3}, 1, 3),
    ],
)
def test_rollouts_per_step_defaults_to_the_derived_effective_batch_size(
    load, changes, accumulation, effective
):
    algebra = batch_algebra(load({**changes, "stage2_ab.channel_b.rollouts_per_step": ...}))
    assert (
        algebra.gradient_accumulation_steps,
        algebra.effective_batch_size,
        algebra.raw_rollouts_per_step,
    ) == (accumulation, effective, effective)


def test_the_algebra_reads_as_lines(load):
    assert batch_algebra(load({})).describe() == (
        "updates         100 = 20 channel A (20 of them warm-up) + 80 channel B, one per step",
        "channel-A step  32 samples = 1 per micro-step x 1 learner rank x 32 accumulation steps",
        "channel-B step  32 raw rollouts in 2 rounds (16 + 16); per learner rank 32",
        (
            "round           at most 18 rollouts over 3 actors of 1 device, at most 6 per device at"
            " a time; shares per actor 6+6+4 | 6+6+4"
        ),
        (
            "rows            packed to at most 2048 tokens, taken after every 8 rollouts and at the"
            " step's end"
        ),
    )


def test_a_run_without_rollouts_has_no_rounds(load):
    algebra = batch_algebra(
        load({"custom.trainer_variant": "stage1_sft", "training.packing": False})
    )
    assert (
        algebra.raw_rollouts_per_step,
        algebra.round_sizes,
        algebra.a_steps,
        algebra.b_steps,
    ) == (0, (), 100, 0)
    assert algebra.describe()[-1] == "rows            one segment each, of at most 2048 tokens"
    assert len(algebra.describe()) == 3


def test_a_warm_up_longer_than_the_run_leaves_channel_a_alone(load):
    algebra = batch_algebra(load({"training.max_steps": 10}))
    assert (algebra.warmup_steps, algebra.a_steps, algebra.b_steps) == (10, 10, 0)


ALIGNED = {
    "custom.trainer_variant": "stage2_rollout_aligned",
    "stage2_ab.schedule": ...,
    "stage2_ab.channel_b.rollouts_per_step": ...,
    "training.per_device_train_batch_size": 8,
}


def test_the_aligned_variant_takes_the_rollouts_of_its_micro_steps_and_one_row_after_each(load):
    algebra = batch_algebra(load(ALIGNED))
    assert (
        algebra.gradient_accumulation_steps,
        algebra.per_device_train_batch_size,
        algebra.raw_rollouts_per_step,
    ) == (4, 8, 32)
    assert (algebra.updates, algebra.warmup_steps, algebra.a_steps, algebra.b_steps) == (
        100,
        0,
        0,
        100,
    )
    assert (algebra.row_rule, algebra.packing_window) == (RowRule.CARRY, None)
    assert algebra.describe() == (
        "updates         100, one per step, all channel B",
        (
            "channel-B step  32 raw rollouts = 8 per micro-step x 1 learner rank x 4 accumulation"
            " steps, in 2 rounds (16 + 16); per learner rank 32"
        ),
        (
            "round           at most 18 rollouts over 3 actors of 1 device, at most 6 per device at"
            " a time; shares per actor 6+6+4 | 6+6+4"
        ),
        "rows            one per micro-step of at most 2048 tokens, leftovers carried",
    )


def test_without_packing_the_aligned_variant_has_a_row_per_segment(load):
    algebra = batch_algebra(
        load({**ALIGNED, "training.packing": False, "training.packing_drop_last": False})
    )
    assert algebra.row_rule is RowRule.SEGMENT
    assert algebra.describe()[-1] == "rows            one segment each, of at most 2048 tokens"


@pytest.mark.parametrize(
    ("wanted", "accumulation", "rollouts"), [(33, 5, 40), (8, 1, 8), (3, 1, 8), (..., 1, 8)]
)
def test_the_aligned_variant_rounds_its_raw_rollouts_up_to_whole_micro_steps(
    load, wanted, accumulation, rollouts
):
    algebra = batch_algebra(load({**ALIGNED, "training.effective_batch_size": wanted}))
    assert (
        algebra.gradient_accumulation_steps,
        algebra.effective_batch_size,
        algebra.raw_rollouts_per_step,
    ) == (accumulation, rollouts, rollouts)


def test_the_algebra_of_an_environment_counts_examples_and_keeps_their_rollouts_together(
    load_trajectories,
):
    """Three actors that decode 6 have room for 18, of which two examples of 8 fill 16; each rollout
    asks the actor of its position, again and again.
    """
    algebra = batch_algebra(load_trajectories({}))
    assert (algebra.group_size, algebra.chunk, algebra.round_sizes) == (8, 16, (16, 16))
    assert (algebra.a_steps, algebra.b_steps, algebra.warmup_steps, algebra.row_rule) == (
        0,
        100,
        0,
        RowRule.STEP,
    )
    assert algebra.describe() == (
        "updates         100, one per step, all channel B",
        (
            "channel-B step  32 raw rollouts = 4 examples x 8 rollouts, in 2 rounds (16 + 16); per"
            " learner rank 32"
        ),
        (
            "round           at most 16 rollouts over 3 actors of 1 device, at most 6 per device at"
            " a time; shares per actor 6+5+5 | 5+6+5"
        ),
        (
            "rows            packed to at most 2048 tokens, taken after every 8 segments and at the"
            " step's end"
        ),
    )


def test_a_step_of_one_example_is_one_round(load_trajectories):
    algebra = batch_algebra(
        load_trajectories(
            {"environment.rollouts_per_example": 32, "rollout_matching.decode_batch_size": 1}
        )
    )
    assert algebra.describe()[1:3] == (
        (
            "channel-B step  32 raw rollouts = 1 example x 32 rollouts, in 1 round (32); per"
            " learner rank 32"
        ),
        (
            "round           at most 32 rollouts over 3 actors of 1 device, at most 1 per device at"
            " a time; shares per actor 11+11+10"
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("size", "examples"), product((2, 5, 16), (4, 7, 12)))
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("decode_batch_size", [1, 6, 64])
@pytest.mark.parametrize("devices", [(1,), (1, 1, 1), (2, 2), (1, 4)])
def test_every_position_of_an_environment_is_learned_once_and_in_order_and_no_example_is_cut(
    load_trajectories, size, examples, ranks, decode_batch_size, devices
):
    """`devices` are as servers tell them, which may be of different sizes."""
    servers = {
        "servers": [
            {"base_url": f"http://server-{index}:8000", "group_port": 0}
            for index in range(len(devices))
        ]
    }
    asked = {
        "rollout_matching.vllm.mode": "server",
        "rollout_matching.vllm.server": servers,
        "rollout_matching.decode_batch_size": decode_batch_size,
    }
    batch = {
        "environment.rollouts_per_example": size,
        "stage2_ab.channel_b.rollouts_per_step": size * examples,
        "learner.world_size": ranks,
    }
    run = load_trajectories({**asked, **batch})
    if decode_batch_size * sum(devices) < ranks:
        with pytest.raises(ValueError, match="decode_batch_size"):
            batch_algebra(run, devices)
        return
    algebra = batch_algebra(run, devices)
    for rank in range(ranks):
        assert [i for round_ in algebra.rounds for i in round_[rank]] == list(
            rank_share(size * examples, ranks, rank, together=size)
        )
    parts = [part for round_ in algebra.rounds for part in round_]
    assert sorted(i for part in parts for i in part) == list(range(size * examples))
    assert all(part.start % size == part.stop % size == 0 for part in parts)
    assert all(len(part) <= algebra.chunk for part in parts)
    assert algebra.chunk * ranks <= max(decode_batch_size * sum(devices), size * ranks)
    for round_, shares in zip(algebra.rounds, algebra.shares, strict=True):
        engines = [i % len(devices) for part in round_ for i in part]
        assert list(shares) == [engines.count(engine) for engine in range(len(devices))]


@pytest.mark.parametrize(
    "changes",
    [{}, {"custom.trainer_variant": "stage1_sft"}, {"stage2_ab.schedule.b_ratio": 0.29}, ALIGNED],
)
def test_the_algebra_counts_the_channels_that_the_steps_have(load, changes):
    run = load(changes)
    channels = [run.channel(step) for step in range(run.training.max_steps)]
    algebra = batch_algebra(run)
    assert (algebra.a_steps, algebra.b_steps) == (
        channels.count(Channel.A),
        channels.count(Channel.B),
    )
    assert channels[: algebra.warmup_steps] == [Channel.A] * algebra.warmup_steps


@pytest.mark.parametrize(
    ("changes", "place", "servers"),
    [
        ({"rollout_matching.rollout_backend": "hf"}, EngineLocation.RANKS, 0),
        ({"rollout_matching.vllm.mode": "colocate"}, EngineLocation.RANKS, 0),
        ({"rollout_matching.vllm.mode": "actors"}, EngineLocation.ACTORS, 0),
        ({"rollout_matching.vllm.mode": "server"}, EngineLocation.SERVERS, 1),
    ],
)
def test_rollouts_are_generated_in_the_ranks_by_actors_or_by_servers_and_only_these_are_the_runs_servers(
    load, changes, place, servers
):
    listed = {
        "rollout_matching.vllm.server": {
            "servers": [{"base_url": "http://a:8000", "group_port": 0}]
        }
    }
    run = load(
        {
            "stage2_ab.channel_b.enable_pipeline": False,
            **({} if place is EngineLocation.ACTORS else listed),
            **changes,
        }
    )
    assert engines_in(run) is place
    section = rollout_servers(run)
    assert (0 if section is None else len(section.servers)) == servers


@pytest.mark.parametrize(
    ("ranks", "parallel", "sharded"), [(1, "fsdp", False), (2, "ddp", False), (2, "fsdp", True)]
)
def test_a_model_is_sharded_over_several_ranks_under_fsdp_alone(load, ranks, parallel, sharded):
    assert is_sharded(load({"learner.world_size": ranks, "learner.parallel": parallel})) == sharded


def test_servers_that_are_left_in_the_file_beside_a_learner_that_generates_itself_are_remarked_on(
    load,
):
    """The messages about a server that fails say to switch to one of the two: it is one key."""
    listed = {
        "rollout_matching.vllm.server": {
            "servers": [{"base_url": "http://a:8000", "group_port": 0}]
        },
        "stage2_ab.channel_b.enable_pipeline": False,
    }
    assert remarks(load({**listed, "rollout_matching.vllm.mode": "server"})) == ()
    for switched in (
        {"rollout_matching.vllm.mode": "colocate"},
        {"rollout_matching.vllm.mode": "server", "rollout_matching.rollout_backend": "hf"},
    ):
        (remark,) = remarks(load({**listed, **switched}))
        assert remark.startswith(
            "rollout_matching.vllm.server: no effect, because the learner generates itself; "
        )


def test_offload_where_nothing_shares_the_learners_device_is_remarked_on_and_not_refused(load):
    beside = {
        "rollout_matching.offload.enabled": True,
        "stage2_ab.channel_b.enable_pipeline": False,
    }
    assert remarks(load({**beside, "rollout_matching.vllm.mode": "colocate"})) == ()
    for elsewhere in (
        {"rollout_matching.vllm.mode": "actors"},
        {"rollout_matching.rollout_backend": "hf", "rollout_matching.vllm.mode": "colocate"},
    ):
        (remark,) = remarks(load({**beside, **elsewhere}))
        assert remark.startswith(
            "rollout_matching.offload: no effect, because nothing shares the learner's device; "
        )


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ({}, (True, True)),
        ({"offload_model": True}, (True, False)),
        ({"offload_optimizer": True}, (False, True)),
        ({"enabled": False}, (False, False)),
    ],
)
def test_offload_alone_moves_model_and_optimizer(load, given, moved):
    offload = load({"rollout_matching.offload": {"enabled": True} | given}).rollout_matching.offload
    assert (offload.moves_model, offload.moves_optimizer) == moved


@pytest.mark.parametrize("backend", ["vllm", "hf"])
def test_a_temperature_below_vllms_lowest_is_sampled_at_that_in_every_backend_and_remarked_on(
    load, backend
):
    run = load(
        {
            "rollout_matching.decoding.temperature": 0.004,
            "rollout_matching.rollout_backend": backend,
            "stage2_ab.channel_b.enable_pipeline": False,
        }
    )
    decode = run.rollout_matching.decode_settings(stop_token_ids=(1,), banned_token_ids=())
    assert (decode.mode, decode.temperature) == (DecodeMode.SAMPLE, 0.01)
    assert remarks(run) == (
        "rollout_matching.decoding.temperature: 0.004 is sampled at 0.01, vLLM's lowest",
    )


def test_a_learning_rate_that_only_rises_is_remarked_on_and_not_refused(load):
    assert remarks(load({"training.max_steps": 100, "training.lr_warmup_steps": 99})) == ()
    (remark,) = remarks(load({"training.max_steps": 100, "training.lr_warmup_steps": 100}))
    assert (
        remark
        == "training.lr_warmup_steps: 100 of 100 steps, so the learning rate only rises and the"
        " schedule after it never comes"
    )
