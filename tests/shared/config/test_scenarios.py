"""The scenarios of spec/rollout-matching-sft.md and spec/channel-b-pipeline-spec.md that are about
the configuration, by their titles.

Old paths (`custom.extra.*`) that later requirements still spell are read as the new ones (decision
3).
"""

from __future__ import annotations

import json
import pickle
import re
from contextlib import nullcontext

import pytest

from launch.checks.data import check_data
from launch.runtime.batch_algebra import batch_algebra
from learner.targets import target_settings
from shared.config.derive import remarks, resolved_sync_mode
from shared.config.pipeline import Channel
from shared.config.retired import take_retired
from shared.errors import RecordError
from shared.schedule import RunSchedule
from shared.tokens.fresh import FreshTokens

MATCHING = "rollout_matching"
OLD = "custom.extra.rollout_matching"
SERVER = f"{MATCHING}.vllm.server"
ALIGNED = {"custom.trainer_variant": "stage2_rollout_aligned", "stage2_ab": ...}
NO_PIPELINE = {f"{MATCHING}.pipeline": ...}


@pytest.mark.parametrize("variant", [ALIGNED, {}])
def test_missing_rollout_pipeline_fails_fast(problems, variant):
    (line,) = problems({**variant, **NO_PIPELINE})
    assert line.startswith(
        "rollout_matching.pipeline: is required, and missing; add it, for example `pipeline:"
        " {objective: [{name: token_ce, "
    )


@pytest.mark.parametrize("variant", [ALIGNED, {}])
def test_missing_rollout_pipeline_fails_fast_where_the_whole_section_is_absent(problems, variant):
    assert any(
        line.startswith("rollout_matching.pipeline: is required, and missing; ")
        for line in problems({**variant, MATCHING: ...})
    )


@pytest.mark.parametrize("decode_batch_size", [2, 4, 16])
def test_canonical_stage_2_key_controls_decode_microbatching(load, decode_batch_size):
    algebra = batch_algebra(load({f"{MATCHING}.decode_batch_size": decode_batch_size}))
    assert algebra.decode_batch_size == decode_batch_size
    assert (
        max(share for shares in algebra.shares for share in shares)
        <= decode_batch_size
        < algebra.round_capacity
    )


def test_without_the_key_a_device_decodes_one_sequence_at_a_time(load):
    assert load({f"{MATCHING}.decode_batch_size": ...}).rollout_matching.decode_batch_size == 1


@pytest.mark.parametrize("variant", [ALIGNED, {}])
def test_eval_per_device_knobs_do_not_override_rollout_decode_batching(load, variant):
    with_knob = load(
        {**variant, f"{MATCHING}.decode_batch_size": 3, "training.per_device_eval_batch_size": 7}
    )
    without = load({**variant, f"{MATCHING}.decode_batch_size": 3})
    assert with_knob.training.per_device_eval_batch_size == 7
    assert batch_algebra(with_knob) == batch_algebra(without)
    assert with_knob.rollout_matching == without.rollout_matching


def test_legacy_decode_key_path_fails_fast(problems):
    assert problems({f"{OLD}.decode_batch_size": 4}) == [
        f"{OLD}.decode_batch_size: was removed; use rollout_matching.decode_batch_size"
    ]


def test_legacy_rollout_backend_key_path_fails_fast(problems):
    assert problems({f"{OLD}.rollout_backend": "vllm"}) == [
        f"{OLD}.rollout_backend: was removed; use rollout_matching.rollout_backend"
    ]


def test_unknown_nested_decoding_key_fails_before_execution(problems):
    assert problems({f"{MATCHING}.decoding.unknown_decoding_key": 1}) == [
        (
            f"{MATCHING}.decoding.unknown_decoding_key: is not a known key; the keys here are"
            " temperature, top_p, top_k"
        )
    ]


def test_legacy_rollout_server_paired_list_shape_fails_fast(problems):
    lines = problems(
        {f"{SERVER}.base_url": ["http://127.0.0.1:8000"], f"{SERVER}.group_port": [51216]}
    )
    assert [line.split(": ")[0] for line in lines] == [f"{SERVER}.base_url", f"{SERVER}.group_port"]
    assert all(
        ": was removed; " in line and "rollout_matching.vllm.server.servers[]" in line
        for line in lines
    )


def test_multi_server_pairing_is_strict_and_deterministic(problems):
    pairs = {
        f"{SERVER}.base_url": ["http://a:8000", "http://b:8000"],
        f"{SERVER}.group_port": [51216, 51217],
        f"{MATCHING}.vllm.mode": "server",
    }
    lines = problems(pairs)
    assert sum("rollout_matching.vllm.server.servers[]" in line for line in lines) == 2
    assert lines == problems(pairs)


