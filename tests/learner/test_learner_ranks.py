"""Several ranks learn what one rank learns (spec: raw rollouts over all train ranks; decisions 6, 7
and 10; decision 38).

The tolerance: weights of one rank and of two differ by at most 1e-6 after three updates of up to
1e-3 each, gradient norms by a 1e-5th, losses by 1e-5. Float sums over other rows are all that
differs.
"""

import json
import re
import shutil
from collections import Counter

import pytest
import rank_jobs
import torch
from rank_support import RankProcesses, assert_same_updates, merged
from safetensors.torch import load_file, save_file

from learner.model.ranks import RankTopology, ReceiverGroup
from learner.rollout_logs.samples import read_step
from learner.rollout_logs.writer import step_path
from shared.config.pipeline import Channel
from shared.errors import CollectiveError, ConfigError, LearnerError, RolloutError
from shared.weight_sync.offer import CANARY, CHECKSUMS

pytestmark = pytest.mark.processes

ALONE = RankTopology("rollmatch_gloo", (ReceiverGroup(1),))
STEPS, CHUNK = 3, 4
FSDP = {"learner__world_size": 2, "learner__parallel": "fsdp"}
DDP = {"learner__world_size": 2}
BUCKETS = {"rollout_matching__vllm__sync__bucket_bytes": 200_000}


def timeless(reports):
    return [
        {name: value for name, value in report.totals.as_dict().items() if "time/" not in name}
        for report in reports
    ]


def assert_learned(alone, config):
    assert any(
        (weight - alone.weights[name]).abs().max() > 1e-4
        for name, weight in rank_jobs.learn(ALONE, None, config, 0, CHUNK).weights.items()
    )


@pytest.fixture(scope="module")
def alone(rank_config):
    return rank_jobs.learn(ALONE, None, rank_config(), STEPS, CHUNK)


@pytest.fixture(scope="module")
def ddp_config(rank_config):
    return rank_config(**DDP)


