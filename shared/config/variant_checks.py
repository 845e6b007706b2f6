"""What each `custom.trainer_variant` asks of the other sections (DESIGN 5, decisions 2, 7 and 18). Listed in `shared.config.checks`."""

from __future__ import annotations

from collections.abc import Iterator

from shared.chunking import rank_share
from shared.config.base import Problem
from shared.config.custom import TrainerVariant
from shared.config.derive import RowRule, effective_batch_size, raw_rollouts_per_step, row_rule
from shared.config.pipeline import Channel, CoordRegEntry, TokenCEEntry
from shared.config.run import RunConfig
from shared.records import GeometryKind

_ALIGNED = TrainerVariant.STAGE2_ROLLOUT_ALIGNED


def known_variant(run: RunConfig) -> Iterator[Problem]:
    variant = run.custom.trainer_variant
    if variant is TrainerVariant.TRAJECTORY_PG:
        others = [other for other in TrainerVariant if other is not variant]
        yield Problem("custom.trainer_variant", f"'{variant}' is not in this version", f"set {', '.join(others[:-1])} or {others[-1]}")


def boxes_only(run: RunConfig) -> Iterator[Problem]:
    """DESIGN 5, decision 8."""
    if run.custom.trainer_variant is TrainerVariant.STAGE2_TWO_CHANNEL and GeometryKind.POLY in run.geometry:
        yield Problem(
            "rollout_matching.geometry",
            f"poly is not in {run.custom.trainer_variant}, which matches boxes only",
            f"remove poly, or set custom.trainer_variant: {_ALIGNED}",
        )


def objective_covers_channels(run: RunConfig) -> Iterator[Problem]:
    """A step of every channel that the run has must learn something (DESIGN 5, decision 2: nothing is added to the declared objective)."""
    change = ", or change stage2_ab.schedule" if run.custom.trainer_variant is TrainerVariant.STAGE2_TWO_CHANNEL else ""
    for channel in _channels(run):
        if not any(entry.teaches for entry in run.rollout_matching.pipeline.active(channel)):
            yield Problem(
                "rollout_matching.pipeline.objective",
                f"no enabled entry with a weight above 0, its own and a term's, covers channel {channel}, so its steps would learn nothing",
                f"add {channel} to the channels of an entry that has them{change}",
            )


def text_gate_has_text(run: RunConfig) -> Iterator[Problem]:
    """`text_gate` acts where `token_ce` weighs text (DESIGN 8): with no such entry on the channel there is no such place."""
    pipeline = run.rollout_matching.pipeline
    active = {channel: pipeline.active(channel) for channel in _channels(run)}
    without_text = [channel for channel, entries in active.items() if not any(isinstance(entry, TokenCEEntry) for entry in entries)]
    for index, entry in enumerate(pipeline.objective):
        channels = [channel for channel in without_text if entry in active[channel]]
        if isinstance(entry, CoordRegEntry) and entry.config.text_gate_weight > 0 and channels:
            yield Problem(
                f"rollout_matching.pipeline.objective[{index}].config.text_gate_weight",
                f"{entry.config.text_gate_weight:g} acts on the text that token_ce weighs, and no token_ce is active on channel {' and '.join(channels)}",
                "add a token_ce entry there, with weight 0.0 if text is not to be learned, or set text_gate_weight: 0.0",
            )


def _channels(run: RunConfig) -> list[Channel]:
    """The channels that steps of the run are of, were it long enough."""
    schedule = run.stage2_ab.schedule
    match run.custom.trainer_variant:
        case TrainerVariant.STAGE1_SFT:
            return [Channel.A]
        case TrainerVariant.STAGE2_TWO_CHANNEL:
            is_used = {Channel.A: schedule.b_ratio < 1 or schedule.warmup_steps > 0, Channel.B: schedule.b_ratio > 0}
            return [channel for channel in Channel if is_used[channel]]
        case TrainerVariant.STAGE2_ROLLOUT_ALIGNED | TrainerVariant.TRAJECTORY_PG:
            return [Channel.B]


def budget_has_effect(run: RunConfig) -> Iterator[Problem]:
    """A step of the aligned variant is its micro-steps, so its size is theirs."""
    given, effective = run.stage2_ab.channel_b.rollouts_per_step, effective_batch_size(run)
    if run.custom.trainer_variant is _ALIGNED and given not in (None, effective):
        yield Problem(
            "stage2_ab.channel_b.rollouts_per_step",
            f"{given} has no effect under {_ALIGNED}, whose steps take the effective batch size, {effective} raw rollouts",
            "remove the key, and set training.effective_batch_size to the raw rollouts of a step",
        )


def carry_only(run: RunConfig) -> Iterator[Problem]:
    """Segments left at the end of a run of the aligned variant can only be dropped (DESIGN 5, decision 7)."""
    if row_rule(run) is RowRule.CARRY and not run.training.packing_drop_last:
        yield Problem(
            "training.packing_drop_last",
            f"false asks for further steps that learn the segments left at the end of the run, and {_ALIGNED} only carries: it drops what is left then",
            "set training.packing_drop_last: true, or training.packing: false",
        )


def packing_buffer(run: RunConfig) -> Iterator[Problem]:
    """A rank's buffer must hold what is inserted before a row is taken: a micro-step where leftovers are carried, elsewhere the rank's share of a step."""
    buffer, ranks = run.training.packing_buffer, run.learner.world_size
    samples, rollouts = (len(rank_share(total, ranks, 0)) for total in (effective_batch_size(run), raw_rollouts_per_step(run)))
    match row_rule(run):
        case RowRule.SEGMENT:
            return
        case RowRule.CARRY:
            # What is carried comes on top. How much that is depends on lengths that are not known yet, so it is checked when it happens.
            needed = run.training.per_device_train_batch_size
            what = f"the {needed} raw rollouts of a micro-step (training.per_device_train_batch_size), with which a row is taken"
            fewer = "micro-step"
        case RowRule.STEP:
            # A step begins with an empty buffer. How much of it waits for a row depends on lengths that are not known yet: only room for all of it is safe.
            needed = max(samples, rollouts)
            whose = "a whole step" if ranks == 1 else f"a learner rank's share of a step, of {ranks} ranks"
            what = f"{whose} ({samples} samples on channel A, {rollouts} raw rollouts on channel B)"
            fewer = "step"
    if buffer < needed:
        yield Problem("training.packing_buffer", f"{buffer} segments cannot hold {what}", f"raise it to at least {needed}, or take fewer per {fewer}")
