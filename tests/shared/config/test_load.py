from __future__ import annotations

import pickle
from types import MappingProxyType

import pytest
from config_changes import (
    ALIGNED,
    HF,
    MATCHING,
    SERVERS,
    STAGE1,
    TEMPERATURE,
    VLLM,
    changed,
    load,
    load_trajectories,
)
from pydantic import ValidationError

from shared.config import RunConfig, load_config
from shared.config.algorithm import TrainerVariant
from shared.config.base import Section
from shared.config.explain import sections_in
from shared.config.pipeline import Channel
from shared.errors import ConfigError
from shared.rollouts import DecodeMode


def all_sections(root: type[Section] = RunConfig) -> set[type[Section]]:
    below = [part for field in root.model_fields.values() for part in sections_in(field.annotation)]
    return {root}.union(*map(all_sections, below))


@pytest.mark.parametrize(
    ("variant", "kinds"),
    [
        ("stage1_sft", {"bbox_2d", "poly"}),
        ("stage2_rollout_aligned", {"bbox_2d", "poly"}),
        ("stage2_two_channel", {"bbox_2d"}),
    ],
)
def test_the_minimal_configuration_loads_with_every_variant_which_decides_the_kinds_of_geometry(
    variant, kinds
):
    """Its schedule has no effect but under stage2_two_channel, and its budget is the effective
    batch size.
    """
    changes = {"custom.trainer_variant": variant}
    run = load(changes)
    assert (run.custom.trainer_variant, run.geometry) == (variant, kinds)
    assert load({**changes, "stage2_ab": ...}).geometry == kinds
    assert load({**changes, f"{MATCHING}.geometry": ["bbox_2d"]}).geometry == {"bbox_2d"}
    if "poly" in kinds:
        assert load({**changes, f"{MATCHING}.geometry": ["poly", "bbox_2d"]}).geometry == kinds
    with_points = {**changes, f"{MATCHING}.geometry": ["bbox_2d", "point_2d"]}
    assert load(with_points).geometry == {"bbox_2d", "point_2d"}


def test_trajectories_have_no_step_but_of_channel_b():
    run = load_trajectories({"stage2_ab.schedule": {"b_ratio": 0.0, "warmup_steps": 99}})
    assert run.custom.trainer_variant is TrainerVariant.TRAJECTORY_PG
    assert run.channel(0) is Channel.B


def test_every_step_of_the_aligned_variant_is_channel_b_and_none_of_teacher_forced_training():
    assert {load(ALIGNED).channel(step) for step in range(100)} == {Channel.B}
    assert {load(STAGE1).channel(step) for step in range(100)} == {Channel.A}


def test_any_mapping_is_read_and_none_is_changed():
    mapping = changed({"custom.extra.stage2_ab.channel_b.mode": "step", "training.sed": 1})
    before = repr(mapping)
    with pytest.raises(ConfigError):
        load_config(MappingProxyType(mapping))
    assert repr(mapping) == before
    assert load_config(MappingProxyType(changed({}))) == load({})


ARGUMENTS = {"largest": 9, "words": ["a", "b"], "rules": {"strict": True, "least": None}}


@pytest.mark.parametrize(
    "run",
    [
        load({f"{MATCHING}.decode_mode": "greedy", "cluster.temp_dir": "/tmp/x"}),
        load_trajectories({"environment.args": ARGUMENTS}),
    ],
)
def test_a_resolved_configuration_is_frozen_pickles_and_loads_as_itself(run):
    with pytest.raises(ValidationError, match="frozen"):
        run.training.seed = 3
    assert pickle.loads(pickle.dumps(run)) == run
    assert load_config(run.model_dump(mode="json")) == run


@pytest.mark.parametrize("mapping", [None, [], "model: x", 3])
def test_what_is_no_mapping_is_refused_as_a_configuration_error(mapping):
    with pytest.raises(ConfigError, match=r"^configuration: must be a mapping of sections"):
        load_config(mapping)


def test_an_empty_mapping_names_every_missing_key():
    with pytest.raises(ConfigError) as error:
        load_config({})
    assert all(": is required, and missing; " in line for line in error.value.problems)
    assert [line.split(":")[0] for line in error.value.problems] == [
        "model.path",
        "global_max_length",
        "training.seed",
        "training.max_steps",
        "training.learning_rate",
        "custom.trainer_variant",
        "rollout_matching.pipeline",
    ]


def test_rollouts_have_these_defaults():
    matching = load({f"{MATCHING}.rollout_backend": ...}).rollout_matching
    assert (matching.rollout_backend, matching.length_penalty) == ("vllm", 1.0)
    decode = load(HF).rollout_matching.decode_settings(stop_token_ids=(1,), banned_token_ids=())
    assert decode.length_penalty == 1.0
    server = load(SERVERS).rollout_matching.vllm.server
    assert (server.timeout_s, server.infer_timeout_s) == (240.0, None)


def test_the_decode_mode_follows_the_temperature_where_it_is_not_written():
    assert load({}).rollout_matching.resolved_decode_mode is DecodeMode.GREEDY
    sampled = load({TEMPERATURE: 0.5, f"{MATCHING}.decoding.top_k": 5}).rollout_matching
    settings = sampled.decode_settings(stop_token_ids=(1,), banned_token_ids=(2, 3))
    assert (settings.mode, settings.temperature) == (DecodeMode.SAMPLE, 0.5)
    assert (settings.top_k, settings.max_new_tokens) == (5, 160)
    assert (settings.stop_token_ids, settings.banned_token_ids) == ((1,), (2, 3))
    assert settings.return_logprobs


@pytest.mark.parametrize(
    ("changes", "canary", "logprob"),
    [
        ({}, 1e-4, 1e-4),
        ({"model.dtype": "bfloat16"}, None, 1.0),
        (
            {
                "model.dtype": "bfloat16",
                f"{VLLM}.sync.canary_tolerance": 0.25,
                f"{MATCHING}.logprob_tolerance": 2.0,
            },
            0.25,
            2.0,
        ),
    ],
)
def test_tolerances_follow_the_number_type_unless_they_are_written(changes, canary, logprob):
    run = load(changes)
    assert (run.canary_tolerance, run.logprob_tolerance) == (canary, logprob)


def test_every_key_says_what_it_means():
    for section in all_sections():
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name} has no docstring"
