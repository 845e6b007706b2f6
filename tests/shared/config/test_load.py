from __future__ import annotations

import pickle
from types import MappingProxyType

import pytest
from pydantic import ValidationError

from shared.config import RunConfig, load_config
from shared.config.algorithm import TrainerVariant
from shared.config.base import Section
from shared.config.explain import sections_in
from shared.config.pipeline import Channel
from shared.errors import ConfigError
from shared.rollouts import DecodeMode

OBJECTIVE = "rollout_matching.pipeline.objective"


def all_sections(root: type[Section] = RunConfig) -> set[type[Section]]:
    return {root}.union(
        *(
            all_sections(section)
            for field in root.model_fields.values()
            for section in sections_in(field.annotation)
        )
    )


def test_the_minimal_configuration_is_accepted_and_everything_else_has_a_default(load):
    run = load({})
    assert run.custom.trainer_variant is TrainerVariant.STAGE2_TWO_CHANNEL
    assert run.custom.object_field_order == "desc_first"
    assert (
        run.training.packing_buffer,
        run.training.packing_min_fill_ratio,
        run.training.packing_window,
    ) == (256, 0.7, 8)
    assert (
        run.rollout_matching.candidate_top_k,
        run.rollout_matching.maskiou_gate,
        run.rollout_matching.maskiou_resolution,
    ) == (10, 0.3, 256)
    assert run.rollout_matching.vllm.sync.bucket_bytes is None
    assert [entry.name for entry in run.rollout_matching.pipeline.active(Channel.B)] == [
        "token_ce",
        "coord_reg",
    ]


OF_SAMPLES = [variant for variant in TrainerVariant if variant is not TrainerVariant.TRAJECTORY_PG]


@pytest.mark.parametrize("variant", OF_SAMPLES)
def test_every_variant_loads(load, load_trajectories, variant):
    assert (
        load({"custom.trainer_variant": variant, "stage2_ab": ...}).custom.trainer_variant
        == variant
    )
    assert load_trajectories({}).custom.trainer_variant is TrainerVariant.TRAJECTORY_PG


@pytest.mark.parametrize("variant", OF_SAMPLES)
def test_the_minimal_configuration_loads_with_every_variant_of_samples_and_nothing_else_changed(
    load, variant
):
    """Its schedule has no effect but under stage2_two_channel, and its budget is the effective
    batch size.
    """
    run = load({"custom.trainer_variant": variant})
    assert (
        run.custom.trainer_variant,
        run.stage2_ab.schedule.warmup_steps,
        run.stage2_ab.channel_b.rollouts_per_step,
    ) == (variant, 20, 32)


@pytest.mark.parametrize(
    ("variant", "kinds"),
    [
        ("stage1_sft", {"bbox_2d", "poly"}),
        ("stage2_rollout_aligned", {"bbox_2d", "poly"}),
        ("stage2_two_channel", {"bbox_2d"}),
    ],
)
def test_the_kinds_of_geometry_follow_from_the_variant_or_are_written(load, variant, kinds):
    run = {"custom.trainer_variant": variant, "stage2_ab": ...}
    assert load(run).geometry == kinds
    assert load({**run, "rollout_matching.geometry": ["bbox_2d"]}).geometry == {"bbox_2d"}
    if "poly" in kinds:
        assert load({**run, "rollout_matching.geometry": ["poly", "bbox_2d"]}).geometry == kinds


def test_teacher_forced_training_has_no_step_of_channel_b_and_trajectories_have_no_other(
    load, load_trajectories
):
    run = load({"custom.trainer_variant": "stage1_sft", "stage2_ab": ...})
    assert run.channel(99) is Channel.A
    assert (
        load_trajectories({"stage2_ab.schedule": {"b_ratio": 0.0, "warmup_steps": 99}}).channel(0)
        is Channel.B
    )


def test_any_mapping_is_read_and_none_is_changed(changed):
    mapping = changed({"custom.extra.stage2_ab.channel_b.mode": "step", "training.sed": 1})
    before = repr(mapping)
    with pytest.raises(ConfigError):
        load_config(MappingProxyType(mapping))
    assert repr(mapping) == before
    assert load_config(MappingProxyType(changed({}))) == load_config(changed({}))


def test_the_resolved_configuration_loads_as_itself(load, load_trajectories):
    arguments = {
        "environment.args": {
            "largest": 9,
            "words": ["a", "b"],
            "rules": {"strict": True, "least": None},
        }
    }
    for run in (
        load({"rollout_matching.decode_mode": "greedy", "cluster.temp_dir": "/tmp/x"}),
        load_trajectories(arguments),
    ):
        assert load_config(run.model_dump(mode="json")) == run


def test_a_configuration_is_frozen_and_pickles(load, load_trajectories):
    run = load({})
    with pytest.raises(ValidationError, match="frozen"):
        run.training.seed = 3
    assert pickle.loads(pickle.dumps(run)) == run
    assert pickle.loads(pickle.dumps(load_trajectories({}))) == load_trajectories({})


@pytest.mark.parametrize("mapping", [None, [], "model: x", 3])
def test_what_is_no_mapping_is_refused_as_a_configuration_error(mapping):
    with pytest.raises(ConfigError, match=r"^configuration: must be a mapping of sections"):
        load_config(mapping)


def test_an_empty_mapping_names_every_missing_key():
    with pytest.raises(ConfigError) as error:
        load_config({})
    missing = [
        line.split(":")[0]
        for line in str(error.value).splitlines()
        if ": is required, and missing; " in line
    ]
    assert missing == [
        "model.path",
        "global_max_length",
        "training.seed",
        "training.max_steps",
        "training.learning_rate",
        "custom.trainer_variant",
        "rollout_matching.pipeline",
    ]


def test_the_decode_mode_follows_the_temperature_where_it_is_not_written(load):
    assert load({}).rollout_matching.resolved_decode_mode is DecodeMode.GREEDY
    sampled = load(
        {"rollout_matching.decoding.temperature": 0.5, "rollout_matching.decoding.top_k": 5}
    ).rollout_matching
    settings = sampled.decode_settings(stop_token_ids=(1,), banned_token_ids=(2, 3))
    assert (settings.mode, settings.temperature, settings.top_k, settings.max_new_tokens) == (
        DecodeMode.SAMPLE,
        0.5,
        5,
        160,
    )
    assert (settings.stop_token_ids, settings.banned_token_ids, settings.return_logprobs) == (
        (1,),
        (2, 3),
        True,
    )


def test_entries_of_other_channels_and_disabled_entries_take_no_part_in_a_step(load):
    pipeline = load(
        {f"{OBJECTIVE}[0].channels": ["A"], f"{OBJECTIVE}[1].channels": ["B"]}
    ).rollout_matching.pipeline
    assert [entry.name for entry in pipeline.active(Channel.A)] == ["token_ce"]
    disabled = load({f"{OBJECTIVE}[0].enabled": False}).rollout_matching.pipeline
    assert [entry.name for entry in disabled.active(Channel.A)] == ["coord_reg"]


def test_every_key_says_what_it_means():
    for section in all_sections():
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name} has no docstring"


@pytest.mark.parametrize(
    "section", [name for name, field in RunConfig.model_fields.items() if field.is_required()]
)
def test_a_required_section_of_the_wrong_kind_is_one_problem(problems, section):
    (line,) = problems({section: [1]})
    assert line.startswith(f"{section}: must be ")
