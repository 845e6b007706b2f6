"""Sizes and places that follow from the configuration: the batch algebra, engines, remarks."""

from __future__ import annotations

from itertools import product

import pytest
from config_changes import (
    ALIGNED,
    BUDGET,
    COLOCATE,
    HF,
    MATCHING,
    SERVER,
    SERVERS,
    STAGE1,
    TEMPERATURE,
    VLLM,
    load,
    load_trajectories,
)

from launch.processes.batch_algebra import batch_algebra
from shared.chunking import rank_share
from shared.config.derive import remarks
from shared.config.pipeline import Channel
from shared.config.rollout import EngineLocation
from shared.config.run import RowRule
from shared.rollouts import DecodeMode

ACTORS = f"{VLLM}.actors"
DECODED = f"{MATCHING}.decode_batch_size"
BATCH = "training.effective_batch_size"
PER_DEVICE = "training.per_device_train_batch_size"
ALIGNED_BY_8 = {**ALIGNED, PER_DEVICE: 8}

UPDATES_B = "updates         100, one per step, all channel B"
ROUND = (
    "round           at most {} rollouts over 3 actors of 1 device, at most {} per device at a time;"
    " shares per actor {}"
)
ONE_ROW_EACH = "rows            one segment each, of at most 2048 tokens"
PACKED = (
    "rows            packed to at most 2048 tokens, taken after every 8 {} and at the step's end"
)


def steps_of(algebra):
    return algebra.updates, algebra.warmup_steps, algebra.a_steps, algebra.b_steps


def test_32_rollouts_on_three_actors_that_decode_6_are_two_rounds_of_16():
    algebra = batch_algebra(load({}))
    assert (algebra.raw_rollouts_per_step, algebra.round_capacity) == (32, 18)
    assert (algebra.round_sizes, algebra.share_per_rank) == ((16, 16), (32,))
    assert algebra.shares == ((6, 6, 4), (6, 6, 4))
    assert steps_of(algebra) == (100, 20, 20, 80)
    assert (algebra.packing_length, algebra.packing_window) == (2048, 8)
    assert algebra.describe() == (
        "updates         100 = 20 channel A (20 of them warm-up) + 80 channel B, one per step",
        "channel-A step  32 samples = 1 per micro-step x 1 learner rank x 32 accumulation steps",
        "channel-B step  32 raw rollouts in 2 rounds (16 + 16); per learner rank 32",
        ROUND.format(18, 6, "6+6+4 | 6+6+4"),
        PACKED.format("rollouts"),
    )


def test_the_positions_of_a_round_are_contiguous_within_each_rank_s_share_of_the_step():
    algebra = batch_algebra(load({"learner.world_size": 2, BUDGET: 33}))
    assert algebra.rounds == ((range(9), range(17, 25)), (range(9, 17), range(25, 33)))


