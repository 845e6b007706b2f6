"""The scenarios of spec/rollout-matching-sft.md and spec/channel-b-pipeline-spec.md that are about
the configuration, by their titles.

Later requirements still spell old paths (`custom.extra.*`); here they are the new ones (decision 3).
"""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from config_changes import (
    ALIGNED,
    BUDGET,
    LORA,
    MATCHING,
    SERVED_LORA,
    SERVERS,
    STAGE1,
    VLLM,
    load,
    problems,
)

from launch.checks.data import check_data
from launch.processes.batch_algebra import batch_algebra
from learner.targets import target_settings
from shared.config.derive import remarks
from shared.config.load import take_retired
from shared.config.pipeline import Channel
from shared.errors import RecordError
from shared.grounding.formats import ObjectDictionary
from shared.schedule import RunSchedule
from shared.tokens.fresh import FreshTokens

OLD = "custom.extra.rollout_matching"
SERVER = f"{VLLM}.server"
SYNC = f"{VLLM}.sync.mode"
DECODED = f"{MATCHING}.decode_batch_size"
BATCH = "training.effective_batch_size"


@pytest.mark.parametrize("variant", [ALIGNED, {}])
def test_missing_rollout_pipeline_fails_fast(variant):
    expected = f"{MATCHING}.pipeline: is required, and missing; add it, for example `pipeline:"
    (line,) = problems({**variant, f"{MATCHING}.pipeline": ...})
    assert line.startswith(f"{expected} {{objective: [{{name: token_ce, ")
    without_section = problems({**variant, MATCHING: ...})
    assert any(line.startswith(expected) for line in without_section)


@pytest.mark.parametrize("decode_batch_size", [2, 4, 16])
def test_canonical_stage_2_key_controls_decode_microbatching(decode_batch_size):
    algebra = batch_algebra(load({DECODED: decode_batch_size}))
    assert algebra.decode_batch_size == decode_batch_size
    assert max(map(max, algebra.shares)) <= decode_batch_size < algebra.round_capacity


def test_without_the_key_a_device_decodes_one_sequence_at_a_time():
    assert load({DECODED: ...}).rollout_matching.decode_batch_size == 1


@pytest.mark.parametrize("variant", [ALIGNED, {}])
def test_eval_per_device_knobs_do_not_override_rollout_decode_batching(variant):
    without = load({**variant, DECODED: 3})
    with_knob = load({**variant, DECODED: 3, "training.per_device_eval_batch_size": 7})
    assert with_knob.training.per_device_eval_batch_size == 7
    assert batch_algebra(with_knob) == batch_algebra(without)
    assert with_knob.rollout_matching == without.rollout_matching


def assert_moved(old, value, new):
    assert problems({old: value}) == [f"{old}: was removed; use {new}"]


def assert_section_moved(old, value):
    (line,) = problems({old: value})
    assert line.startswith("custom.extra: was removed; move rollout_matching ")


def test_legacy_decode_key_path_fails_fast():
    assert_section_moved(f"{OLD}.decode_batch_size", 4)


def test_legacy_rollout_backend_key_path_fails_fast():
    assert_section_moved(f"{OLD}.rollout_backend", "vllm")


def test_rollout_generate_batch_size_fails_fast_when_present():
    assert_moved(f"{MATCHING}.rollout_generate_batch_size", 4, DECODED)


def test_rollout_infer_batch_size_fails_fast_when_present():
    assert_moved(f"{MATCHING}.rollout_infer_batch_size", 4, DECODED)


def test_legacy_decoding_keys_fail_fast():
    for key, value in (("temperature", 0.7), ("top_p", 0.9), ("top_k", 50)):
        assert_moved(f"{MATCHING}.{key}", value, f"{MATCHING}.decoding.{key}")
        assert_section_moved(f"{OLD}.{key}", value)


@pytest.mark.parametrize("value", ["micro", "window", None, {"scope": "window"}])
def test_post_rollout_pack_scope_fails_fast_when_present(value):
    (line,) = problems({f"{MATCHING}.post_rollout_pack_scope": value})
    assert re.match(r"rollout_matching\.post_rollout_pack_scope: was removed; ", line)


