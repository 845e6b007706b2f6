"""Removed and moved keys fail by name, and name their successor; keys of later versions say so."""

from __future__ import annotations

import pytest

from shared.config.retired import RETIRED

MATCHING = "rollout_matching"
CONFIG = f"{MATCHING}.pipeline.objective[1].config"

MOVED = {
    "custom.extra.rollout_matching.decode_batch_size": f"{MATCHING}.decode_batch_size",
    "custom.extra.rollout_matching.rollout_backend": f"{MATCHING}.rollout_backend",
    "custom.extra.rollout_matching.decoding.top_p": f"{MATCHING}.decoding.top_p",
    "custom.extra.rollout_matching.temperature": f"{MATCHING}.decoding.temperature",
    "custom.extra.rollout_matching.rollout_infer_batch_size": f"{MATCHING}.decode_batch_size",
    "custom.extra.rollout_matching": MATCHING,
    "custom.extra.stage2_ab.channel_b.mode": "stage2_ab.channel_b.mode",
    "custom.extra.stage2_ab.schedule.b_ratio": "stage2_ab.schedule.b_ratio",
    f"{MATCHING}.rollout_generate_batch_size": f"{MATCHING}.decode_batch_size",
    f"{MATCHING}.rollout_infer_batch_size": f"{MATCHING}.decode_batch_size",
    f"{MATCHING}.temperature": f"{MATCHING}.decoding.temperature",
    f"{MATCHING}.top_p": f"{MATCHING}.decoding.top_p",
    f"{MATCHING}.top_k": f"{MATCHING}.decoding.top_k",
    f"{CONFIG}.bbox_smoothl1_weight": f"{CONFIG}.smoothl1_weight",
    f"{CONFIG}.bbox_ciou_weight": f"{CONFIG}.ciou_weight",
    f"{CONFIG}.coord_soft_ce_weight": f"{CONFIG}.soft_ce_weight",
    f"{CONFIG}.coord_w1_weight": f"{CONFIG}.w1_weight",
}

GONE = {
    "custom.coord_soft_ce_w1.enabled": "rollout_matching.pipeline.objective",
    "custom.coord_soft_ce_w1": "rollout_matching.pipeline.objective",
    "custom.extra.rollout_matching.rollout_buffer": "remove it",
    f"{MATCHING}.post_rollout_pack_scope": "remove it",
    f"{MATCHING}.rollout_buffer": "remove it",
    f"{MATCHING}.vllm.server.base_url": "rollout_matching.vllm.server.servers[]",
    f"{MATCHING}.vllm.server.group_port": "rollout_matching.vllm.server.servers[]",
}

LATER = {
    f"{MATCHING}.vllm.server.servers": f"{MATCHING}.vllm.mode: actors",
    f"{MATCHING}.vllm.enable_lora": "remove it",
    f"{MATCHING}.offload.enabled": "remove it",
    f"{MATCHING}.repeat_terminate.enabled": "remove it",
    f"{MATCHING}.ot_epsilon": "remove it",
    "environment.env_id": "remove the section",
}


@pytest.mark.parametrize("path", MOVED)
def test_a_moved_key_names_its_new_path(problems, path):
    assert problems({path: 1}) == [f"{path}: was removed; use {MOVED[path]}"]


@pytest.mark.parametrize("path", GONE)
def test_a_removed_key_says_what_to_do_instead(problems, path):
    (line,) = problems({path: True})
    assert line.startswith(f"{path}: was removed; ")
    assert GONE[path] in line


@pytest.mark.parametrize("path", LATER)
def test_a_key_of_a_later_version_says_so(problems, path):
    (line,) = problems({path: True})
    assert line.startswith(f"{path}: is not in this version; ")
    assert LATER[path] in line


def test_the_tables_of_this_test_cover_every_retired_key():
    paths = [path.replace("[1]", "[]") for path in (*MOVED, *GONE, *LATER)]
    for retired in RETIRED:
        assert any(f"{path}.".startswith(f"{retired.pattern}.") for path in paths) or f"{MATCHING}.ot_" in retired.pattern, retired.pattern


def test_every_retired_key_is_reported_at_once_with_the_other_problems(problems):
    lines = problems({**dict.fromkeys(MOVED, 1), "custom.extra.rollout_matching": {"a": 1, "b": {"c": 2, "d": 3}}, "training.sed": 1})
    paths = [line.split(": ")[0] for line in lines]
    under_extra = {"custom.extra.rollout_matching.a", "custom.extra.rollout_matching.b.c", "custom.extra.rollout_matching.b.d"}
    elsewhere = {path for path in MOVED if "custom.extra.rollout_matching" not in path}
    assert set(paths) == under_extra | elsewhere | {"training.sed"}
    assert len(paths) == len(set(paths))


def test_a_whole_configuration_in_the_old_place_is_not_called_missing_in_the_new_one(problems, changed):
    minimal = changed({})
    lines = problems(
        {"custom.extra": {"rollout_matching": minimal["rollout_matching"], "stage2_ab": minimal["stage2_ab"]}, "rollout_matching": ..., "stage2_ab": ...}
    )
    assert all(line.startswith("custom.extra.") and ": was removed; use " in line for line in lines)
    assert "custom.extra.rollout_matching.pipeline.objective: was removed; use rollout_matching.pipeline.objective" in lines


def test_anything_else_in_the_old_place_is_unknown(problems):
    (line,) = problems({"custom.extra.else": 1})
    assert line.startswith("custom.extra: is not a known key; ")
