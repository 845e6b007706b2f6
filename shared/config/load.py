"""`load_config`: validate a configuration, and report all of its problems at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shared.config.base import Problem, plain
from shared.config.checks import algorithm, engines
from shared.config.explain import explain, sections_in, shown
from shared.config.run import RunConfig
from shared.errors import ConfigError

_LIST_SERVERS = (
    "list servers as rollout_matching.vllm.server.servers[], with base_url and group_port"
)
_DECODED = "use rollout_matching.decode_batch_size"
_RETIRED = {
    "custom.extra": (
        "move rollout_matching and stage2_ab from it to the top level, and remove the rest"
    ),
    "custom.coord_soft_ce_w1": "declare a coord_reg entry in rollout_matching.pipeline.objective",
    "model.attn_implementation": "use model.attention",
    "template": "use global_max_length",
    "training.packing_length": "use global_max_length",
    "stage2_ab.pipeline": "use rollout_matching.pipeline",
    "stage2_ab.channel_b.decode_batch_size": _DECODED,
    "rollout_matching.rollout_generate_batch_size": _DECODED,
    "rollout_matching.rollout_infer_batch_size": _DECODED,
    "rollout_matching.temperature": "use rollout_matching.decoding.temperature",
    "rollout_matching.top_p": "use rollout_matching.decoding.top_p",
    "rollout_matching.top_k": "use rollout_matching.decoding.top_k",
    "rollout_matching.post_rollout_pack_scope": "remove it: custom.trainer_variant sets it",
    "rollout_matching.rollout_buffer": (
        "remove it; to generate while learning, set stage2_ab.channel_b.enable_pipeline: true"
    ),
    "rollout_matching.vllm.sync.transport": (
        "remove the key: the devices of learner and engines determine the transport"
    ),
    "rollout_matching.vllm.server.base_url": _LIST_SERVERS,
    "rollout_matching.vllm.server.group_port": _LIST_SERVERS,
}
"""Remedies by the path of a removed or moved key, also for all keys under it (decision 3)."""


def load_config(mapping: Mapping[str, Any]) -> RunConfig:
    """Validate the configuration of a run (decision 39). The files that it names are not opened.

    Raises ConfigError with all unknown and retired keys, wrong types and wrong values, and the
    first contradiction within each section. If there are none of these, with all contradictions
    between sections.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            f"configuration: must be a mapping of sections, got {shown(mapping)}; start with an"
            " experiment in conf/experiment"
        )
    config = plain(mapping)
    problems = take_retired(config)
    # A missing section is validated as an empty one, so the report names its required keys.
    for name, field in RunConfig.model_fields.items():
        if field.is_required() and sections_in(field.annotation):
            config.setdefault(name, {})
    try:
        run = RunConfig.model_validate(config)
    except ValidationError as error:
        problems += (explain(RunConfig, one) for one in error.errors(include_url=False))
        raise ConfigError([str(problem) for problem in problems]) from None
    problems = problems or cross_check(run)
    if problems:
        raise ConfigError([str(problem) for problem in problems])
    return run


def take_retired(config: dict[str, Any]) -> list[Problem]:
    """Remove keys of older versions from `config`, and return a problem for each of them.

    Example: for {"training": {"packing_length": 512}} the problem reads "training.packing_length:
    was removed; use global_max_length".
    """
    return [
        Problem(path, "was removed", remedy)
        for path, remedy in _RETIRED.items()
        if _remove(config, path)
    ]


def _remove(section: object, path: str) -> bool:
    """Remove a key, and sections that are then empty; return whether the key was there."""
    key, _, below = path.partition(".")
    if not isinstance(section, dict) or key not in section:
        return False
    if below and not _remove(section[key], below):
        return False
    if not below or not section[key]:
        del section[key]
    return True


def cross_check(run: RunConfig) -> list[Problem]:
    """Return a problem for each contradiction between sections that are valid by themselves."""
    matching = run.rollout_matching
    # In other runs options of matching are no error: they may come from an included experiment.
    matches = run.algorithm.uses_rollouts and not run.algorithm.uses_environment
    return [
        *algorithm.data_is_there(run),
        *algorithm.epochs_are_equal(run),
        *algorithm.entries_have_input(run.custom.trainer_variant, matching.pipeline.enabled()),
        *algorithm.every_channel_learns(run),
        *algorithm.rewards_can_be_compared(run),
        *algorithm.groups_of_samples_are_whole(run),
        *algorithm.environment_fits_its_engines(run),
        *algorithm.batch_is_whole(run),
        *algorithm.rows_have_room(run),
        *algorithm.prompts_can_be_shared(run),
        *algorithm.answers_have_what_is_learned(run),
        *(algorithm.options_act(matching, run.geometry) if matches else ()),
        *engines.processes_suit(run),
        *engines.sharding_suits(run),
        *engines.adapter_is_trained(run.model, run.training.parts),
        *engines.adapters_can_be_sent(run),
        *engines.lengths_and_rounds_suit(run),
        *engines.engines_are_set_once(matching),
        *engines.tokens_can_be_chosen(matching),
        *engines.beams_are_possible(matching),
    ]