@pytest.mark.parametrize("value", [{"enabled": True}, {"enabled": False}, {}, None])
def test_rollout_buffer_fails_fast_when_present(value):
    (line,) = problems({f"{MATCHING}.rollout_buffer": value})
    assert re.match(r"rollout_matching\.rollout_buffer: was removed; remove it; ", line)


SLOW_MODULES = "torch ray vllm transformers hydra omegaconf scipy learner rollout_actors launch"


@pytest.mark.slow
def test_unknown_rollout_key_fails_before_rollout_trainer_execution():
    """Nothing heavy is imported by then, and nothing of ours that runs anything."""
    program = f"""
import sys
from shared.config import load_config
try:
    load_config({{"rollout_matching": {{"unknown_rollout_key": 1}}}})
except ValueError as error:
    print(error)
print("imported:", *sorted(set({SLOW_MODULES!r}.split()) & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        timeout=300,
        check=True,
    )
    lines = done.stdout.splitlines()
    message = rf"{MATCHING}\.unknown_rollout_key: .*known key; .*pipeline, "
    assert re.search(message, done.stdout)
    assert lines[-1] == "imported:"


def test_unknown_nested_decoding_key_fails_before_execution():
    path = f"{MATCHING}.decoding.unknown_decoding_key"
    (line,) = problems({path: 1})
    assert re.match(rf"{path}: .*known key; .* temperature, top_p, top_k, stop$", line)


PAIRS = {
    f"{SERVER}.base_url": ["http://a:8000", "http://b:8000"],
    f"{SERVER}.group_port": [51216, 51217],
}


def test_legacy_rollout_server_paired_list_shape_fails_fast():
    lines = problems(PAIRS)
    assert [line.split(": ")[0] for line in lines] == [f"{SERVER}.base_url", f"{SERVER}.group_port"]
    assert all(": was removed; " in line and f"{SERVER}.servers[]" in line for line in lines)


def test_multi_server_pairing_is_strict_and_deterministic():
    pairs = {**PAIRS, f"{VLLM}.mode": "server"}
    lines = problems(pairs)
    assert sum(f"{SERVER}.servers[]" in line for line in lines) == 2
    assert lines == problems(pairs)


def test_canonical_grouped_config_drives_trainer_contract():
    """`rollout_matching_cfg` is the typed section `RunConfig.rollout_matching` (decision 18)."""
    settings = {
        "rollout_backend": "vllm",
        "decode_batch_size": 4,
        "max_new_tokens": 96,
        "decoding": {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "stop": []},
        "candidate_top_k": 5,
        "maskiou_gate": 0.25,
        "maskiou_resolution": 128,
        "fp_cost": 0.5,
        "fn_cost": 2.0,
        "geometry": ["bbox_2d", "point_2d"],
        "point_tolerance": 20.0,
        "ot_cost": "l1",
        "ot_epsilon": 5.0,
        "ot_iters": 40,
    }
    written = {f"{MATCHING}.{key}": value for key, value in settings.items()}
    run = load({**written, f"{VLLM}.sync.canary_tolerance": 1e-3})
    contract = run.rollout_matching
    assert {key: contract.model_dump(mode="json")[key] for key in settings} == settings
    assert (contract.vllm.mode, contract.vllm.actors.num_actors) == ("actors", 3)
    assert (contract.vllm.sync.mode, contract.vllm.sync.canary_tolerance) == ("full", 1e-3)
    decode = contract.decode_settings(stop_token_ids=(1,), banned_token_ids=())
    assert (decode.temperature, decode.top_p, decode.top_k) == (0.7, 0.9, 50)
    assert decode.max_new_tokens == 96
    assert (run.training.packing, run.training.packing_buffer) == (True, 256)
    assert (run.training.packing_min_fill_ratio, run.training.packing_drop_last) == (0.7, True)


@pytest.mark.parametrize(
    ("variant", "kinds", "is_polygon_sound"),
    [
        ({}, {"bbox_2d"}, False),
        (ALIGNED, {"bbox_2d", "poly"}, True),
        ({**ALIGNED, f"{MATCHING}.geometry": ["bbox_2d"]}, {"bbox_2d"}, False),
    ],
)
def test_preflight_runtime_consume_a_shared_validated_rollout_contract(
    tmp_path, variant, kinds, is_polygon_sound
):
    """Of one configuration, the check before the start and the learner's rules read the same
    contract: what one refuses, the other would not teach.
    """
    polygon = {"poly": [1, 1, 9, 1, 9, 9], "desc": "one"}
    row = {"images": ["a.png"], "width": 8, "height": 8, "objects": [polygon]}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    run = load(
        {
            **variant,
            "model.path": str(tmp_path),
            "data.train": str(tmp_path / "train.jsonl"),
            "data.val": ...,
            "data.check_images": False,
            f"{MATCHING}.maskiou_gate": 0.25,
            f"{MATCHING}.ot_cost": "l1",
            "custom.object_field_order": "geometry_first",
        }
    )
    rules = target_settings(run)
    assert (rules.geometry, rules.answer_format) == (kinds, ObjectDictionary("geometry_first"))
    assert (rules.matching.maskiou_gate, rules.transport.cost) == (0.25, "l1")
    refused = pytest.raises(RecordError, match=r"train\.jsonl:1: objects\[0\]")
    with nullcontext() if is_polygon_sound else refused:
        assert check_data(run).images.max_per_prompt == 1
    # The contract that is sent to another process is the same.
    assert target_settings(pickle.loads(pickle.dumps(run))) == rules
    assert RunSchedule(run).plan(99).num_samples == batch_algebra(run).raw_rollouts_per_step


def test_runtime_rollout_injection_path_stays_stable():
    resolved = load({}).model_dump(mode="json")
    assert resolved[MATCHING]["decode_batch_size"] == 6
    assert take_retired(resolved) == []
    assert len(problems({f"{OLD}.decode_batch_size": 6, DECODED: 6})) == 1


def test_rollout_matching_enabled_via_trainer_variant():
    for variant, channel in ((ALIGNED, Channel.B), (STAGE1, Channel.A)):
        assert [plan.channel for plan in RunSchedule(load(variant)).plans()] == [channel] * 100


def test_before_the_start_32_raw_rollouts_are_announced_as_one_update_of_rows_of_12000_tokens():
    algebra = batch_algebra(load({"global_max_length": 12000, BUDGET: ..., BATCH: 32}))
    assert (algebra.raw_rollouts_per_step, algebra.updates) == (32, 100)
    assert "32 raw rollouts" in algebra.describe()[2]
    assert "packed to at most 12000 tokens" in algebra.describe()[-1]


def test_channel_b_executes_only_on_the_final_micro_step_under_grad_accumulation():
    """Before the start it is known that every rank gathers 8 rollouts over 8 micro-steps, and they
    are one step with one update.
    """
    changes = {"training.gradient_accumulation_steps": 8, "learner.world_size": 4}
    algebra = batch_algebra(load({**changes, BATCH: ..., BUDGET: ..., "training.max_steps": 1}))
    assert (algebra.per_device_train_batch_size, algebra.learner_world_size) == (1, 4)
    assert (algebra.gradient_accumulation_steps, algebra.updates) == (8, 1)
    assert (algebra.raw_rollouts_per_step, algebra.share_per_rank) == (32, (8, 8, 8, 8))


def test_vllm_server_mode_fails_fast_when_cap_is_infeasible():
    """Actors are known before the start; servers are asked for their devices first, and then the
    same is found (tests/launch/processes/test_rollout_client.py).
    """
    four_ranks = {DECODED: 1, "learner.world_size": 4}
    remedy = "raise decode_batch_size to at least 2, add rollout devices, or use fewer learner rank"
    (line,) = problems({**four_ranks, f"{VLLM}.actors.num_actors": 2})
    assert line.startswith(f"{DECODED}: ")
    assert f"; {remedy}" in line
    with pytest.raises(ValueError, match=remedy):
        batch_algebra(load({**four_ranks, **SERVERS}), devices=(2,))


def test_rollout_decode_batch_size_2_with_learner_microbatch_1():
    algebra = batch_algebra(load({DECODED: 2, f"{VLLM}.actors.num_actors": 1, BUDGET: 8}))
    assert (algebra.per_device_train_batch_size, algebra.decode_batch_size) == (1, 2)
    assert algebra.shares == ((2,), (2,), (2,), (2,))


@pytest.mark.parametrize(
    ("changes", "resolved"),
    [
        ({}, "full"),
        (SERVED_LORA, "full"),
        ({**LORA, SYNC: "auto"}, "full"),
        ({**SERVED_LORA, SYNC: "auto"}, "adapter"),
        ({**SERVED_LORA, SYNC: "auto", "model.adapter": {"kind": "dora"}}, "full"),
        ({**SERVED_LORA, SYNC: "adapter"}, "adapter"),
        ({**SERVED_LORA, "training.parts.aligner.adapted": True, SYNC: "auto"}, "full"),
        (
            {**SERVED_LORA, "model.adapter": {"kind": "lora", "quantize": "nf4"}, SYNC: "auto"},
            "full",
        ),
    ],
)
def test_sync_mode_is_full_unless_adapters_are_asked_for_and_can_be_served(changes, resolved):
    run = load(changes)
    assert run.sync_mode == resolved
    assert run.rollout_matching.vllm.sync.fallback_to_full is True


@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_non_full_sync_mode_fails_fast_under_multi_process_learner(mode):
    """The specification's scenario, which is about servers."""
    ranks = {**SERVED_LORA, **SERVERS, "learner.world_size": 2}
    (line,) = problems({**ranks, SYNC: mode})
    assert line.startswith(f"{SYNC}: '{mode}' sends adapters")
    assert line.endswith(f"; set {SYNC}: full, or learner.world_size: 1")
    assert problems({**ranks, SYNC: "full"}) == []


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("mode", "resolved"), [("adapter", "adapter"), ("auto", "adapter"), ("full", "full")]
)
def test_several_learner_ranks_send_what_one_does(mode, resolved, parallel):
    ranks = {"learner.world_size": 2, "learner.parallel": parallel}
    assert load({**SERVED_LORA, **ranks, SYNC: mode}).sync_mode == resolved


