"""Entries of the pipeline are explicit, complete and canonical: every key written, every key known,
each module in its list.

Requirements "Rollout pipeline specs are explicit and complete", "Rollout pipeline module configs
are strict and canonical" and "Rollout-aligned Stage-2 supports text_gate via coord_reg module
config".
"""

from __future__ import annotations

from typing import Any, get_args

import pytest

from shared.config import pipeline as schema
from shared.config.pipeline import Channel

PIPELINE = "rollout_matching.pipeline"
OBJECTIVE = f"{PIPELINE}.objective"
DIAGNOSTICS = f"{PIPELINE}.diagnostics"

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
    "coord_diag": {},
}
"""Every module of this version with all the keys of its config (decision 37)."""
OPTIONAL = {"policy_gradient": ["advantage_epsilon"]}
"""Keys beside them that have a default."""

MODULES = [
    pytest.param(DIAGNOSTICS if name == "coord_diag" else OBJECTIVE, name, id=name)
    for name in CONFIGS
]


def entry(name: str) -> dict[str, Any]:
    channels = ["B"] if name == "policy_gradient" else ["A", "B"]
    return {
        "name": name,
        "enabled": True,
        "weight": 1.0,
        "channels": channels,
        "config": CONFIGS[name],
    }


def without(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}


def lists_with(name: str, changed: dict[str, Any]) -> dict[str, Any]:
    """Both lists complete, with one entry replaced."""
    entries = {other: changed if other == name else entry(other) for other in CONFIGS}
    return {
        OBJECTIVE: [one for other, one in entries.items() if other != "coord_diag"],
        DIAGNOSTICS: [entries["coord_diag"]],
    }


def place(name: str) -> str:
    return (
        f"{DIAGNOSTICS}[0]" if name == "coord_diag" else f"{OBJECTIVE}[{list(CONFIGS).index(name)}]"
    )


def test_all_modules_written_out_in_full_are_accepted_and_listed_by_channel(
    load, load_trajectories
):
    lists = lists_with("bbox_geo", entry("bbox_geo") | {"channels": ["B"]})
    pipeline = load(
        lists | {f"{place('policy_gradient')}.enabled": False}
    ).rollout_matching.pipeline
    assert [one.name for one in pipeline.active(Channel.A)] == ["token_ce", "coord_reg"]
    assert [one.name for one in pipeline.active(Channel.B)] == ["token_ce", "coord_reg", "bbox_geo"]
    assert [one.name for one in pipeline.active_diagnostics(Channel.B)] == ["coord_diag"]
    pipeline = load_trajectories({OBJECTIVE: [entry("policy_gradient")]}).rollout_matching.pipeline
    assert [one.name for one in pipeline.active(Channel.B)] == ["policy_gradient"]
    assert pipeline.active(Channel.A) == ()


@pytest.mark.parametrize("key", ["name", "enabled", "weight", "channels", "config"])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_entry_without_one_of_its_keys_is_refused(problems, name, key):
    (line,) = problems(lists_with(name, without(entry(name), key)))
    assert line.startswith(f"{place(name)}.{key}: is required, and missing; ")


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, config in CONFIGS.items() for key in config]
)
def test_a_config_without_one_of_its_keys_is_refused(problems, name, key):
    (line,) = problems(lists_with(name, entry(name) | {"config": without(CONFIGS[name], key)}))
    assert line.startswith(f"{place(name)}.config.{key}: is required, and missing; add it")


@pytest.mark.parametrize("name", CONFIGS)
def test_unknown_keys_of_an_entry_and_of_its_config_are_refused_with_list_indices(problems, name):
    lines = problems(
        lists_with(name, entry(name) | {"wieght": 1.0, "config": CONFIGS[name] | {"unknown": 1.0}})
    )
    keys = [*CONFIGS[name], *OPTIONAL.get(name, [])]
    known = f"the keys here are {', '.join(keys)}" if keys else "remove it, nothing is set here"
    assert sorted(lines) == sorted(
        [
            f"{place(name)}.config.unknown: is not a known key; {known}",
            f"{place(name)}.wieght: is not a known key; did you mean 'weight'?",
        ]
    )


