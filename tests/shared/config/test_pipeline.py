"""Entries of the pipeline are explicit, complete and canonical.

Requirements "Rollout pipeline specs are explicit and complete", "Rollout pipeline module configs
are strict and canonical" and "Rollout-aligned Stage-2 supports text_gate via coord_reg module
config".
"""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from config_changes import (
    ALIGNED,
    BBOX_GEO,
    DIAGNOSTICS,
    OBJECTIVE,
    entry,
    load,
    load_trajectories,
    problems,
)

from shared.config import pipeline as schema
from shared.config.pipeline import Channel

CONFIGS: dict[str, dict[str, Any]] = {
    "token_ce": {
        "desc_ce_weight": 1.0,
        "rollout_fn_desc_weight": 0.0,
        "rollout_matched_prefix_struct_weight": 0.0,
    },
    "coord_reg": {
        "coord_ce_weight": 0.0,
        "soft_ce_weight": 1.0,
        "w1_weight": 1.0,
        "coord_gate_weight": 1.0,
        "text_gate_weight": 0.5,
        "temperature": 1.0,
        "target_sigma": 2.0,
        "target_truncate": None,
    },
    "bbox_geo": {"smoothl1_weight": 1.0, "ciou_weight": 1.0},
    "policy_gradient": {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "ratio_cap": 3.0,
        "normalize": "step",
        "advantage_std": False,
    },
    "reference_kl": {"estimator": "k3"},
    "coord_diag": {},
}
"""Every module of this version with all the keys of its config (decision 37)."""
OPTIONAL = {
    "token_ce": ["matched_desc_weight", "fp_end_weight", "label_smoothing"],
    "policy_gradient": [
        "advantage_epsilon",
        "advantage_baseline",
        "ratio_level",
        "clip",
        "above_cap",
    ],
    "reference_kl": ["top_tokens"],
}
"""Keys beside them that have a default."""
ENTRIES = {
    name: entry(name, *("B" if name in ("policy_gradient", "reference_kl") else "AB"), **config)
    for name, config in CONFIGS.items()
}
ALL_KEYS = [(name, key) for name, config in CONFIGS.items() for key in config]
IMPORTED = entry("mine.focal_text:FocalText", gamma=2.0)


def without(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}


def lists_with(name: str, changed: dict[str, Any]) -> dict[str, Any]:
    """Both lists complete, with one entry replaced."""
    entries = ENTRIES | {name: changed}
    diagnostic = entries.pop("coord_diag")
    return {OBJECTIVE: list(entries.values()), DIAGNOSTICS: [diagnostic]}