@pytest.fixture
def fresh(tmp_path):
    """A checkpoint with 1,000 fresh tokens."""
    FreshTokens(100, 1000).save(tmp_path)
    return {"model.path": str(tmp_path)}


def test_fresh_embeddings_beside_an_adapter_are_sent_in_full_weights_and_auto_says_why(
    fresh, tmp_path
):
    run = load({**fresh, **SERVED_LORA, SYNC: "auto"})
    assert run.sync_mode == "full"
    (remark,) = remarks(run)
    assert remark.startswith(f"{SYNC}: auto means full here, because vLLM takes no adapter")
    assert remark.endswith(f"1,000 tokens in {tmp_path} (fresh_tokens.json)")


def test_an_adapter_sync_that_cannot_carry_fresh_embeddings_is_refused(fresh):
    (line,) = problems({**fresh, **SERVED_LORA, SYNC: "adapter"})
    assert line.startswith(f"{SYNC}: 'adapter' is not possible: ") and "fresh embeddings" in line


def test_fresh_embeddings_that_stay_frozen_are_remarked_on(fresh, tmp_path):
    (remark,) = remarks(load({**fresh, "training.parts.language_model.frozen": True}))
    found = f"training.parts.language_model.frozen: the embeddings of 1,000 tokens in {tmp_path} "
    assert remark.startswith(found)
    assert remark.endswith("; unfreeze the part, or set model.adapter")
    for trained in ({}, {"model.adapter": {"kind": "dora"}}):
        assert remarks(load({**fresh, **trained})) == ()


def test_a_damaged_record_of_fresh_tokens_names_its_file(tmp_path):
    (tmp_path / "fresh_tokens.json").write_text('{"first": 3}')
    (line,) = problems({"model.path": str(tmp_path), **SERVED_LORA, SYNC: "adapter"})
    assert line.startswith(f"model.path: {tmp_path}/fresh_tokens.json cannot be read (")