@pytest.mark.parametrize(
    "alias", ["bbox_smoothl1_weight", "bbox_ciou_weight", "coord_soft_ce_weight", "coord_w1_weight"]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_an_alias_is_refused_in_the_config_of_every_module(problems, name, alias):
    """In a module without the successor that is unknown too."""
    line, *others = problems(
        lists_with(name, entry(name) | {"config": CONFIGS[name] | {alias: 1.0}})
    )
    assert line.startswith(f"{place(name)}.config.{alias}: ")
    successor = line.rpartition("; use ")[2]
    assert [other for other in others if not other.startswith(f"{successor}: is not a known")] == []


@pytest.mark.parametrize(
    "key", ["smoothl1_weight", "text_gate_weight", "desc_ce_weight", "clip_low"]
)
def test_a_key_of_another_module_is_unknown(problems, key):
    owners = [name for name, config in CONFIGS.items() if key in config]
    for name in (name for name in CONFIGS if name not in owners):
        (line,) = problems(lists_with(name, entry(name) | {"config": CONFIGS[name] | {key: 1.0}}))
        assert line.startswith(f"{place(name)}.config.{key}: is not a known key; ")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (name, key)
        for name, config in CONFIGS.items()
        for key in config
        if key.endswith("_weight") or key in ("clip_low", "clip_high")
    ],
)
def test_weights_are_not_negative(problems, name, key):
    (line,) = problems(lists_with(name, entry(name) | {"config": CONFIGS[name] | {key: -0.5}}))
    assert line.startswith(f"{place(name)}.config.{key}: must be at least 0, got -0.5; ")


@pytest.mark.parametrize(
    ("channels", "wrong"),
    [
        ([], "must not be empty"),
        (["C"], "must be one of A, B, got the text 'C'"),
        ("A", "must be a list, got "),
    ],
)
@pytest.mark.parametrize("name", ["bbox_geo", "coord_diag"])
def test_channels_are_a_subset_of_a_and_b(problems, name, channels, wrong):
    (line,) = problems(lists_with(name, entry(name) | {"channels": channels}))
    assert line.startswith(f"{place(name)}.channels") and wrong in line


@pytest.mark.parametrize("wrong", [None, [], 3])
def test_the_empty_config_of_a_diagnostic_is_written_as_a_mapping(problems, wrong):
    (line,) = problems(lists_with("coord_diag", entry("coord_diag") | {"config": wrong}))
    assert line.startswith(
        f"{DIAGNOSTICS}[0].config: must be a mapping of keys, got "
    ) and line.endswith("; write {}, it has no keys")


def test_a_missing_empty_config_says_how_it_is_written(problems):
    (line,) = problems(lists_with("coord_diag", without(entry("coord_diag"), "config")))
    assert line.startswith(
        f"{DIAGNOSTICS}[0].config: is required, and missing; add it, for example `config: {{}}` ("
    )


def test_a_diagnostic_in_the_objective_and_an_objective_in_the_diagnostics_are_sent_to_their_list(
    problems,
):
    assert problems({f"{OBJECTIVE}[2]": entry("coord_diag")}) == [
        (
            f"{OBJECTIVE}[2].name: 'coord_diag' is a diagnostic, which nothing is learned from; move"
            f" the entry to {DIAGNOSTICS}"
        )
    ]
    for name in (name for name in CONFIGS if name != "coord_diag"):
        assert problems({f"{DIAGNOSTICS}[0]": entry(name)}) == [
            (
                f"{DIAGNOSTICS}[0].name: '{name}' is an objective module, and would not be learned from"
                f" here; move the entry to {OBJECTIVE}"
            )
        ]


def test_a_diagnostic_that_does_not_exist_is_refused(problems):
    assert problems({f"{DIAGNOSTICS}[0]": entry("coord_diag") | {"name": "coord_dig"}}) == [
        (
            f"{DIAGNOSTICS}[0].name: must be coord_diag, got the text 'coord_dig'; did you mean"
            " 'coord_diag'?"
        )
    ]


def test_this_test_and_the_refusals_know_every_module_of_the_schema(problems):
    kinds = [*get_args(schema.ObjectiveEntry), schema.CoordDiagEntry]
    kinds.remove(schema.ImportedEntry)
    entries = {get_args(one.model_fields["name"].annotation)[0]: one for one in kinds}
    assert {
        name: list(one.model_fields["config"].annotation.model_fields)
        for name, one in entries.items()
    } == {name: [*config, *OPTIONAL.get(name, [])] for name, config in CONFIGS.items()}
    (line,) = problems({f"{OBJECTIVE}[0].name": "nothing_like_it"})
    listed = [*list(entries)[:-1], schema.IMPORTED]
    assert line.rpartition("; choose one of ")[2].split(", ") == listed


