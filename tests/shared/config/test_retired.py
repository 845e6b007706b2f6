"""Removed and moved keys fail by name, and name their successor."""

from __future__ import annotations

import re

import pytest

from shared.config.retired import RETIRED, take_retired

MATCHING = "rollout_matching"
OLD = "custom.extra.rollout_matching"
OLD_CHANNELS = "custom.extra.stage2_ab"
VLLM = f"{MATCHING}.vllm"
SCHEDULE = "stage2_ab.schedule"
# Entries of the minimal configuration, a third of the module whose keys are retired: its other keys
# are there.
COORD_REG = f"{MATCHING}.pipeline.objective[1].config"
BBOX_GEO = f"{MATCHING}.pipeline.objective[2].config"
BBOX_GEO_ENTRY = {
    "name": "bbox_geo",
    "enabled": True,
    "weight": 1.0,
    "channels": ["B"],
    "config": {"smoothl1_weight": 1.0, "ciou_weight": 1.0},
}

REMOVED = "was removed; "

# Key, value, and what its one line says after `key: `.
LEGACY = [
    # The old places.
    (f"{OLD}.decode_batch_size", 4, [REMOVED, f"use {MATCHING}.decode_batch_size"]),
    (f"{OLD}.rollout_backend", "vllm", [REMOVED, f"use {MATCHING}.rollout_backend"]),
    (f"{OLD}.pipeline.objective", [], [REMOVED, f"use {MATCHING}.pipeline.objective"]),
    (f"{OLD}.decoding.temperature", 0.7, [REMOVED, f"use {MATCHING}.decoding.temperature"]),
    (f"{OLD}.decoding.top_p", 0.9, [REMOVED, f"use {MATCHING}.decoding.top_p"]),
    (f"{OLD}.vllm.mode", "server", [REMOVED, f"use {VLLM}.mode"]),
    (f"{OLD}.vllm.sync.mode", "adapter", [REMOVED, f"use {VLLM}.sync.mode"]),
    (f"{OLD}.maskiou_gate", 0.3, [REMOVED, f"use {MATCHING}.maskiou_gate"]),
    (OLD, None, [REMOVED, f"use {MATCHING}"]),
    (f"{OLD_CHANNELS}.schedule.b_ratio", 0.5, [REMOVED, "use stage2_ab.schedule.b_ratio"]),
    (f"{OLD_CHANNELS}.channel_b.mode", "step", [REMOVED, "use stage2_ab.channel_b.mode"]),
    (
        f"{OLD_CHANNELS}.channel_b.rollouts_per_step",
        32,
        [REMOVED, "use stage2_ab.channel_b.rollouts_per_step"],
    ),
    (
        f"{OLD_CHANNELS}.channel_b.enable_pipeline",
        True,
        [REMOVED, "use stage2_ab.channel_b.enable_pipeline"],
    ),
    ("custom.extra.anything", 1, ["is not a known key; remove it", MATCHING, "stage2_ab"]),
    (
        "custom.extra.rollout_matchin.decode_batch_size",
        4,
        ["is not a known key; remove it", MATCHING],
    ),
    ("custom.extra", {}, ["is not a known key; remove it", MATCHING]),
    # The old places of what was retired itself: the last successor, or why there is none.
    (f"{OLD}.temperature", 0.7, [REMOVED, f"use {MATCHING}.decoding.temperature"]),
    (f"{OLD}.top_p", 0.9, [REMOVED, f"use {MATCHING}.decoding.top_p"]),
    (f"{OLD}.top_k", 50, [REMOVED, f"use {MATCHING}.decoding.top_k"]),
    (f"{OLD}.rollout_generate_batch_size", 4, [REMOVED, f"use {MATCHING}.decode_batch_size"]),
    (f"{OLD}.rollout_infer_batch_size", 4, [REMOVED, f"use {MATCHING}.decode_batch_size"]),
    (f"{OLD}.rollout_buffer", {"enabled": True}, [REMOVED, "remove it"]),
    (f"{OLD}.post_rollout_pack_scope", "window", [REMOVED, "remove it"]),
    (
        f"{OLD}.vllm.server.base_url",
        ["http://127.0.0.1:8000"],
        [REMOVED, f"{VLLM}.server.servers[]"],
    ),
    (
        f"{OLD}.repeat_terminate.enabled",
        True,
        [REMOVED, f"use {MATCHING}.repeat_terminate.enabled"],
    ),
    (
        f"{OLD_CHANNELS}.channel_b.decode_batch_size",
        2,
        [REMOVED, f"use {MATCHING}.decode_batch_size"],
    ),
    (f"{OLD_CHANNELS}.pipeline.diagnostics", [], [REMOVED, f"use {MATCHING}.pipeline.diagnostics"]),
    # Batch sizes of decoding.
    (f"{MATCHING}.rollout_generate_batch_size", 4, [REMOVED, f"use {MATCHING}.decode_batch_size"]),
    (f"{MATCHING}.rollout_infer_batch_size", 4, [REMOVED, f"use {MATCHING}.decode_batch_size"]),
    ("stage2_ab.channel_b.decode_batch_size", 2, [REMOVED, f"use {MATCHING}.decode_batch_size"]),
    # Flat decoding keys.
    (f"{MATCHING}.temperature", 0.7, [REMOVED, f"use {MATCHING}.decoding.temperature"]),
    (f"{MATCHING}.top_p", 0.9, [REMOVED, f"use {MATCHING}.decoding.top_p"]),
    (f"{MATCHING}.top_k", 50, [REMOVED, f"use {MATCHING}.decoding.top_k"]),
    # Packing and buffers.
    (f"{MATCHING}.post_rollout_pack_scope", "window", [REMOVED, "remove it"]),
    (f"{MATCHING}.post_rollout_pack_scope", "micro", [REMOVED, "remove it"]),
    (f"{MATCHING}.rollout_buffer", None, [REMOVED, "remove it"]),
    (f"{MATCHING}.rollout_buffer.enabled", False, [REMOVED, "remove it"]),
    ("template.max_length", 12000, [REMOVED, "use global_max_length"]),
    ("training.packing_length", 12000, [REMOVED, "use global_max_length"]),
    ("model.attn_implementation", "sdpa", [REMOVED, "use model.attention"]),
    (f"{VLLM}.sync.transport", "nccl", [REMOVED, "placed decides how weights travel"]),
    # Paired lists of servers.
    (f"{VLLM}.server.base_url", ["http://127.0.0.1:8000"], [REMOVED, f"{VLLM}.server.servers[]"]),
    (f"{VLLM}.server.group_port", [51216], [REMOVED, f"{VLLM}.server.servers[]"]),
    # The objective elsewhere, and by other names.
    (
        "custom.coord_soft_ce_w1",
        None,
        [REMOVED, f"coord_reg entry in {MATCHING}.pipeline.objective"],
    ),
    (
        "custom.coord_soft_ce_w1.enabled",
        True,
        [REMOVED, f"coord_reg entry in {MATCHING}.pipeline.objective"],
    ),
    (
        "custom.coord_soft_ce_w1.soft_ce_weight",
        1.0,
        [REMOVED, f"coord_reg entry in {MATCHING}.pipeline.objective"],
    ),
    ("stage2_ab.pipeline.objective", [], [REMOVED, f"use {MATCHING}.pipeline.objective"]),
    (
        f"{BBOX_GEO}.bbox_smoothl1_weight",
        1.0,
        ["was removed: the key of bbox_geo has another name; ", f"use {BBOX_GEO}.smoothl1_weight"],
    ),
    (
        f"{BBOX_GEO}.bbox_ciou_weight",
        1.0,
        ["was removed: the key of bbox_geo has another name; ", f"use {BBOX_GEO}.ciou_weight"],
    ),
    *(
        (
            f"{COORD_REG}.{alias}",
            1.0,
            ["was removed: the key of coord_reg has another name; ", f"use {COORD_REG}.{name}"],
        )
        for alias, name in {
            "coord_soft_ce_weight": "soft_ce_weight",
            "coord_w1_weight": "w1_weight",
            "gate_weight": "coord_gate_weight",
            "coord_text_gate_weight": "text_gate_weight",
            "coord_temperature": "temperature",
            "coord_target_sigma": "target_sigma",
            "coord_target_truncate": "target_truncate",
            "soft_ce_sigma": "target_sigma",
            "soft_ce_truncate": "target_truncate",
        }.items()
    ),
]


