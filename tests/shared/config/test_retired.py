"""Removed and moved keys fail by name, and name their successor."""

from __future__ import annotations

import re

import pytest
from config_changes import BBOX_GEO, MATCHING, OBJECTIVE, VLLM, changed, load, problems

from shared.config.retired import RETIRED, take_retired

OLD = "custom.extra.rollout_matching"
OLD_CHANNELS = "custom.extra.stage2_ab"
# Entries of the minimal configuration, and a third of the module whose keys are retired: its other
# keys are there.
COORD_REG = f"{OBJECTIVE}[1].config"
BOXES = f"{OBJECTIVE}[2].config"

MOVED = {
    # The old places.
    f"{OLD}.decode_batch_size": (4, f"{MATCHING}.decode_batch_size"),
    f"{OLD}.rollout_backend": ("vllm", f"{MATCHING}.rollout_backend"),
    f"{OLD}.pipeline.objective": ([], OBJECTIVE),
    f"{OLD}.decoding.temperature": (0.7, f"{MATCHING}.decoding.temperature"),
    f"{OLD}.vllm.sync.mode": ("adapter", f"{VLLM}.sync.mode"),
    OLD: (None, MATCHING),
    f"{OLD_CHANNELS}.schedule.b_ratio": (0.5, "stage2_ab.schedule.b_ratio"),
    f"{OLD_CHANNELS}.channel_b.enable_pipeline": (True, "stage2_ab.channel_b.enable_pipeline"),
    # The old places of what was retired itself: the last successor.
    **{
        f"{OLD}.{key}": (value, f"{MATCHING}.{successor}")
        for key, value, successor in (
            ("temperature", 0.7, "decoding.temperature"),
            ("top_p", 0.9, "decoding.top_p"),
            ("top_k", 50, "decoding.top_k"),
            ("rollout_generate_batch_size", 4, "decode_batch_size"),
            ("rollout_infer_batch_size", 4, "decode_batch_size"),
            ("repeat_terminate.enabled", True, "repeat_terminate.enabled"),
        )
    },
    f"{OLD_CHANNELS}.channel_b.decode_batch_size": (2, f"{MATCHING}.decode_batch_size"),
    f"{OLD_CHANNELS}.pipeline.diagnostics": ([], f"{MATCHING}.pipeline.diagnostics"),
    # Other keys.
    f"{MATCHING}.rollout_generate_batch_size": (4, f"{MATCHING}.decode_batch_size"),
    f"{MATCHING}.rollout_infer_batch_size": (4, f"{MATCHING}.decode_batch_size"),
    "stage2_ab.channel_b.decode_batch_size": (2, f"{MATCHING}.decode_batch_size"),
    f"{MATCHING}.temperature": (0.7, f"{MATCHING}.decoding.temperature"),
    f"{MATCHING}.top_p": (0.9, f"{MATCHING}.decoding.top_p"),
    f"{MATCHING}.top_k": (50, f"{MATCHING}.decoding.top_k"),
    "template.max_length": (12000, "global_max_length"),
    "training.packing_length": (12000, "global_max_length"),
    "model.attn_implementation": ("sdpa", "model.attention"),
    "stage2_ab.pipeline.objective": ([], OBJECTIVE),
}
RENAMED = {
    f"{BOXES}.bbox_smoothl1_weight": "smoothl1_weight",
    f"{BOXES}.bbox_ciou_weight": "ciou_weight",
    f"{COORD_REG}.coord_soft_ce_weight": "soft_ce_weight",
    f"{COORD_REG}.coord_w1_weight": "w1_weight",
    f"{COORD_REG}.gate_weight": "coord_gate_weight",
    f"{COORD_REG}.coord_text_gate_weight": "text_gate_weight",
    f"{COORD_REG}.coord_temperature": "temperature",
    f"{COORD_REG}.coord_target_sigma": "target_sigma",
    f"{COORD_REG}.coord_target_truncate": "target_truncate",
    f"{COORD_REG}.soft_ce_sigma": "target_sigma",
    f"{COORD_REG}.soft_ce_truncate": "target_truncate",
}
SETTINGS = "is not a known key; remove it: its settings are keys of rollout_matching and stage2_ab"
SCOPE = "was removed; remove it: custom.trainer_variant decides it"
BUFFER = "was removed; remove it; to overlap rollout and learning set stage2_ab.channel_b.enable_pi"
SERVERS = f"was removed; list servers as {VLLM}.server.servers[], with base_url and group_port"
COORD_LOSS = (
    f"was removed; declare a coord_reg entry in {OBJECTIVE}, with soft_ce_weight and w1_weight"
)
GONE = [
    ("custom.extra.anything", 1, SETTINGS),
    ("custom.extra.rollout_matchin.decode_batch_size", 4, SETTINGS),
    ("custom.extra", {}, SETTINGS),
    (f"{OLD}.post_rollout_pack_scope", "window", SCOPE),
    *((f"{MATCHING}.post_rollout_pack_scope", value, SCOPE) for value in ("window", "micro", None)),
    (f"{MATCHING}.post_rollout_pack_scope.scope", "window", SCOPE),
    (f"{OLD}.rollout_buffer.enabled", True, BUFFER),
    (f"{MATCHING}.rollout_buffer", None, BUFFER),
    (f"{MATCHING}.rollout_buffer", {}, BUFFER),
    (f"{MATCHING}.rollout_buffer.enabled", False, BUFFER),
    (f"{VLLM}.sync.transport", "nccl", "was removed; remove it: where learner and engines are"),
    (f"{OLD}.vllm.server.base_url", ["http://a:1"], SERVERS),
    (f"{VLLM}.server.base_url", ["http://a:1"], SERVERS),
    (f"{VLLM}.server.group_port", [51216], SERVERS),
    ("custom.coord_soft_ce_w1", None, COORD_LOSS),
    ("custom.coord_soft_ce_w1.enabled", True, COORD_LOSS),
    ("custom.coord_soft_ce_w1.soft_ce_weight", 1.0, COORD_LOSS),
]
LEGACY = [
    *((path, value, f"was removed; use {successor}") for path, (value, successor) in MOVED.items()),
    *(
        (
            path,
            1.0,
            (
                f"was removed: the key of {'bbox_geo' if path.startswith(BOXES) else 'coord_reg'} has"
                f" another name; use {path.rpartition('.')[0]}.{name}"
            ),
        )
        for path, name in RENAMED.items()
    ),
    *GONE,
]
"""Key, value, and the beginning of its one line after the key."""