IMPORTED = {
    "name": "mine.focal_text:FocalText",
    "enabled": True,
    "weight": 1.0,
    "channels": ["A", "B"],
    "config": {"gamma": 2.0},
}


@pytest.mark.parametrize("variant", ["load", "load_trajectories"])
def test_an_imported_objective_may_be_listed_with_any_variant(request, variant):
    config = request.getfixturevalue(variant)({f"{OBJECTIVE}[1]": IMPORTED})
    entry = config.rollout_matching.pipeline.objective[1]
    assert (entry.name, entry.config) == (IMPORTED["name"], {"gamma": 2.0})
    # As the run's folder keeps it.
    kept = type(config).model_validate_json(config.model_dump_json())
    assert kept == config


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": "mine/focal_text.py:FocalText"}, "name: 'mine/focal_text.py:FocalText' is not "),
        ({"name": "mine.focal_text:"}, "name: 'mine.focal_text:' is not module:Class; write the "),
        ({"weight": -1.0}, "weight: must be at least 0, got -1"),
        ({"config": 3}, "config: must be a mapping of keys, got 3; "),
        ({"wieght": 1.0}, "wieght: is not a known key; did you mean 'weight'?"),
    ],
)
def test_an_imported_entry_is_checked_like_any_other(problems, changes, expected):
    (line,) = problems({f"{OBJECTIVE}[2]": IMPORTED | changes})
    assert line.startswith(f"{OBJECTIVE}[2].{expected}")


def test_an_imported_objective_in_the_diagnostics_is_sent_to_its_list(problems):
    (line,) = problems({f"{DIAGNOSTICS}[0]": IMPORTED})
    assert line.endswith(f"; move the entry to {OBJECTIVE}")


def test_an_imported_objective_is_the_only_one_of_its_class_on_a_channel(problems):
    (line,) = problems({f"{OBJECTIVE}[2]": IMPORTED, f"{OBJECTIVE}[3]": IMPORTED})
    assert "is active on channel A and B already" in line


@pytest.mark.parametrize("channels", [["A"], ["A", "B"], ["B", "A"]])
def test_the_channels_of_policy_gradient_are_b_alone(problems, channels):
    (line,) = problems(
        lists_with("policy_gradient", entry("policy_gradient") | {"channels": channels})
    )
    assert (
        line
        == f"{place('policy_gradient')}.channels: must be [B], got [{', '.join(channels)}]: only"
        " what the model sampled itself has a policy gradient; write [B]"
    )


@pytest.mark.parametrize(
    ("key", "value", "wrong"),
    [
        ("clip_low", 1.5, "must be at most 1, got 1.5; "),
        ("ratio_cap", 1.0, "must be greater than 1, got 1.0; "),
        ("normalize", "token", "must be one of step, rollout, constant, got the text 'token'; "),
        (
            "normalize",
            "segment",
            (
                "'segment' was removed: it depended on which calls of the model had been merged;"
                " use step, where"
            ),
        ),
        ("advantage_std", 1, "must be true or false, got "),
        ("advantage_epsilon", -1e-4, "must be at least 0, got -0.0001; "),
    ],
)
def test_settings_of_policy_gradient_that_mean_nothing_are_refused(problems, key, value, wrong):
    (line,) = problems(
        lists_with(
            "policy_gradient",
            entry("policy_gradient") | {"config": CONFIGS["policy_gradient"] | {key: value}},
        )
    )
    assert line.startswith(f"{place('policy_gradient')}.config.{key}: {wrong}")


def test_boxes_alone_contribute_to_bbox_geo_so_the_aligned_variant_may_list_it(load):
    """`stage2_rollout_aligned` handles polygons as well: they simply have no box slots."""
    changes = {
        "custom.trainer_variant": "stage2_rollout_aligned",
        "stage2_ab": ...,
        f"{OBJECTIVE}[2]": entry("bbox_geo"),
    }
    assert [one.name for one in load(changes).rollout_matching.pipeline.active(Channel.B)] == [
        "token_ce",
        "coord_reg",
        "bbox_geo",
    ]


def test_a_wrong_entry_beside_a_missing_list_is_reported_with_it(problems):
    """The example that stands in for the pipeline has no such entry, so its place is gone while the
    rest is checked.
    """
    lines = problems({OBJECTIVE: ..., f"{DIAGNOSTICS}[0]": without(entry("coord_diag"), "config")})
    assert [line.split(": ")[0] for line in lines] == [OBJECTIVE, f"{DIAGNOSTICS}[0].config"]