@pytest.fixture(scope="module")
def ddp(two_ranks, ddp_config):
    return two_ranks.run(rank_jobs.learn, ddp_config, STEPS, CHUNK // 2)


@pytest.fixture(scope="module")
def fsdp(two_ranks, rank_config):
    return two_ranks.run(rank_jobs.learn, rank_config(**FSDP), STEPS, CHUNK // 2)


def test_two_ranks_take_the_updates_that_one_takes_on_both_channels(alone, ddp, rank_config):
    assert [report.channel for report in merged(ddp)] == [Channel.A, Channel.B, Channel.B]
    assert_same_updates(alone, ddp)
    assert_learned(alone, rank_config())


def test_each_rank_has_its_share_of_the_samples_that_one_rank_draws(alone, ddp):
    """Scenario: `rollouts_per_step` are collected globally; the deterministic shares add up to
    it."""
    assert [rank.positions for rank in ddp] == [
        [[0, 1, 2, 3, 4, 5]] * 3,
        [[6, 7, 8, 9, 10, 11], [6, 7, 8, 9, 10], [6, 7, 8, 9, 10]],
    ]
    for step in range(STEPS):
        assert [
            sample_id for rank in ddp for sample_id in rank.sample_ids[step]
        ] == alone.sample_ids[step]


def test_ranks_may_have_rows_of_different_number_or_none_at_all(two_ranks, rank_config):
    """One rollout a step: rank 1 has requests of no step, and rows in channel A alone. Without
    packing a segment is a row.
    """
    config = {
        "stage2_ab__channel_b__rollouts_per_step": 1,
        "training__effective_batch_size": 4,
        "training__packing": False,
    }
    alone = rank_jobs.learn(ALONE, None, rank_config(**config), STEPS, 1)
    for parallel in (DDP, FSDP):
        ranks = two_ranks.run(rank_jobs.learn, rank_config(**config, **parallel), STEPS, 1)
        assert [[len(step) for step in rank.positions] for rank in ranks] == [[2, 1, 1], [2, 0, 0]]
        assert_same_updates(alone, ranks)


CARRY = {
    "custom__trainer_variant": "stage2_rollout_aligned",
    "stage2_ab__schedule__warmup_steps": 0,
    "stage2_ab__channel_b__rollouts_per_step": None,
    "training__effective_batch_size": 8,
    "training__packing_buffer": 12,
}


def test_carrying_two_ranks_divide_by_the_segments_of_both(two_ranks, rank_config):
    carry = CARRY | {"global_max_length": 4096}
    alone = rank_jobs.learn(
        ALONE, None, rank_config(**carry, training__per_device_train_batch_size=4), 2, 4
    )
    for parallel in (DDP, FSDP):
        ranks = two_ranks.run(
            rank_jobs.learn,
            rank_config(**carry, training__per_device_train_batch_size=2, **parallel),
            2,
            2,
        )
        assert [report.metrics["packing/num_segments"] for report in merged(ranks)] == [8, 8], (
            "rows that take everything, so that both learn the same"
        )
        assert_same_updates(alone, ranks)


# fsdp


def test_sharded_ranks_take_the_updates_that_one_takes(alone, fsdp):
    assert_same_updates(alone, fsdp)


def test_sharded_ranks_compute_equally_many_rows_however_many_each_has(two_ranks, rank_config):
    ranks = two_ranks.run(rank_jobs.learn, rank_config(**FSDP, training__packing=False), STEPS, 3)
    assert [
        sum(report.totals.as_dict()["packing/num_rows"] for report in rank.reports)
        for rank in ranks
    ] == [18, 16]
    assert ranks[0].num_rows == ranks[1].num_rows == 18, (
        "rank 1 computed rows of zero weight beside the others"
    )
    ones = rank_jobs.learn(ALONE, None, rank_config(training__packing=False), STEPS, 6)
    assert_same_updates(ones, ranks)


# Several copies of shards


FOUR = {"learner__world_size": 4, "learner__parallel": "fsdp"}
TWO_COPIES = {**FOUR, "learner__shard_size": 2}
FOUR_DDP = {"learner__world_size": 4}


@pytest.fixture(scope="module")
def four_ranks():
    processes = RankProcesses(4)
    yield processes
    processes.close()


def test_two_copies_of_two_shards_take_the_updates_of_one_rank_and_of_four_shards(
    alone, four_ranks, rank_config
):
    copies, shards = (
        four_ranks.run(rank_jobs.learn, rank_config(**config), STEPS, 1)
        for config in (TWO_COPIES, FOUR)
    )
    assert_same_updates(alone, copies)
    assert_same_updates(alone, shards)
    for name, weight in shards[0].weights.items():
        torch.testing.assert_close(copies[0].weights[name], weight, rtol=0, atol=1e-6)


def test_copies_learn_different_rows_at_the_same_time(four_ranks, rank_config):
    """Channel A has 3 rows for each rank; on channel B rank 0 has the only rollout, and both ranks
    of the other copy learn nothing.
    """
    config = {"training__packing": False, "stage2_ab__channel_b__rollouts_per_step": 1}
    alone = rank_jobs.learn(ALONE, None, rank_config(**config), STEPS, 1)
    ranks = four_ranks.run(rank_jobs.learn, rank_config(**config, **TWO_COPIES), STEPS, 1)
    assert [rank.num_rows for rank in ranks] == [3 + 1 + 1, 3 + 1 + 1, 3, 3]
    assert_same_updates(alone, ranks)


def test_copies_sync_and_save_what_one_rank_does(four_ranks, rank_config, synced_alone, tmp_path):
    ranks = four_ranks.run(
        rank_jobs.sync_and_save, rank_config(**TWO_COPIES), tmp_path / "checkpoint"
    )
    assert [rank.offer is not None for rank in ranks] == [True, False, False, False]
    assert all(rank.logprobs == pytest.approx(synced_alone.logprobs, abs=1e-5) for rank in ranks)
    for sent, expected in ((ranks[0].weights, synced_alone), (ranks[3].saved, synced_alone)):
        for name, tensor in sent.items():
            assert torch.equal(tensor, expected.saved[name])
    assert ranks[0].weights.keys() == synced_alone.weights.keys()


@pytest.mark.parametrize("then", [TWO_COPIES, FOUR, FOUR_DDP], ids=["same", "fsdp", "ddp"])
def test_copies_are_resumed_also_with_shards_of_another_size(then, resumable_copies, four_ranks):
    whole, make, checkpoint = resumable_copies
    rest = four_ranks.run(rank_jobs.learn, make(then, resume={"run": str(checkpoint)}), STEPS, 1)
    assert [report.step for report in rest[0].reports] == [2]
    for name, weight in whole[0].weights.items():
        # The rounding of sums is the only difference; with the same shards there is none.
        tolerance = 0 if then is TWO_COPIES else 1e-6
        torch.testing.assert_close(rest[0].weights[name], weight, rtol=0, atol=tolerance)
    files = sorted(path.name for path in (checkpoint / "run_state").glob("*.safetensors"))
    assert files == ["rank_0.safetensors", "rank_1.safetensors"], "of one copy"


@pytest.fixture(scope="module")
def resumable_copies(four_ranks, rank_config):
    """A run of copies that saved after its second step, and what makes its configurations."""

    def make(settings, **more):
        return rank_config(**settings, **more, training__parts={"aligner": {"frozen": True}})

    saved = make(TWO_COPIES)
    checkpoint = saved.telemetry.run_dir / "checkpoint"
    whole = four_ranks.run(rank_jobs.learn, saved, STEPS, 1, None, {2: checkpoint})
    return whole, make, checkpoint


def test_another_frozen_weight_is_refused_also_with_shards_of_another_size(
    resumable_copies, four_ranks, demo_checkpoint, tmp_path
):
    _, make, checkpoint = resumable_copies
    other = shutil.copytree(demo_checkpoint, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.visual.merger.norm.weight"][-1] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    config = make(FOUR, resume={"run": str(checkpoint)}, model__path=str(other))
    for error in four_ranks.outcomes(rank_jobs.learn, config, STEPS, 1):
        assert type(error) is ConfigError
        assert re.search(r"^model\.path: its contents have changed since", str(error))


def test_copies_that_drifted_apart_stop_at_the_next_sync(four_ranks, rank_config):
    """Rank 1's part differs from rank 3's in one bit; no rank waits for the ranks that noticed."""
    for error in four_ranks.outcomes(rank_jobs.drifts, rank_config(**TWO_COPIES)):
        assert type(error) is LearnerError
        assert "model.language_model.layers.1.mlp.up_proj.weight" in str(error)


def test_shards_with_compiled_blocks_take_the_updates_that_one_rank_takes(
    alone, two_ranks, rank_config
):
    recomputed = {"model__gradient_checkpointing": True}
    config = rank_config(**FSDP, **recomputed, model__compile_blocks=True)
    assert_same_updates(alone, two_ranks.run(rank_jobs.learn_traced, config, STEPS, CHUNK // 2))


@pytest.mark.parametrize("head_dtype", ["model", "float32"])
def test_in_bfloat16_sharded_ranks_keep_float32_masters_and_send_bfloat16(
    two_ranks, rank_config, tmp_path, head_dtype
):
    config = {"model__dtype": "bfloat16", "model__head_dtype": head_dtype}
    alone = rank_jobs.learn(ALONE, None, rank_config(**config), 2, CHUNK)
    ranks = two_ranks.run(rank_jobs.learn, rank_config(**config, **FSDP), 2, CHUNK // 2)
    for one, several in zip(merged([alone]), merged(ranks), strict=True):
        # Rows of other lengths round otherwise in their 8 bits.
        assert several.metrics["loss/total"] == pytest.approx(one.metrics["loss/total"], rel=2e-2)
    first, _ = two_ranks.run(
        rank_jobs.sync_and_save, rank_config(**config, **FSDP), tmp_path / "checkpoint"
    )
    assert {tensor.dtype for tensor in first.weights.values()} == {torch.bfloat16}
    assert all(torch.equal(first.saved[name], tensor) for name, tensor in first.weights.items())
    assert first.dtypes == {"bfloat16"}, "config.json says what the tensors are"


# Weights of several ranks


@pytest.fixture(scope="module")
def synced_alone(rank_config, tmp_path_factory):
    return rank_jobs.sync_and_save(
        ALONE, None, rank_config(), tmp_path_factory.mktemp("alone") / "checkpoint"
    )


@pytest.fixture(scope="module", params=[DDP, FSDP], ids=["ddp", "fsdp"])
def synced(request, two_ranks, rank_config, tmp_path_factory):
    return two_ranks.run(
        rank_jobs.sync_and_save,
        rank_config(**request.param),
        tmp_path_factory.mktemp("ranks") / "checkpoint",
    )


def test_rank_0_alone_offers_and_every_rank_raises_its_version_when_the_sync_is_done(
    synced, synced_alone
):
    first, second = synced
    assert (first.versions, second.versions) == ([0, 0, 1], [0, 0, 1])
    assert second.offer is None
    assert first.offer.version == 1
    assert first.logprobs == pytest.approx(synced_alone.logprobs, abs=1e-5)
    assert first.offer.terms.tensors == synced_alone.offer.terms.tensors
    assert list(first.weights) == list(synced_alone.weights)
    assert all(
        torch.equal(tensor, synced_alone.weights[name]) for name, tensor in first.weights.items()
    )


def test_a_checkpoint_of_several_ranks_loads_as_one_of_one_rank_does(synced, synced_alone):
    for rank in synced:
        assert rank.tied
        assert rank.saved.keys() == synced_alone.saved.keys()
        assert all(
            torch.equal(tensor, synced_alone.saved[name]) for name, tensor in rank.saved.items()
        )


def test_held_out_requests_are_shared_out_in_rank_order(synced):
    first, second = synced
    assert (first.held_out, second.held_out) == (list(range(8)), list(range(8, 16)))


@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_ranks_send_what_they_hold_together_also_after_a_send_that_failed(
    two_ranks, rank_config, parallel
):
    """Shards are gathered tensor by tensor while they are sent, by both ranks in the same order."""
    first, second = two_ranks.run(rank_jobs.send, rank_config(**parallel, **BUCKETS))
    assert re.search("rendezvous on learner", str(first.error))
    assert second.error is None
    for name, weight in first.weights.items():
        assert torch.equal(first.arrived.pop(name), weight)
        assert torch.equal(second.weights[name], weight)
    assert set(first.arrived) <= {CHECKSUMS, CANARY}
    assert first.report.phase_s["send_gather"] > 0
    assert second.report.phase_s == {}


# Errors


def test_ranks_that_drifted_apart_stop_at_the_next_sync_and_name_the_parameter(
    two_ranks, ddp_config
):
    for rank, error in enumerate(two_ranks.outcomes(rank_jobs.drifts, ddp_config)):
        assert type(error) is LearnerError
        assert re.search(rf"rank {rank} of 2: .* same weights", str(error))
        assert "model.language_model.layers.1.mlp.up_proj.weight" in str(error)


def test_an_error_on_one_rank_ends_all_of_them_within_the_timeout_with_that_ranks_message(
    two_ranks, rank_config
):
    config = rank_config(**DDP, timeouts__learn_s=300.0)
    waiting, failed = two_ranks.outcomes(rank_jobs.fails_on_rank_1, config, 1.0)
    assert type(failed) is RolloutError
    assert "the prompts differ first at token 0" in str(failed)
    assert type(waiting) is CollectiveError
    told = (
        "rank 0 of 2: another rank did not answer within timeouts.learn_s = 1 s, or its connection"
        " broke; look at the first error of the other ranks"
    )
    assert told in str(waiting)


def test_ranks_that_read_other_data_do_not_start(
    two_ranks, rank_config, ddp_config, demo_data, tmp_path
):
    other_data = rank_config(**DDP, data__train=str(demo_data / "val.jsonl"))
    boxes = rank_config(
        **DDP, data__train=str(with_another_box(demo_data, tmp_path / "train.jsonl"))
    )
    for other in (other_data, boxes):
        for error in two_ranks.outcomes(rank_jobs.own_config, [ddp_config, other]):
            assert type(error) is ConfigError
            assert re.search(r"data\.train: .* different samples", str(error))


IN_THE_ROUND = {"training__packing": False}
"""Rows are learned as soon as a round's rollouts are there, so the ranks meet in the round."""
AT_THE_END = {"training__packing_window": 100}
"""Rows are learned when the step's rollouts are all there, so the ranks meet at its end."""


@pytest.mark.parametrize(
    ("parallel", "damage", "rows"),
    [
        (FSDP, "prompt_token_ids", IN_THE_ROUND),
        (FSDP, "logprobs", IN_THE_ROUND),
        (FSDP, "logprobs", AT_THE_END),
        (DDP, "logprobs", AT_THE_END),
    ],
)
def test_a_rank_that_finds_its_rollouts_wrong_frees_the_others_at_once_and_the_weights_can_be_saved(
    two_ranks, rank_config, parallel, damage, rows, tmp_path
):
    """Which is not waited for as long as for a rank that does not answer (`RankProcesses`)."""
    waiting, failed = two_ranks.outcomes(
        rank_jobs.fails_and_saves,
        rank_config(**parallel, **rows, timeouts__learn_s=3600.0),
        damage,
        rows is AT_THE_END,
        tmp_path / "checkpoint",
    )
    assert (type(waiting), type(failed)) == (CollectiveError, RolloutError)
    assert (tmp_path / "checkpoint" / "model.safetensors").exists()


@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_a_save_that_the_disk_refuses_one_rank_fails_on_all_and_can_be_tried_again(
    two_ranks, rank_config, parallel, tmp_path
):
    refusals = {
        "learner.model.checkpoint.CheckpointContent.write_weights": 0,
        "learner.run_state.Path.write_bytes": 1,
        "learner.saving.missing_parts": 0,
        "learner.model.checkpoint_save.flush": 0,
    }
    folder = tmp_path / "run" / "checkpoint"
    folder.parent.mkdir()
    config = rank_config(**parallel, timeouts__learn_s=100.0)
    first, last = two_ranks.run(rank_jobs.refused_then_saves, config, refusals, folder)
    full, other = "StorageError", "CollectiveError"
    assert first == [full, other, full, full, other], "and nothing is left of an attempt"
    assert last == [other, full, other, other, full]
    assert (folder / "run_state" / "run.json").exists()


def test_ranks_on_several_nodes_copy_where_all_on_one_node_have_no_room(
    two_ranks, rank_config, tmp_path
):
    """Rank 0 copies the model and its half of the masters, rank 1 the other half."""
    config = rank_config(**FSDP)
    folder = tmp_path / "checkpoint"
    for rank in two_ranks.run(rank_jobs.copies_on, config, [[1, 1], [1, 2]], folder):
        on_one_node, on_two = rank
        assert "of a node's host memory" in on_one_node
        assert on_two is None


def with_another_box(demo_data, path):
    """The same samples under the same ids, but for one coordinate of one object."""
    rows = [json.loads(line) for line in (demo_data / "train.jsonl").read_text().splitlines()]
    for row in rows:
        row["images"] = [str(demo_data / image) for image in row["images"]]
    rows[-1]["objects"][0]["bbox_2d"][2] += 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_ranks_of_another_model_do_not_start_and_their_weights_are_compared_to_the_last_element(
    two_ranks, rank_config, demo_checkpoint, tmp_path, parallel
):
    other = tmp_path / "other"
    shutil.copytree(demo_checkpoint, other)
    weights = load_file(other / "model.safetensors")
    weights["model.language_model.embed_tokens.weight"][-1, -1] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    for error in two_ranks.outcomes(
        rank_jobs.own_config,
        [rank_config(**parallel), rank_config(**parallel, model__path=str(other))],
    ):
        assert type(error) is LearnerError
        message = r"model\.language_model\.embed_tokens\.weight\. .*model\.path .*every node"
        assert re.search(message, str(error))


def test_ranks_that_shard_files_with_other_tensors_do_not_start(
    two_ranks, rank_config, demo_checkpoint, tmp_path
):
    other = shutil.copytree(demo_checkpoint, tmp_path / "other")
    weights = load_file(other / "model.safetensors") | {"more": torch.zeros(2)}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    configs = [rank_config(**FSDP), rank_config(**FSDP, model__path=str(other))]
    for error in two_ranks.outcomes(rank_jobs.own_config, configs):
        assert type(error) is LearnerError
        assert re.search("differs is one that only some ranks have", str(error))


@pytest.mark.parametrize(("parallel", "rows"), [(DDP, [6, 1]), (FSDP, [1, 1])], ids=["ddp", "fsdp"])
def test_ranks_that_are_told_to_stop_leave_the_step_together_and_save_the_last_update(
    two_ranks, rank_config, parallel, rows, tmp_path
):
    """One is told before the other. Under fsdp a row is one of all ranks, and so is the stop; else
    each leaves its own rows, and none takes the update.
    """
    config = rank_config(**parallel, training__packing=False, stage2_ab__schedule__warmup_steps=2)
    first, last = two_ranks.run(rank_jobs.is_stopped, config, tmp_path / "checkpoint")
    assert [first.num_rows, last.num_rows] == rows
    assert "stopped because the run is ending" in str(last.error)
    assert type(first.error) is CollectiveError
    assert (first.num_updates, last.num_updates) == (1, 1)
    assert first.saved_last_update


# What is written down


def test_each_rank_logs_its_own_samples_and_they_are_read_as_one_step(ddp, ddp_config):
    folder = ddp_config.telemetry.run_dir / "rollouts"
    assert Counter(path.name for path in folder.iterdir()).keys() >= {
        "step_000002.jsonl",
        "step_000002.rank1.jsonl",
    }
    lines = read_step(step_path(folder, 2))
    assert [line["position"] for line in lines] == list(range(11))
    assert [line["sample_id"] for line in lines] == [*ddp[0].sample_ids[1], *ddp[1].sample_ids[1]]


def test_every_rank_has_a_track_of_its_own_on_the_timeline(ddp):
    spans = merged(ddp)[1].spans
    assert {span.track for span in spans} == {"nobody", "learner-0", "learner-1"}
    for track in ("learner-0", "learner-1"):
        assert {span.name for span in spans if span.track == track} == {
            "draw samples",
            "learn round",
            "finish step",
            "wait for ranks",
            "reduce gradients",
        }
    assert 0 < merged(ddp)[1].metrics["time/reduce_s"] <= merged(ddp)[1].metrics["time/learn_s"]


@pytest.mark.parametrize("case", ["ddp that carries", "fsdp"])
def test_ranks_that_are_resumed_learn_what_they_would_have_learned(case, two_ranks, rank_config):
    carry = CARRY | {"global_max_length": 400, "training__per_device_train_batch_size": 4}
    config = FSDP if case == "fsdp" else carry | DDP
    saved = rank_config(**config)
    checkpoint = saved.telemetry.run_dir / "checkpoint"
    whole = two_ranks.run(rank_jobs.learn, saved, STEPS, 4, None, {2: checkpoint})
    resumed = rank_config(**config, resume={"run": str(checkpoint)})
    rest = two_ranks.run(rank_jobs.learn, resumed, STEPS, 4)
    for one, other in zip(whole, rest, strict=True):
        assert timeless(other.reports) == timeless(one.reports[2:]) != []
        assert all(torch.equal(other.weights[name], one.weights[name]) for name in one.weights)
    files = sorted(path.name for path in (checkpoint / "run_state").iterdir())
    tensors = ["rank_0.safetensors"] + ["rank_1.safetensors"] * (case == "fsdp")
    assert files == sorted(["rank_0.json", "rank_1.json", "run.json", *tensors])
    assert contents(checkpoint) == contents(checkpoint.with_name("foreground"))


def contents(folder):
    """Every file of a folder, to the byte."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
