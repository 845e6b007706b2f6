"""What each `custom.trainer_variant` asks of the other sections (DESIGN 5, decisions 2, 7 and 18).
Listed in `shared.config.checks.general.general`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from shared.chunking import rank_share
from shared.config.algorithm import TrainerVariant
from shared.config.base import Problem
from shared.config.derive import (
    EngineLocation,
    RowRule,
    accumulation_steps,
    effective_batch_size,
    engines_in,
    group_size,
    is_sharded,
    needed_accumulation_steps,
    raw_rollouts_per_step,
    row_rule,
)
from shared.config.explain import MISSING, as_yaml
from shared.config.pipeline import (
    EXAMPLE_POLICY_GRADIENT,
    Channel,
    CoordRegEntry,
    PolicyGradientEntry,
    TokenCEEntry,
)
from shared.config.run import RunConfig
from shared.records import GeometryKind
from shared.rollouts import DecodeMode

_ALIGNED = TrainerVariant.STAGE2_ROLLOUT_ALIGNED


def has_samples_or_environment(run: RunConfig) -> Iterator[Problem]:
    """What a run learns from."""
    if run.data.train is None and run.environment is None:
        yield (
            _missing_environment()
            if run.custom.trainer_variant is TrainerVariant.TRAJECTORY_PG
            else _missing_samples()
        )


def samples_or_environment_suit(run: RunConfig) -> Iterator[Problem]:
    """Trajectories are of an environment, which has data of its own; everything else is learned
    from samples.
    """
    variant = run.custom.trainer_variant
    if variant is TrainerVariant.TRAJECTORY_PG:
        if run.environment is None and run.data.train is not None:
            yield _missing_environment()
        for key, path in (("data.train", run.data.train), ("data.val", run.data.val)):
            if path is not None:
                yield Problem(
                    key,
                    f"has no effect under {variant}: the environment has data of its own",
                    "remove it (`data=none` on the command line, `override /data: none` in an"
                    " experiment)",
                )
    elif run.environment is not None:
        if run.data.train is None:
            yield _missing_samples()
        yield Problem(
            "environment",
            f"has no effect under {variant}",
            f"remove it, or set custom.trainer_variant: {TrainerVariant.TRAJECTORY_PG}",
        )


def _missing_samples() -> Problem:
    return Problem(
        "data.train",
        MISSING,
        "add it, for example `train: outputs/demo/data/train.jsonl` (JSONL file of training"
        " samples)",
    )


def _missing_environment() -> Problem:
    return Problem(
        "environment",
        MISSING,
        "add it, for example `environment: {id: guess_number}` (what trajectories are of)",
    )


def only_its_objective(run: RunConfig) -> Iterator[Problem]:
    """Trajectories have advantages and no ground truth; samples have it the other way round."""
    variant, pipeline = run.custom.trainer_variant, run.rollout_matching.pipeline
    of_trajectories = variant is TrainerVariant.TRAJECTORY_PG
    has_no = "ground truth" if of_trajectories else "advantages"
    change = (
        "choose another custom.trainer_variant"
        if of_trajectories
        else f"set custom.trainer_variant: {TrainerVariant.TRAJECTORY_PG}"
    )
    for index, entry in enumerate(pipeline.objective):
        if entry.enabled and isinstance(entry, PolicyGradientEntry) is not of_trajectories:
            yield Problem(
                f"rollout_matching.pipeline.objective[{index}].name",
                f"'{entry.name}' has no {has_no} to learn from under {variant}",
                f"remove the entry, or {change}",
            )
    for index, diagnostic in enumerate(pipeline.diagnostics if of_trajectories else ()):
        if diagnostic.enabled:
            yield Problem(
                f"rollout_matching.pipeline.diagnostics[{index}].name",
                f"'{diagnostic.name}' is about coordinates of ground truth, which there is none of"
                f" under {variant}",
                "remove the entry",
            )


def boxes_only(run: RunConfig) -> Iterator[Problem]:
    """DESIGN 5, decision 8."""
    if (
        run.custom.trainer_variant is TrainerVariant.STAGE2_TWO_CHANNEL
        and GeometryKind.POLY in run.geometry
    ):
        yield Problem(
            "rollout_matching.geometry",
            f"poly is not in {run.custom.trainer_variant}, which matches boxes only",
            f"remove poly, or set custom.trainer_variant: {_ALIGNED}",
        )


def objective_covers_channels(run: RunConfig) -> Iterator[Problem]:
    """A step of every channel that the run has must learn something (DESIGN 5, decision 2: nothing
    is added to the declared objective).
    """
    # `shared.config.checks.general.algorithm.has_policy_gradient` says what it needs
    if run.custom.trainer_variant is TrainerVariant.TRAJECTORY_PG:
        return
    change = (
        ", or change stage2_ab.schedule"
        if run.custom.trainer_variant is TrainerVariant.STAGE2_TWO_CHANNEL
        else ""
    )
    for channel in _channels(run):
        if not any(entry.teaches for entry in run.rollout_matching.pipeline.active(channel)):
            yield Problem(
                "rollout_matching.pipeline.objective",
                "no enabled entry with a weight above 0, its own and a term's, covers channel"
                f" {channel}, so its steps would learn nothing",
                f"add {channel} to the channels of an entry that has them{change}",
            )


def text_gate_has_text(run: RunConfig) -> Iterator[Problem]:
    """`text_gate` acts where `token_ce` weighs text (DESIGN 8): with no such entry on the channel
    there is no such place.
    """
    if run.custom.trainer_variant is TrainerVariant.TRAJECTORY_PG:  # it has neither
        return
    pipeline = run.rollout_matching.pipeline
    active = {channel: pipeline.active(channel) for channel in _channels(run)}
    without_text = [
        channel
        for channel, entries in active.items()
        if not any(isinstance(entry, TokenCEEntry) for entry in entries)
    ]
    for index, entry in enumerate(pipeline.objective):
        channels = [channel for channel in without_text if entry in active[channel]]
        if isinstance(entry, CoordRegEntry) and entry.config.text_gate_weight > 0 and channels:
            yield Problem(
                f"rollout_matching.pipeline.objective[{index}].config.text_gate_weight",
                f"{entry.config.text_gate_weight:g} acts on the text that token_ce weighs, and no"
                f" token_ce is active on channel {' and '.join(channels)}",
                "add a token_ce entry there, with weight 0.0 if text is not to be learned, or set"
                " text_gate_weight: 0.0",
            )


def _channels(run: RunConfig) -> list[Channel]:
    """The channels that steps of the run are of, were it long enough."""
    schedule = run.stage2_ab.schedule
    match run.custom.trainer_variant:
        case TrainerVariant.STAGE1_SFT:
            return [Channel.A]
        case TrainerVariant.STAGE2_TWO_CHANNEL:
            is_used = {
                Channel.A: schedule.b_ratio < 1 or schedule.warmup_steps > 0,
                Channel.B: schedule.b_ratio > 0,
            }
            return [channel for channel in Channel if is_used[channel]]
        case TrainerVariant.STAGE2_ROLLOUT_ALIGNED | TrainerVariant.TRAJECTORY_PG:
            return [Channel.B]


def budget_has_effect(run: RunConfig) -> Iterator[Problem]:
    """A step of the aligned variant is its micro-steps, so its size is theirs."""
    given, effective = run.stage2_ab.channel_b.rollouts_per_step, effective_batch_size(run)
    if run.custom.trainer_variant is _ALIGNED and given not in (None, effective):
        yield Problem(
            "stage2_ab.channel_b.rollouts_per_step",
            f"{given} has no effect under {_ALIGNED}, whose steps take the effective batch size,"
            f" {effective} raw rollouts",
            "remove the key, and set training.effective_batch_size to the raw rollouts of a step",
        )


def carry_only(run: RunConfig) -> Iterator[Problem]:
    """Segments left at the end of a run of the aligned variant can only be dropped (DESIGN 5,
    decision 7).
    """
    if row_rule(run) is RowRule.CARRY and not run.training.packing_drop_last:
        yield Problem(
            "training.packing_drop_last",
            "false asks for further steps that learn the segments left at the end of the run, and"
            f" {_ALIGNED} only carries: it drops what is left then",
            "set training.packing_drop_last: true, or training.packing: false",
        )


def packing_buffer(run: RunConfig) -> Iterator[Problem]:
    """A rank's buffer must hold what is inserted before a row is taken: a micro-step where
    leftovers are carried, elsewhere the rank's share of a step.
    """
    buffer, ranks = run.training.packing_buffer, run.learner.world_size
    if run.custom.trainer_variant is TrainerVariant.TRAJECTORY_PG:
        # How many segments its rollouts are is not known, and a full buffer gives a row.
        return
    samples, rollouts = (
        len(rank_share(total, ranks, 0))
        for total in (effective_batch_size(run), raw_rollouts_per_step(run))
    )
    match row_rule(run):
        case RowRule.SEGMENT:
            return
        case RowRule.CARRY:
            # What is carried comes on top. How much that is depends on lengths that are not known
            # yet, so it is checked when it happens.
            needed = run.training.per_device_train_batch_size
            what = (
                f"the {needed} raw rollouts of a micro-step (training.per_device_train_batch_size),"
                " with which a row is taken"
            )
            fewer = "micro-step"
        case RowRule.STEP:
            # A step begins with an empty buffer. How much of it waits for a row depends on lengths
            # that are not known yet: only room for all of it is safe.
            needed = max(samples, rollouts)
            whose = (
                "a whole step"
                if ranks == 1
                else f"a learner rank's share of a step, of {ranks} ranks"
            )
            what = f"{whose} ({samples} samples on channel A, {rollouts} raw rollouts on channel B)"
            fewer = "step"
    if buffer < needed:
        yield Problem(
            "training.packing_buffer",
            f"{buffer} segments cannot hold {what}",
            f"raise it to at least {needed}, or take fewer per {fewer}",
        )


# What `custom.trainer_variant: trajectory_pg` asks of the other sections (DESIGN 8,
# `policy_gradient`). Listed in `shared.config.checks.general.general`.


_VARIANT = TrainerVariant.TRAJECTORY_PG


def rollouts_differ(run: RunConfig) -> Iterator[Problem]:
    """What is learned is the difference between several answers to one prompt."""
    mode = run.rollout_matching.resolved_decode_mode
    if run.custom.trainer_variant is not _VARIANT or mode is DecodeMode.SAMPLE:
        return
    same = f"the rollouts of an example all the same, and {_VARIANT} learns from their differences"
    if run.rollout_matching.decode_mode is None:
        yield Problem(
            "rollout_matching.decoding.temperature",
            f"0 is greedy decoding, which makes {same}",
            "set 1.0",
        )
    else:
        yield Problem(
            "rollout_matching.decode_mode",
            f"'{mode}' makes {same}",
            "remove the key, and set rollout_matching.decoding.temperature: 1.0",
        )


def engines_can_be_asked(run: RunConfig) -> Iterator[Problem]:
    """Environments ask call by call, whenever they have an answer to what was said before."""
    if run.custom.trainer_variant is not _VARIANT or engines_in(run) is not EngineLocation.RANKS:
        return
    is_hf = run.rollout_matching.rollout_backend == "hf"
    yield Problem(
        "rollout_matching.rollout_backend" if is_hf else "rollout_matching.vllm.mode",
        f"'{'hf' if is_hf else 'colocate'}' generates in the learner, in turn with its learning,"
        " and environments ask for answers at any time",
        f"set {'vllm, and rollout_matching.vllm.mode: ' if is_hf else ''}actors or server "
        "(`backend=actors` on the command line, `override /backend: actors` in an experiment)",
    )


def images_reach_all_ranks(run: RunConfig) -> Iterator[Problem]:
    """A row of sharded ranks gathers the vision tower on all of them or on none, and whether an
    example shows an image is the environment's to say.
    """
    if run.environment is not None and run.environment.max_images_per_prompt and is_sharded(run):
        yield Problem(
            "learner.parallel",
            "fsdp cannot learn trajectories with images (environment.max_images_per_prompt), which"
            " only some rows have",
            "set learner.parallel: ddp",
        )


def environments_have_room(run: RunConfig) -> Iterator[Problem]:
    """They share what an engine decodes at a time."""
    if run.environment is None:
        return
    number, size = run.environment.num_actors, run.rollout_matching.decode_batch_size
    if number > size:
        yield Problem(
            "environment.num_actors",
            f"{number} share the {size} that an engine decodes at a time"
            " (rollout_matching.decode_batch_size), and each needs one of them",
            f"set it to {size} or less, or raise rollout_matching.decode_batch_size",
        )


def has_policy_gradient(run: RunConfig) -> Iterator[Problem]:
    """What takes part beside it is refused with its name
    (`shared.config.checks.general.algorithm.only_its_objective`).
    """
    objective = run.rollout_matching.pipeline.objective
    if run.custom.trainer_variant is _VARIANT and not any(
        isinstance(entry, PolicyGradientEntry) and entry.enabled and entry.teaches
        for entry in objective
    ):
        yield Problem(
            "rollout_matching.pipeline.objective",
            f"no enabled policy_gradient with a weight above 0, and {_VARIANT} learns by nothing"
            " else",
            f"write an entry such as `{as_yaml(EXAMPLE_POLICY_GRADIENT)}`",
        )


def groups_are_whole(run: RunConfig) -> Iterator[Problem]:
    """A step has whole groups, and every learner rank at least one."""
    if (
        run.custom.trainer_variant is not _VARIANT
        or run.environment is None
        or _contradicts_itself(run)
    ):
        return
    size, rollouts, ranks = group_size(run), raw_rollouts_per_step(run), run.learner.world_size
    if rollouts % size == 0 and rollouts >= size * ranks:
        return
    group = f"of {size} (environment.rollouts_per_example)"
    cannot = (
        f"be cut into groups {group}"
        if rollouts % size
        else f"give each of {ranks} learner ranks a group {group}"
    )
    key, comes_to, unit = _rollouts_of_a_step(run)
    unit = lcm(size, unit)
    needed = -(-max(rollouts, size * ranks) // unit) * unit
    replace = (
        "replace it by training.effective_batch_size:"
        if key == "training.gradient_accumulation_steps"
        else "set"
    )
    yield Problem(
        key, f"{comes_to} cannot {cannot}", f"{replace} {needed}, or a larger multiple of {unit}"
    )


def _contradicts_itself(run: RunConfig) -> bool:
    """Two keys give the batch size, and not the same: how many rollouts a step has is open until
    one of them is gone.
    """
    wanted, steps, given = (
        run.training.effective_batch_size,
        run.training.gradient_accumulation_steps,
        run.stage2_ab.channel_b.rollouts_per_step,
    )
    return (
        wanted is not None
        and steps is not None
        and given is None
        and steps != needed_accumulation_steps(run, wanted)
    )


def _rollouts_of_a_step(run: RunConfig) -> tuple[str, str, int]:
    """The key that says how many they are, what it comes to, and of what that is always a
    multiple."""
    training, given = run.training, run.stage2_ab.channel_b.rollouts_per_step
    if given is not None:
        return "stage2_ab.channel_b.rollouts_per_step", f"{given} rollouts a step", 1
    ranks, total = run.learner.world_size, effective_batch_size(run)
    micro_step = training.per_device_train_batch_size * ranks
    if training.effective_batch_size == total:
        return "training.effective_batch_size", f"{total} rollouts a step", micro_step
    is_by_steps = (
        training.effective_batch_size is None and training.gradient_accumulation_steps is not None
    )
    key, value = (
        ("gradient_accumulation_steps", training.gradient_accumulation_steps)
        if is_by_steps
        else ("effective_batch_size", training.effective_batch_size)
    )
    factors = (
        f"training.per_device_train_batch_size {training.per_device_train_batch_size} x"
        f" learner.world_size {ranks} x {accumulation_steps(run)}"
    )
    rollouts = "1 rollout" if total == 1 else f"{total} rollouts"
    return (
        f"training.{key}",
        f"{as_yaml(value)} comes to {rollouts} a step ({factors} accumulation steps), which",
        micro_step,
    )