def lists_with_config(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return lists_with(name, ENTRIES[name] | {"config": config})


def path(name: str) -> str:
    if name == "coord_diag":
        return f"{DIAGNOSTICS}[0]"
    return f"{OBJECTIVE}[{list(CONFIGS).index(name)}]"


def names(entries):
    return [one.name for one in entries]


def test_all_modules_written_out_in_full_are_accepted_and_listed_by_channel():
    lists = lists_with("bbox_geo", BBOX_GEO)
    lists |= {f"{path(name)}.enabled": False for name in ("policy_gradient", "reference_kl")}
    pipeline = load(lists).rollout_matching.pipeline
    assert names(pipeline.active(Channel.A)) == ["token_ce", "coord_reg"]
    assert names(pipeline.active(Channel.B)) == ["token_ce", "coord_reg", "bbox_geo"]
    assert names(pipeline.active_diagnostics(Channel.B)) == ["coord_diag"]
    disabled = load({f"{OBJECTIVE}[0].enabled": False}).rollout_matching.pipeline
    assert names(disabled.active(Channel.A)) == ["coord_reg"]
    of_trajectories = load_trajectories({OBJECTIVE: [ENTRIES["policy_gradient"]]})
    pipeline = of_trajectories.rollout_matching.pipeline
    assert names(pipeline.active(Channel.B)) == ["policy_gradient"]
    assert pipeline.active(Channel.A) == ()


@pytest.mark.parametrize("key", ["name", "enabled", "weight", "channels", "config"])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_entry_without_one_of_its_keys_is_refused(name, key):
    (line,) = problems(lists_with(name, without(ENTRIES[name], key)))
    assert line.startswith(f"{path(name)}.{key}: is required, and missing; ")
    if (name, key) == ("coord_diag", "config"):
        assert "; add it, for example `config: {}` (" in line


@pytest.mark.parametrize(("name", "key"), ALL_KEYS)
def test_a_config_without_one_of_its_keys_is_refused(name, key):
    (line,) = problems(lists_with_config(name, without(CONFIGS[name], key)))
    assert line.startswith(f"{path(name)}.config.{key}: is required, and missing; add it")


@pytest.mark.parametrize("name", CONFIGS)
def test_unknown_keys_of_an_entry_and_of_its_config_are_refused_with_list_indices(name):
    changed = ENTRIES[name] | {"wieght": 1.0, "config": CONFIGS[name] | {"unknown": 1.0}}
    keys = sorted([*CONFIGS[name], *OPTIONAL.get(name, [])])
    in_config, in_entry = sorted(problems(lists_with(name, changed)))
    assert in_config.startswith(f"{path(name)}.config.unknown: is not a known key; ")
    assert sorted(re.findall(r"\w+", in_config.partition("the keys here are ")[2])) == keys
    assert re.match(rf"{re.escape(path(name))}\.wieght: .*known key; .*'weight'", in_entry)


@pytest.mark.parametrize(
    "alias", ["bbox_smoothl1_weight", "bbox_ciou_weight", "coord_soft_ce_weight", "coord_w1_weight"]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_an_alias_is_refused_in_the_config_of_every_module(name, alias):
    (line,) = problems(lists_with_config(name, CONFIGS[name] | {alias: 1.0}))
    assert line.startswith(f"{path(name)}.config.{alias}: is not a known key; ")


def test_this_test_and_the_refusals_know_every_module_of_the_schema():
    objectives = [get_args(kind)[0] for kind in get_args(schema.ObjectiveEntry)]
    kinds = [*objectives, schema.CoordDiagEntry]
    kinds.remove(schema.ImportedEntry)
    keys_of = {
        get_args(kind.model_fields["name"].annotation)[0]: list(
            kind.model_fields["config"].annotation.model_fields
        )
        for kind in kinds
    }
    assert {name: sorted(keys) for name, keys in keys_of.items()} == {
        name: sorted([*config, *OPTIONAL.get(name, [])]) for name, config in CONFIGS.items()
    }
    (line,) = problems({f"{OBJECTIVE}[0].name": "nothing_like_it"})
    listed = [*list(keys_of)[:-1], schema.IMPORTED]
    assert line.rpartition("; choose one of ")[2].split(", ") == listed


@pytest.mark.parametrize("load", [load, load_trajectories])
def test_an_imported_objective_may_be_listed_with_any_variant(load):
    config = load({f"{OBJECTIVE}[1]": IMPORTED})
    one = config.rollout_matching.pipeline.objective[1]
    assert (one.name, one.config) == (IMPORTED["name"], {"gamma": 2.0})
    # As the run's folder keeps it.
    assert type(config).model_validate_json(config.model_dump_json()) == config


def test_a_policy_gradient_of_weight_0_learns_nothing_whatever_stands_next_to_it():
    silent = {f"{OBJECTIVE}[0].weight": 0.0}
    for changes in (silent, {**silent, f"{OBJECTIVE}[1]": IMPORTED}):
        (line,) = problems(changes, load_trajectories)
        assert line.startswith("rollout_matching.pipeline.objective: ")


OWN_CREDIT = IMPORTED | {
    "channels": ["B"],
    "advantages": {"normalize": "batch", "advantage_std": False},
}


def test_an_imported_policy_gradient_decides_the_advantages_in_place_of_the_built_in():
    pipeline = load_trajectories({OBJECTIVE: [OWN_CREDIT]}).rollout_matching.pipeline
    assert pipeline.policy_gradient == schema.AdvantageConfig(**OWN_CREDIT["advantages"])
    assert pipeline.divides_by_tokens
    assert load({f"{OBJECTIVE}[1]": IMPORTED}).rollout_matching.pipeline.policy_gradient is None


@pytest.mark.parametrize(
    ("load_from", "changes", "path_and_value"),
    [
        (load_trajectories, {OBJECTIVE: [OWN_CREDIT | {"weight": 0.0}]}, ": has no enabled"),
        (load_trajectories, {OBJECTIVE: [without(OWN_CREDIT, "advantages")]}, ": has no enabled"),
        (
            load_trajectories,
            {OBJECTIVE: [OWN_CREDIT | {"channels": ["A", "B"]}]},
            r"[0].channels: must be [B], got [A, B]",
        ),
        (load_trajectories, {f"{OBJECTIVE}[1]": OWN_CREDIT}, "[1].advantages: is a second"),
        (
            load_trajectories,
            {OBJECTIVE: [OWN_CREDIT | {"advantages": {"normalize": "step"}}]},
            "[0].advantages.advantage_std: is required, and missing",
        ),
        (
            load_trajectories,
            {f"{OBJECTIVE}[0].config.advantage_baseline": "median"},
            "[0].config.advantage_baseline: 'median' is not mean, leave_one_out or module:function",
        ),
        (
            load,
            {"custom.trainer_variant": "stage1_sft", f"{OBJECTIVE}[1]": OWN_CREDIT},
            "[1].name: 'mine.focal_text:FocalText' has no advantages to learn from",
        ),
    ],
)
def test_an_imported_policy_gradient_that_cannot_decide_them_is_refused(
    load_from, changes, path_and_value
):
    lines = problems(changes, load_from)
    assert any(line.startswith(f"{OBJECTIVE}{path_and_value}") for line in lines), lines


TEACHER = {"base_url": "http://127.0.0.1:8000", "model": "m"}


@pytest.mark.parametrize(
    ("changes", "drops"),
    [
        ({}, True),
        ({f"{OBJECTIVE}[1]": ENTRIES["reference_kl"] | {"enabled": False}}, True),
        ({f"{OBJECTIVE}[1]": ENTRIES["reference_kl"]}, False),
        ({f"{OBJECTIVE}[1]": IMPORTED}, False),
        ({OBJECTIVE: [OWN_CREDIT]}, False),
        ({"environment.teacher": TEACHER}, False),
        ({"environment.drop_equal_groups": False}, False),
        ({f"{OBJECTIVE}[1]": IMPORTED, "environment.drop_equal_groups": True}, True),
    ],
)
def test_groups_with_equal_rewards_are_left_out_where_only_a_policy_gradient_learns(changes, drops):
    config = load_trajectories(changes)
    assert config.environment.drops_equal(config.rollout_matching.pipeline) is drops


def test_boxes_alone_contribute_to_bbox_geo_so_the_aligned_variant_may_list_it():
    """`stage2_rollout_aligned` handles polygons as well: they simply have no box slots."""
    pipeline = load({**ALIGNED, f"{OBJECTIVE}[2]": BBOX_GEO}).rollout_matching.pipeline
    assert names(pipeline.active(Channel.B)) == ["token_ce", "coord_reg", "bbox_geo"]