def with_its_entry(path, changes):
    return {**({f"{OBJECTIVE}[2]": BBOX_GEO} if path.startswith(BOXES) else {}), **changes}


@pytest.mark.parametrize(("path", "value", "expected"), LEGACY)
def test_legacy_keys_are_refused_by_name_with_what_takes_their_place(path, value, expected):
    (line,) = problems(with_its_entry(path, {path: value}))
    assert line.startswith(f"{path}: {expected}")


@pytest.mark.parametrize(
    ("path", "value", "expected"), [row for row in LEGACY if "; use " in row[2]]
)
def test_the_successor_that_is_named_is_a_key_of_the_schema(path, value, expected):
    """A value under the successor is refused for itself, if at all."""
    successor = expected.partition("; use ")[2]
    lines = problems(with_its_entry(path, {successor: value}))
    assert not any("known key" in line or "removed" in line for line in lines)


def test_the_table_of_this_test_covers_every_retired_key():
    paths = [re.sub(r"\[\d\]", "[]", path) for path, _, _ in LEGACY]
    for retired in RETIRED:
        assert any(
            path == retired.pattern or path.startswith(f"{retired.pattern}.") for path in paths
        )


@pytest.mark.parametrize(
    ("path", "successor", "remedy"),
    [
        (f"{OLD}.decode_batchsize", f"{MATCHING}.decode_batchsize", "did you mean 'decode_batch_"),
        (f"{OLD}.temprature", f"{MATCHING}.temprature", f"did you mean '{MATCHING}.decoding.temp"),
        (
            f"{OLD}.decoding.temprature",
            f"{MATCHING}.decoding.temprature",
            "did you mean 'temperature'?",
        ),
        (
            f"{OLD_CHANNELS}.schedule.zzz",
            "stage2_ab.schedule.zzz",
            "the keys here are b_ratio, warmup_st",
        ),
        (f"{OLD}.foo", f"{MATCHING}.foo", "the keys here are pipeline, rollout_backend, "),
    ],
)
def test_a_value_in_the_old_place_is_checked_in_the_new_one(path, successor, remedy):
    retired, unknown = problems({path: 1})
    assert retired == f"{path}: was removed; use {successor}"
    assert unknown.startswith(f"{successor}: is not a known key; {remedy}")


def test_an_alias_in_the_place_of_its_successor_is_one_problem():
    """The key under its new name is missing only because it stands under the old one."""
    config = {"bbox_smoothl1_weight": 1.0, "bbox_ciou_weight": 1.0}
    lines = problems({f"{OBJECTIVE}[2]": BBOX_GEO | {"config": config}})
    assert [line.split(": ")[0] for line in lines] == [f"{BOXES}.{key}" for key in config]


def test_every_retired_key_is_reported_at_once_with_the_other_problems():
    """One whose value would be replaced by another one's is left out."""
    paths = [path for path, _, _ in LEGACY if not path.startswith(BOXES)]
    leaves = {path for path in paths if not any(other.startswith(f"{path}.") for other in paths)}
    changes = {path: value for path, value, _ in LEGACY if path in leaves}
    lines = problems({**changes, "training.sed": 1})
    assert sorted(line.split(": ")[0] for line in lines) == sorted([*changes, "training.sed"])


def test_a_whole_configuration_in_the_old_place_is_not_called_missing_in_the_new_one():
    minimal = changed({})
    moved = {name: minimal[name] for name in ("rollout_matching", "stage2_ab")}
    lines = problems({"custom.extra": moved, "rollout_matching": ..., "stage2_ab": ...})
    assert all(line.startswith("custom.extra.") and ": was removed; use " in line for line in lines)
    assert f"{OLD}.pipeline.objective: was removed; use {OBJECTIVE}" in lines


def test_a_resolved_configuration_holds_no_retired_key():
    assert take_retired(load({}).model_dump(mode="json")) == []