@pytest.mark.parametrize(("path", "value", "fragments"), LEGACY)
def test_legacy_keys_are_refused_by_name_with_what_takes_their_place(
    problems, path, value, fragments
):
    with_box_entry = (
        {f"{MATCHING}.pipeline.objective[2]": BBOX_GEO_ENTRY} if path.startswith(BBOX_GEO) else {}
    )
    (line,) = problems({**with_box_entry, path: value})
    text = line.removeprefix(f"{path}: ")
    if isinstance(value, (dict, list)):
        text = re.sub(rf"^{re.escape(path)}(\[0\])?\.\w+: ", "", text)
    assert text.startswith(fragments[0])
    assert [fragment for fragment in fragments if fragment not in text] == []


@pytest.mark.parametrize(
    ("path", "value"),
    [(path, value) for path, value, fragments in LEGACY if fragments[-1].startswith("use ")],
)
def test_the_successor_that_is_named_is_a_key_of_the_schema(problems, path, value):
    """What stands under the successor is refused for its value, if at all, and never as an unknown
    or retired key.
    """
    (successor,) = (
        fragments[-1].removeprefix("use ") for other, _, fragments in LEGACY if other == path
    )
    changes = (
        {f"{MATCHING}.pipeline.objective[2]": BBOX_GEO_ENTRY} if path.startswith(BBOX_GEO) else {}
    )
    assert not any(
        "known key" in line or "removed" in line for line in problems({**changes, successor: value})
    )