def test_canonical_grouped_config_drives_trainer_contract(load):
    """`rollout_matching_cfg` is the typed section `RunConfig.rollout_matching` (decision 18)."""
    settings = {
        "rollout_backend": "vllm",
        "decode_batch_size": 4,
        "max_new_tokens": 96,
        "decoding": {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
        "candidate_top_k": 5,
        "maskiou_gate": 0.25,
        "maskiou_resolution": 128,
        "fp_cost": 0.5,
        "fn_cost": 2.0,
        "ot_cost": "l1",
        "ot_epsilon": 5.0,
        "ot_iters": 40,
    }
    run = load(
        {
            **{f"{MATCHING}.{key}": value for key, value in settings.items()},
            f"{MATCHING}.vllm.sync.canary_tolerance": 1e-3,
        }
    )
    contract = run.rollout_matching
    assert {key: contract.model_dump(mode="json")[key] for key in settings} == settings
    assert (
        contract.vllm.mode,
        contract.vllm.actors.num_actors,
        contract.vllm.sync.mode,
        contract.vllm.sync.canary_tolerance,
    ) == ("actors", 3, "full", 1e-3)
    decode = contract.decode_settings(stop_token_ids=(1,), banned_token_ids=())
    assert (decode.temperature, decode.top_p, decode.top_k, decode.max_new_tokens) == (
        0.7,
        0.9,
        50,
        96,
    )
    assert (
        run.training.packing,
        run.training.packing_buffer,
        run.training.packing_min_fill_ratio,
        run.training.packing_drop_last,
    ) == (True, 256, 0.7, True)


@pytest.mark.parametrize(
    ("variant", "kinds", "is_polygon_sound"),
    [
        ({}, {"bbox_2d"}, False),
        (ALIGNED, {"bbox_2d", "poly"}, True),
        ({**ALIGNED, f"{MATCHING}.geometry": ["bbox_2d"]}, {"bbox_2d"}, False),
    ],
)
def test_preflight_runtime_consume_a_shared_validated_rollout_contract(
    load, tmp_path, variant, kinds, is_polygon_sound
):
    """Of one configuration, the check before the start and the learner's rules read the same
    contract: what one refuses, the other would not teach.
    """
    polygon = {
        "images": ["a.png"],
        "width": 8,
        "height": 8,
        "objects": [{"poly": [1, 1, 9, 1, 9, 9], "desc": "one"}],
    }
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text(json.dumps(polygon) + "\n")
    files = {
        "model.path": str(tmp_path),
        "data.train": str(tmp_path / "train.jsonl"),
        "data.val": ...,
        "data.check_images": False,
    }
    settings = {
        f"{MATCHING}.maskiou_gate": 0.25,
        f"{MATCHING}.ot_cost": "l1",
        "custom.object_field_order": "geometry_first",
    }
    run = load({**variant, **files, **settings})

    rules = target_settings(run)
    assert (
        rules.geometry,
        rules.matching.maskiou_gate,
        rules.transport.cost,
        rules.field_order,
    ) == (kinds, 0.25, "l1", "geometry_first")
    with (
        nullcontext()
        if is_polygon_sound
        else pytest.raises(RecordError, match=r"train\.jsonl:1: objects\[0\]")
    ):
        assert check_data(run).images.max_per_prompt == 1
    # What is sent to another process is the same contract.
    assert target_settings(pickle.loads(pickle.dumps(run))) == rules
    assert RunSchedule(run).plan(99).num_samples == batch_algebra(run).raw_rollouts_per_step


def test_runtime_rollout_injection_path_stays_stable(load, problems):
    resolved = load({}).model_dump(mode="json")
    assert resolved[MATCHING]["decode_batch_size"] == 6
    assert take_retired(resolved) == []
    assert len(problems({f"{OLD}.decode_batch_size": 6, f"{MATCHING}.decode_batch_size": 6})) == 1


def test_rollout_generate_batch_size_fails_fast_when_present(problems):
    assert problems({f"{MATCHING}.rollout_generate_batch_size": 4}) == [
        (
            "rollout_matching.rollout_generate_batch_size: was removed; use"
            " rollout_matching.decode_batch_size"
        )
    ]


def test_rollout_infer_batch_size_fails_fast_when_present(problems):
    assert problems({f"{MATCHING}.rollout_infer_batch_size": 4}) == [
        (
            "rollout_matching.rollout_infer_batch_size: was removed; use"
            " rollout_matching.decode_batch_size"
        )
    ]


@pytest.mark.parametrize("value", ["micro", "window", None, {"scope": "window"}])
def test_post_rollout_pack_scope_fails_fast_when_present(problems, value):
    (line,) = problems({f"{MATCHING}.post_rollout_pack_scope": value})
    assert (
        line.startswith("rollout_matching.post_rollout_pack_scope")
        and ": was removed; remove it: " in line
    )


@pytest.mark.parametrize("value", [{"enabled": True}, {"enabled": False}, {}, None])
def test_rollout_buffer_fails_fast_when_present(problems, value):
    (line,) = problems({f"{MATCHING}.rollout_buffer": value})
    assert (
        line.startswith("rollout_matching.rollout_buffer") and ": was removed; remove it: " in line
    )


@pytest.mark.parametrize(("key", "value"), [("temperature", 0.7), ("top_p", 0.9), ("top_k", 50)])
def test_legacy_decoding_keys_fail_fast(problems, key, value):
    for old in (f"{MATCHING}.{key}", f"{OLD}.{key}"):
        assert problems({old: value}) == [
            f"{old}: was removed; use rollout_matching.decoding.{key}"
        ]


def test_rollout_matching_enabled_via_trainer_variant(load):
    aligned, baseline = load(ALIGNED), load({"custom.trainer_variant": "stage1_sft"})
    assert [plan.channel for plan in RunSchedule(aligned).plans()] == [Channel.B] * 100
    assert [plan.channel for plan in RunSchedule(baseline).plans()] == [Channel.A] * 100


def test_before_the_start_32_raw_rollouts_are_announced_as_one_update_of_rows_of_12000_tokens(load):
    run = load(
        {
            "global_max_length": 12000,
            "stage2_ab.channel_b.rollouts_per_step": ...,
            "training.effective_batch_size": 32,
        }
    )
    algebra = batch_algebra(run)
    assert (algebra.raw_rollouts_per_step, algebra.updates, algebra.packing_length) == (
        32,
        run.training.max_steps,
        12000,
    )
    assert "32 raw rollouts" in algebra.describe()[2]
    assert "packed to at most 12000 tokens" in algebra.describe()[-1]


def test_channel_b_executes_only_on_the_final_micro_step_under_grad_accumulation(load):
    """What is known before the start: every rank gathers 8 rollouts over 8 micro-steps, and they
    are one step with one update.
    """
    accumulation = {
        "training.effective_batch_size": ...,
        "training.gradient_accumulation_steps": 8,
        "learner.world_size": 4,
    }
    run = load(
        {**accumulation, "stage2_ab.channel_b.rollouts_per_step": ..., "training.max_steps": 1}
    )
    algebra = batch_algebra(run)
    assert (
        algebra.per_device_train_batch_size,
        algebra.learner_world_size,
        algebra.gradient_accumulation_steps,
    ) == (1, 4, 8)
    assert (algebra.raw_rollouts_per_step, algebra.share_per_rank, algebra.updates) == (
        32,
        (8, 8, 8, 8),
        1,
    )


def test_vllm_server_mode_fails_fast_when_cap_is_infeasible(load, problems):
    """Actors are known before the start; servers are asked for their devices first, and then the
    same is found (tests/launch/runtime/test_rollout_client.py).
    """
    four_ranks = {f"{MATCHING}.decode_batch_size": 1, "learner.world_size": 4}
    (line,) = problems({**four_ranks, f"{MATCHING}.vllm.actors.num_actors": 2})
    remedy = (
        "; raise decode_batch_size to at least 2, add rollout devices, or use fewer learner ranks"
    )
    assert line.startswith(f"{MATCHING}.decode_batch_size: ") and line.endswith(remedy)
    servers = {"servers": [{"base_url": "http://127.0.0.1:8000", "group_port": 0}]}
    run = load(
        {**four_ranks, f"{MATCHING}.vllm.mode": "server", f"{MATCHING}.vllm.server": servers}
    )
    with pytest.raises(ValueError, match=re.escape(remedy.removeprefix("; "))):
        batch_algebra(run, devices=(2,))


def test_rollout_decode_batch_size_2_with_learner_microbatch_1(load):
    algebra = batch_algebra(
        load(
            {
                f"{MATCHING}.decode_batch_size": 2,
                f"{MATCHING}.vllm.actors.num_actors": 1,
                "stage2_ab.channel_b.rollouts_per_step": 8,
            }
        )
    )
    assert (algebra.per_device_train_batch_size, algebra.decode_batch_size) == (1, 2)
    assert algebra.shares == ((2,), (2,), (2,), (2,))


SYNC_MODES = [
    # what is configured, whether engines serve adapters, the adapter; what a sync sends
    (None, False, None, "full"),
    (None, True, "lora", "full"),
    ("auto", False, "lora", "full"),
    ("auto", True, "lora", "adapter"),
    ("auto", True, "dora", "full"),
    ("adapter", True, "lora", "adapter"),
]


@pytest.mark.parametrize(("mode", "enable_lora", "kind", "resolved"), SYNC_MODES)
def test_sync_mode_is_full_unless_adapters_are_asked_for_and_can_be_served(
    load, mode, enable_lora, kind, resolved
):
    sync = {} if mode is None else {f"{MATCHING}.vllm.sync.mode": mode}
    adapter = {} if kind is None else {"model.adapter": {"kind": kind}}
    run = load({**sync, **adapter, f"{MATCHING}.vllm.enable_lora": enable_lora})
    assert resolved_sync_mode(run) == resolved
    assert run.rollout_matching.vllm.sync.fallback_to_full is True


@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_non_full_sync_mode_fails_fast_under_multi_process_learner(problems, mode):
    lora = {
        "model.adapter": {"kind": "lora"},
        f"{MATCHING}.vllm.enable_lora": True,
        "learner.world_size": 2,
    }
    (line,) = problems({**lora, f"{MATCHING}.vllm.sync.mode": mode})
    assert line.startswith(
        f"{MATCHING}.vllm.sync.mode: '{mode}' sends adapters alone, which works with one learner"
        f" rank only, not 2; set {MATCHING}.vllm.sync.mode: full"
    )
    assert problems({**lora, f"{MATCHING}.vllm.sync.mode": "full"}) == []


def with_fresh_tokens(folder, **changes):
    """A run with LoRA, of a checkpoint with fresh tokens, whose engines could serve adapters."""
    FreshTokens(100, 1000).save(folder)
    return {
        "model.path": str(folder),
        "model.adapter": {"kind": "lora"},
        f"{MATCHING}.vllm.enable_lora": True,
        **changes,
    }


def test_fresh_embeddings_beside_an_adapter_are_sent_in_full_weights_and_auto_says_why(
    load, tmp_path
):
    run = load(with_fresh_tokens(tmp_path, **{f"{MATCHING}.vllm.sync.mode": "auto"}))
    assert resolved_sync_mode(run) == "full"
    (remark,) = remarks(run)
    assert (
        remark
        == f"{MATCHING}.vllm.sync.mode: auto is full, because the fresh embeddings of 1,000 tokens"
        f" in {tmp_path} (fresh_tokens.json) are trained with the adapter, and vLLM takes no"
        " adapter with such rows"
    )


def test_an_adapter_sync_that_cannot_carry_fresh_embeddings_is_refused(problems, tmp_path):
    (line,) = problems(with_fresh_tokens(tmp_path, **{f"{MATCHING}.vllm.sync.mode": "adapter"}))
    assert (
        line
        == f"{MATCHING}.vllm.sync.mode: 'adapter' cannot carry the embeddings of the 1,000 fresh"
        " tokens of model.path, which are trained with it and which vLLM takes in full weights"
        f" only; set {MATCHING}.vllm.sync.mode: full or auto"
    )


def test_fresh_embeddings_that_stay_frozen_are_remarked_on(load, tmp_path):
    FreshTokens(100, 1000).save(tmp_path)
    frozen = {"model.path": str(tmp_path), "training.parts": {"language_model": {"frozen": True}}}
    (remark,) = remarks(load(frozen))
    assert remark.startswith(
        "training.parts.language_model.frozen: the embeddings of 1,000 tokens in "
    )
    assert remark.endswith(
        "were made and not learned (fresh_tokens.json), and stay so; unfreeze the part, or set"
        " model.adapter"
    )
    for trained in ({}, {"model.adapter": {"kind": "dora"}}):
        assert remarks(load({"model.path": str(tmp_path), **trained})) == ()


def test_a_damaged_record_of_fresh_tokens_names_its_file(problems, tmp_path):
    (tmp_path / "fresh_tokens.json").write_text('{"first": 3}')
    lora = {"model.adapter": {"kind": "lora"}, f"{MATCHING}.vllm.enable_lora": True}
    (line,) = problems(
        {"model.path": str(tmp_path), **lora, f"{MATCHING}.vllm.sync.mode": "adapter"}
    )
    assert line.startswith(f"model.path: {tmp_path}/fresh_tokens.json cannot be read (")
