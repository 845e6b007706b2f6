"""What the configuration says about targets and about one channel, as the values the learner computes with."""

from __future__ import annotations

from learner.ot_targets import OTSettings
from learner.targets import MatchSettings, TargetRules, TextWeights
from shared.config import RunConfig
from shared.config.pipeline import Channel, PipelineSection, TokenCEEntry


def target_rules(config: RunConfig) -> TargetRules:
    """How targets are made, whatever the channel."""
    matching = config.rollout_matching
    return TargetRules(
        geometry=config.geometry,
        field_order=config.custom.object_field_order,
        matching=MatchSettings(
            candidate_top_k=matching.candidate_top_k,
            maskiou_gate=matching.maskiou_gate,
            maskiou_resolution=matching.maskiou_resolution,
            fp_cost=matching.fp_cost,
            fn_cost=matching.fn_cost,
        ),
        transport=OTSettings(cost=matching.ot_cost, epsilon=matching.ot_epsilon, iters=matching.ot_iters),
    )


def text_weights(pipeline: PipelineSection, channel: Channel) -> TextWeights:
    """Of `token_ce`'s active entry; without one no text token is supervised."""
    entry = next((entry for entry in pipeline.active(channel) if isinstance(entry, TokenCEEntry)), None)
    if entry is None:
        return TextWeights(desc=0.0, matched_structure=0.0, structure=0.0)
    if channel is Channel.A:
        return TextWeights(desc=entry.config.desc_ce_weight, matched_structure=0.0)
    return TextWeights(desc=entry.config.rollout_fn_desc_weight, matched_structure=entry.config.rollout_matched_prefix_struct_weight)