def test_the_table_of_this_test_covers_every_retired_key():
    paths = [re.sub(r"\[\d\]", "[]", path) for path, _, _ in LEGACY]
    for retired in RETIRED:
        assert any(
            re.match(re.escape(retired.pattern).replace(r"\*", "[^.]+") + r"(\.|$)", path)
            for path in paths
        ), retired.pattern


@pytest.mark.parametrize(
    ("path", "successor", "remedy"),
    [
        (f"{OLD}.decode_batchsize", f"{MATCHING}.decode_batchsize", "did you mean 'decode_batch_"),
        (
            f"{OLD}.decoding.temprature",
            f"{MATCHING}.decoding.temprature",
            "did you mean 'temperature'?",
        ),
        (f"{OLD}.temprature", f"{MATCHING}.temprature", f"did you mean '{MATCHING}.decoding.temp"),
        (f"{OLD_CHANNELS}.schedule.zzz", f"{SCHEDULE}.zzz", "the keys here are b_ratio, warmup_st"),
        (f"{OLD}.foo", f"{MATCHING}.foo", "the keys here are pipeline, rollout_backend, "),
    ],
)
def test_a_value_in_the_old_place_is_checked_in_the_new_one(problems, path, successor, remedy):
    retired, unknown = problems({path: 1})
    assert retired == f"{path}: was removed; use {successor}"
    assert unknown.startswith(f"{successor}: is not a known key; {remedy}")


def test_an_alias_in_the_place_of_its_successor_is_one_problem(problems):
    """The key under its new name is missing only because it stands under the old one."""
    path = f"{MATCHING}.pipeline.objective[2]"
    entry = BBOX_GEO_ENTRY | {"config": {"bbox_smoothl1_weight": 1.0, "bbox_ciou_weight": 1.0}}
    lines = problems({path: entry})
    assert [line.split(": ")[0] for line in lines] == [
        f"{path}.config.bbox_smoothl1_weight",
        f"{path}.config.bbox_ciou_weight",
    ]


def test_every_retired_key_is_reported_at_once_with_the_other_problems(problems):
    changes = {
        path: value
        for path, value, _ in LEGACY
        if not path.startswith(BBOX_GEO)
        and path not in (OLD, "custom.extra", "custom.coord_soft_ce_w1")
    }
    changes = {
        path: value for path, value in changes.items() if path != f"{MATCHING}.rollout_buffer"
    }
    paths = [line.split(": ")[0] for line in problems({**changes, "training.sed": 1})]
    assert sorted(paths) == sorted(
        {*changes, "training.sed", f"{OLD}.rollout_buffer.enabled"} - {f"{OLD}.rollout_buffer"}
    )


def test_a_whole_configuration_in_the_old_place_is_not_called_missing_in_the_new_one(
    problems, changed
):
    minimal = changed({})
    lines = problems(
        {
            "custom.extra": {
                "rollout_matching": minimal["rollout_matching"],
                "stage2_ab": minimal["stage2_ab"],
            },
            "rollout_matching": ...,
            "stage2_ab": ...,
        }
    )
    assert all(line.startswith("custom.extra.") and ": was removed; use " in line for line in lines)
    assert (
        "custom.extra.rollout_matching.pipeline.objective: was removed; use"
        " rollout_matching.pipeline.objective" in lines
    )


def test_a_resolved_configuration_holds_no_retired_key(load):
    assert take_retired(load({}).model_dump(mode="json")) == []