@pytest.mark.parametrize("num_actors", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_no_device_decodes_more_than_decode_batch_size_and_every_rollout_is_generated_once(
    num_actors, tensor_parallel_size
):
    actors = {"num_actors": num_actors, "tensor_parallel_size": tensor_parallel_size}
    for decode_batch_size, rollouts in product((1, 5, 6, 64), (1, 7, 32, 33)):
        run = load({ACTORS: actors, DECODED: decode_batch_size, BUDGET: rollouts})
        algebra = batch_algebra(run)
        assert sum(algebra.round_sizes) == sum(algebra.share_per_rank) == rollouts
        assert [sum(shares) for shares in algebra.shares] == list(algebra.round_sizes)
        for shares in algebra.shares:
            assert len(shares) == num_actors
            assert max(shares) <= decode_batch_size * tensor_parallel_size


@pytest.mark.parametrize(
    ("changes", "accumulation", "effective"),
    [
        ({BATCH: 32}, 32, 32),
        ({BATCH: 33, PER_DEVICE: 4}, 9, 36),
        ({BATCH: ..., "training.gradient_accumulation_steps": 5}, 5, 5),
        ({BATCH: ..., PER_DEVICE: 3}, 1, 3),
        # The aligned variant rounds its raw rollouts up to whole micro-steps.
        ({**ALIGNED_BY_8, BATCH: 33}, 5, 40),
        ({**ALIGNED_BY_8, BATCH: 8}, 1, 8),
        ({**ALIGNED_BY_8, BATCH: 3}, 1, 8),
        ({**ALIGNED_BY_8, BATCH: ...}, 1, 8),
    ],
)
def test_rollouts_per_step_defaults_to_the_derived_effective_batch_size(
    changes, accumulation, effective
):
    algebra = batch_algebra(load({**changes, "stage2_ab": ...}))
    assert algebra.gradient_accumulation_steps == accumulation
    assert algebra.effective_batch_size == algebra.raw_rollouts_per_step == effective


def test_a_run_without_rollouts_has_no_rounds():
    algebra = batch_algebra(load({**STAGE1, "training.packing": False}))
    assert (algebra.raw_rollouts_per_step, algebra.round_sizes) == (0, ())
    assert steps_of(algebra) == (100, 0, 100, 0)
    assert algebra.describe()[-1] == ONE_ROW_EACH
    assert len(algebra.describe()) == 3


def test_the_aligned_variant_takes_the_rollouts_of_its_micro_steps_and_one_row_after_each():
    algebra = batch_algebra(load(ALIGNED_BY_8))
    assert (algebra.gradient_accumulation_steps, algebra.per_device_train_batch_size) == (4, 8)
    assert algebra.raw_rollouts_per_step == 32
    assert steps_of(algebra) == (100, 0, 0, 100)
    assert (algebra.row_rule, algebra.packing_window) == (RowRule.CARRY, None)
    assert algebra.describe() == (
        UPDATES_B,
        (
            "channel-B step  32 raw rollouts = 8 per micro-step x 1 learner rank x 4 accumulation"
            " steps, in 2 rounds (16 + 16); per learner rank 32"
        ),
        ROUND.format(18, 6, "6+6+4 | 6+6+4"),
        "rows            one per micro-step of at most 2048 tokens, leftovers carried",
    )
    unpacked = {**ALIGNED_BY_8, "training.packing": False, "training.packing_drop_last": False}
    algebra = batch_algebra(load(unpacked))
    assert (algebra.row_rule, algebra.describe()[-1]) == (RowRule.SEGMENT, ONE_ROW_EACH)


def test_the_algebra_of_an_environment_counts_examples_and_keeps_their_rollouts_together():
    """Three actors that decode 6 have room for 18, of which two examples of 8 fill 16; each rollout
    asks the actor of its position, again and again.
    """
    algebra = batch_algebra(load_trajectories({}))
    assert (algebra.group_size, algebra.chunk, algebra.round_sizes) == (8, 16, (16, 16))
    assert (steps_of(algebra), algebra.row_rule) == ((100, 0, 0, 100), RowRule.STEP)
    assert algebra.describe() == (
        UPDATES_B,
        (
            "channel-B step  32 raw rollouts = 4 examples x 8 rollouts, in 2 rounds (16 + 16); per"
            " learner rank 32"
        ),
        ROUND.format(16, 6, "6+5+5 | 5+6+5"),
        PACKED.format("segments"),
    )
    of_one_example = load_trajectories({"environment.rollouts_per_example": 32, DECODED: 1})
    assert batch_algebra(of_one_example).describe()[1:3] == (
        (
            "channel-B step  32 raw rollouts = 1 example x 32 rollouts, in 1 round (32); per learner"
            " rank 32"
        ),
        ROUND.format(32, 1, "11+11+10"),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("size", "examples"), product((2, 5, 16), (4, 7, 12)))
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("decode_batch_size", [1, 6, 64])
@pytest.mark.parametrize("devices", [(1,), (1, 1, 1), (2, 2), (1, 4)])
def test_every_position_of_an_environment_is_learned_once_and_in_order_and_no_example_is_cut(
    size, examples, ranks, decode_batch_size, devices
):
    """`devices` are as servers tell them, which may be of different sizes."""
    servers = [SERVER | {"base_url": f"http://server-{i}:8000"} for i in range(len(devices))]
    run = load_trajectories(
        {
            **SERVERS,
            f"{VLLM}.server.servers": servers,
            DECODED: decode_batch_size,
            "environment.rollouts_per_example": size,
            BUDGET: size * examples,
            "learner.world_size": ranks,
        }
    )
    if decode_batch_size * sum(devices) < ranks:
        with pytest.raises(ValueError, match="decode_batch_size"):
            batch_algebra(run, devices)
        return
    algebra = batch_algebra(run, devices)
    for rank in range(ranks):
        learned = [i for round_ in algebra.rounds for i in round_[rank]]
        assert learned == list(rank_share(size * examples, ranks, rank, together=size))
    parts = [part for round_ in algebra.rounds for part in round_]
    assert sorted(i for part in parts for i in part) == list(range(size * examples))
    assert all(part.start % size == part.stop % size == 0 for part in parts)
    assert all(len(part) <= algebra.chunk for part in parts)
    assert algebra.chunk * ranks <= max(decode_batch_size * sum(devices), size * ranks)
    for round_, shares in zip(algebra.rounds, algebra.shares, strict=True):
        engines = [i % len(devices) for part in round_ for i in part]
        assert list(shares) == [engines.count(engine) for engine in range(len(devices))]


@pytest.mark.parametrize("changes", [{}, STAGE1, {"stage2_ab.schedule.b_ratio": 0.29}, ALIGNED])
def test_the_algebra_counts_the_channels_that_the_steps_have(changes):
    run = load(changes)
    channels = [run.channel(step) for step in range(run.training.max_steps)]
    algebra = batch_algebra(run)
    assert algebra.a_steps == channels.count(Channel.A)
    assert algebra.b_steps == channels.count(Channel.B)
    assert channels[: algebra.warmup_steps] == [Channel.A] * algebra.warmup_steps


@pytest.mark.parametrize(
    ("changes", "location", "has_servers"),
    [
        ({**SERVERS, **HF}, EngineLocation.RANKS, False),
        ({**SERVERS, **COLOCATE}, EngineLocation.RANKS, False),
        ({}, EngineLocation.ACTORS, False),
        (SERVERS, EngineLocation.SERVERS, True),
    ],
)
def test_rollouts_are_generated_in_the_ranks_by_actors_or_by_servers_and_only_these_are_the_runs_servers(
    changes, location, has_servers
):
    run = load(changes)
    assert run.rollout_matching.backend.location is location
    assert (run.rollout_matching.servers is not None) == has_servers


@pytest.mark.parametrize(
    ("offload", "moved"),
    [
        ({}, (True, True)),
        ({"offload_model": True}, (True, False)),
        ({"offload_optimizer": True}, (False, True)),
        ({"enabled": False}, (False, False)),
    ],
)
def test_offload_alone_moves_model_and_optimizer(offload, moved):
    run = load({f"{MATCHING}.offload": {"enabled": True} | offload})
    section = run.rollout_matching.offload
    assert (section.moves_model, section.moves_optimizer) == moved


@pytest.mark.parametrize("backend", [{}, HF])
def test_a_temperature_below_vllms_lowest_is_sampled_at_that_in_every_backend_and_remarked_on(
    backend,
):
    run = load({**backend, TEMPERATURE: 0.004})
    decode = run.rollout_matching.decode_settings(stop_token_ids=(1,), banned_token_ids=())
    assert (decode.mode, decode.temperature) == (DecodeMode.SAMPLE, 0.01)
    (remark,) = remarks(run)
    assert remark.startswith(f"{TEMPERATURE}: 0.004 ") and " 0.01" in remark


def test_the_gate_moves_linearly_behind_the_warm_up_by_the_steps_number_alone():
    gate = f"{MATCHING}.maskiou_gate"
    schedule = {f"{gate}_schedule": {"start": 0.1, "steps": 4}, gate: 0.5}
    for variant, first in (({"stage2_ab.schedule.warmup_steps": 2}, 2), (ALIGNED, 0)):
        run = load({**variant, "training.max_steps": 20, **schedule})
        expected = [0.1] * first + [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5]
        assert [run.maskiou_gate(step) for step in range(first + 7)] == pytest.approx(expected)
        assert run.maskiou_gate(19) == 0.5
    assert load({gate: 0.25}).maskiou_gate(0) == 0.25
