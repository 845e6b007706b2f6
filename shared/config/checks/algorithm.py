"""Contradictions between `custom.trainer_variant` and the other sections.

Listed in `shared.config.checks.general`. See decisions 2, 7 and 18, and decision 37.
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
    ImportedEntry,
    PolicyGradientEntry,
    TokenCEEntry,
)
from shared.config.run import RunConfig
from shared.rollouts import DecodeMode

_OBJECTIVE = "rollout_matching.pipeline.objective"
_TRAJECTORIES = TrainerVariant.TRAJECTORY_PG
_SET_TRAJECTORIES = f"set custom.trainer_variant: {_TRAJECTORIES}"


def has_its_data(run: RunConfig) -> Iterator[Problem]:
    """Trajectories are of an environment, which has its own data; the rest learns from samples."""
    variant = run.custom.trainer_variant
    if run.algorithm.uses_environment:
        if run.environment is None:
            yield Problem(
                "environment",
                MISSING,
                "add it, for example `environment: {id: guess_number}` (what trajectories are of)",
            )
        for key, path in (("data.train", run.data.train), ("data.val", run.data.val)):
            if path is not None:
                yield Problem(
                    key,
                    f"has no effect under {variant}: the environment has data of its own",
                    "remove it (`data=none` on the command line, `override /data: none` in an"
                    " experiment)",
                )
        return
    if run.data.train is None:
        yield Problem(
            "data.train",
            MISSING,
            "add it, for example `train: outputs/demo/data/train.jsonl` (JSONL file of training"
            " samples)",
        )
    if run.environment is not None:
        wrong = f"has no effect under {variant}"
        yield Problem("environment", wrong, f"remove it, or {_SET_TRAJECTORIES}")


def objective_has_its_input(run: RunConfig) -> Iterator[Problem]:
    """Trajectories have advantages and no ground truth; samples have it the other way round."""
    variant, pipeline = run.custom.trainer_variant, run.rollout_matching.pipeline
    on_trajectories = run.algorithm.uses_environment
    for index, entry in enumerate(pipeline.objective):
        if not entry.enabled or isinstance(entry, ImportedEntry):  # which may use either
            continue
        if isinstance(entry, PolicyGradientEntry) is not on_trajectories:
            missing = "ground truth" if on_trajectories else "advantages"
            change = "choose another custom.trainer_variant"
            yield Problem(
                f"{_OBJECTIVE}[{index}].name",
                f"'{entry.name}' has no {missing} to learn from under {variant}",
                f"remove the entry, or {change if on_trajectories else _SET_TRAJECTORIES}",
            )
    for index, diagnostic in enumerate(pipeline.diagnostics if on_trajectories else ()):
        if diagnostic.enabled:
            yield Problem(
                f"rollout_matching.pipeline.diagnostics[{index}].name",
                f"'{diagnostic.name}' is about coordinates of ground truth, which there is none of"
                f" under {variant}",
                "remove the entry",
            )


def geometry_is_learned(run: RunConfig) -> Iterator[Problem]:
    """Channel-B v1 matches boxes only (decision 8)."""
    if run.geometry - run.algorithm.geometry:
        yield Problem(
            "rollout_matching.geometry",
            f"poly is not in {run.custom.trainer_variant}, which matches boxes only",
            f"remove poly, or set custom.trainer_variant: {TrainerVariant.STAGE2_ROLLOUT_ALIGNED}",
        )


def objective_covers_channels(run: RunConfig) -> Iterator[Problem]:
    """A step of every channel must learn something; the declared objective is all there is."""
    pipeline = run.rollout_matching.pipeline
    if run.algorithm.uses_environment:
        entries = pipeline.objective
        if not any(
            isinstance(entry, PolicyGradientEntry) and entry.enabled and entry.teaches
            for entry in entries
        ):
            yield Problem(
                _OBJECTIVE,
                f"no enabled policy_gradient with a weight above 0, and {_TRAJECTORIES} learns by"
                " nothing else",
                f"write an entry such as `{as_yaml(EXAMPLE_POLICY_GRADIENT)}`",
            )
        return
    change = ", or change stage2_ab.schedule" if run.algorithm.is_scheduled else ""
    for channel in _channels(run):
        if not any(entry.teaches for entry in pipeline.active(channel)):
            yield Problem(
                _OBJECTIVE,
                "no enabled entry with a weight above 0, its own and a term's, covers channel"
                f" {channel}, so its steps would learn nothing",
                f"add {channel} to the channels of an entry that has them{change}",
            )


def text_gate_has_text(run: RunConfig) -> Iterator[Problem]:
    """`text_gate` acts where `token_ce` weighs text (decision 37), so its channel needs one."""
    if run.algorithm.uses_environment:  # it has neither
        return
    pipeline = run.rollout_matching.pipeline
    for index, entry in enumerate(pipeline.objective):
        if not isinstance(entry, CoordRegEntry) or entry.config.text_gate_weight == 0:
            continue
        without_text = []
        for channel in _channels(run):
            active = pipeline.active(channel)
            if entry in active and not any(isinstance(other, TokenCEEntry) for other in active):
                without_text.append(channel)
        if without_text:
            yield Problem(
                f"{_OBJECTIVE}[{index}].config.text_gate_weight",
                f"{entry.config.text_gate_weight:g} acts on the text that token_ce weighs, and no"
                f" token_ce is active on channel {' and '.join(without_text)}",
                "add a token_ce entry there, with weight 0.0 if text is not to be learned, or set"
                " text_gate_weight: 0.0",
            )


def _channels(run: RunConfig) -> tuple[Channel, ...]:
    """List the channels that steps are of, were the run long enough."""
    if not run.algorithm.is_scheduled:
        return run.algorithm.channels
    schedule = run.stage2_ab.schedule
    is_used = {
        Channel.A: schedule.b_ratio < 1 or schedule.warmup_steps > 0,
        Channel.B: schedule.b_ratio > 0,
    }
    return tuple(channel for channel in run.algorithm.channels if is_used[channel])


def budget_has_effect(run: RunConfig) -> Iterator[Problem]:
    """A step that carries segments is its micro-steps, so its size is theirs."""
    budget, effective = run.stage2_ab.channel_b.rollouts_per_step, effective_batch_size(run)
    if run.algorithm.carries_segments and budget not in (None, effective):
        yield Problem(
            "stage2_ab.channel_b.rollouts_per_step",
            f"{budget} has no effect under {run.custom.trainer_variant}, whose steps take the"
            f" effective batch size, {effective} raw rollouts",
            "remove the key, and set training.effective_batch_size to the raw rollouts of a step",
        )


def leftovers_are_dropped(run: RunConfig) -> Iterator[Problem]:
    """Segments carried to the end of a run can only be dropped (decision 7)."""
    if row_rule(run) is RowRule.CARRY and not run.training.packing_drop_last:
        yield Problem(
            "training.packing_drop_last",
            "false asks for further steps that learn the segments left at the end of the run, and"
            f" {run.custom.trainer_variant} only carries: it drops what is left then",
            "set training.packing_drop_last: true, or training.packing: false",
        )


def packing_buffer_is_large_enough(run: RunConfig) -> Iterator[Problem]:
    """A rank's buffer must hold what is inserted before a row is taken."""
    buffer, ranks, rule = run.training.packing_buffer, run.learner.world_size, row_rule(run)
    # Nobody knows how many segments an environment's rollouts are: there a full buffer gives a row.
    if run.algorithm.uses_environment or rule is RowRule.SEGMENT:
        return
    if rule is RowRule.CARRY:
        # Carried segments come on top. How many depends on lengths that are not known yet, so
        # that is checked when it happens.
        needed, unit = run.training.per_device_train_batch_size, "micro-step"
        what = (
            f"the {needed} raw rollouts of a micro-step (training.per_device_train_batch_size),"
            " with which a row is taken"
        )
    else:
        # A step begins with an empty buffer. How much of it waits for a row depends on lengths
        # that are not known yet: only room for all of it is safe.
        samples = len(rank_share(effective_batch_size(run), ranks, 0))
        rollouts = len(rank_share(raw_rollouts_per_step(run), ranks, 0))
        needed, unit = max(samples, rollouts), "step"
        share = f"a learner rank's share of a step, of {ranks} ranks"
        what = (
            f"{'a whole step' if ranks == 1 else share} ({samples} samples on channel A,"
            f" {rollouts} raw rollouts on channel B)"
        )
    if buffer < needed:
        yield Problem(
            "training.packing_buffer",
            f"{buffer} segments cannot hold {what}",
            f"raise it to at least {needed}, or take fewer per {unit}",
        )


def rollouts_differ(run: RunConfig) -> Iterator[Problem]:
    """Advantages are differences between several answers to one prompt, so they are sampled."""
    mode = run.rollout_matching.resolved_decode_mode
    if not run.algorithm.uses_environment or mode is DecodeMode.SAMPLE:
        return
    same = (
        f"the rollouts of an example all the same, and {_TRAJECTORIES} learns from their"
        " differences"
    )
    if run.rollout_matching.decode_mode is None:
        wrong = f"0 is greedy decoding, which makes {same}"
        yield Problem("rollout_matching.decoding.temperature", wrong, "set 1.0")
    else:
        yield Problem(
            "rollout_matching.decode_mode",
            f"'{mode}' makes {same}",
            "remove the key, and set rollout_matching.decoding.temperature: 1.0",
        )


def engines_answer_at_any_time(run: RunConfig) -> Iterator[Problem]:
    """Environments ask call by call, so their engines may not wait for the learner's turn."""
    if not run.algorithm.uses_environment or engines_in(run) is not EngineLocation.RANKS:
        return
    is_hf = run.rollout_matching.rollout_backend == "hf"
    yield Problem(
        "rollout_matching.rollout_backend" if is_hf else "rollout_matching.vllm.mode",
        f"'{run.rollout_matching.backend_name}' generates in the learner, in turn with its"
        " learning, and environments ask for answers at any time",
        f"set {'vllm, and rollout_matching.vllm.mode: ' if is_hf else ''}actors or server"
        " (`backend=actors` on the command line, `override /backend: actors` in an experiment)",
    )


def images_reach_all_ranks(run: RunConfig) -> Iterator[Problem]:
    """Sharded ranks run the vision tower together or not at all; only some examples have images."""
    if run.environment is not None and run.environment.max_images_per_prompt and is_sharded(run):
        yield Problem(
            "learner.parallel",
            "fsdp cannot learn trajectories with images (environment.max_images_per_prompt), which"
            " only some rows have",
            "set learner.parallel: ddp",
        )


def environments_have_room(run: RunConfig) -> Iterator[Problem]:
    """Environment actors share what an engine decodes at a time."""
    size = run.rollout_matching.decode_batch_size
    if run.environment is not None and run.environment.num_actors > size:
        yield Problem(
            "environment.num_actors",
            f"{run.environment.num_actors} share the {size} that an engine decodes at a time"
            " (rollout_matching.decode_batch_size), and each needs one of them",
            f"set it to {size} or less, or raise rollout_matching.decode_batch_size",
        )


def groups_are_whole(run: RunConfig) -> Iterator[Problem]:
    """A step has whole groups of rollouts of one example, and every learner rank at least one."""
    is_open = run.stage2_ab.channel_b.rollouts_per_step is None and any(batch_size_is_one(run))
    if not run.algorithm.uses_environment or is_open:
        return
    size, rollouts, ranks = group_size(run), raw_rollouts_per_step(run), run.learner.world_size
    if rollouts % size == 0 and rollouts >= size * ranks:
        return
    group = f"of {size} (environment.rollouts_per_example)"
    cannot = f"give each of {ranks} learner ranks a group {group}"
    if rollouts % size:
        cannot = f"be cut into groups {group}"
    key, amount, unit = _rollouts_of_a_step(run)
    unit = lcm(size, unit)
    needed = -(-max(rollouts, size * ranks) // unit) * unit
    remedy = f"set {needed}, or a larger multiple of {unit}"
    if key == "training.gradient_accumulation_steps":
        remedy = (
            f"replace it by training.effective_batch_size: {needed}, or a larger multiple of {unit}"
        )
    yield Problem(key, f"{amount} cannot {cannot}", remedy)


def _rollouts_of_a_step(run: RunConfig) -> tuple[str, str, int]:
    """Return the key that sets a step's rollouts, their number in words, and a divisor of it."""
    training, budget = run.training, run.stage2_ab.channel_b.rollouts_per_step
    if budget is not None:
        return "stage2_ab.channel_b.rollouts_per_step", f"{budget} rollouts a step", 1
    ranks, total = run.learner.world_size, effective_batch_size(run)
    micro_step = training.per_device_train_batch_size * ranks
    key, value = "effective_batch_size", training.effective_batch_size
    if value == total:
        return f"training.{key}", f"{total} rollouts a step", micro_step
    if value is None and training.gradient_accumulation_steps is not None:
        key, value = "gradient_accumulation_steps", training.gradient_accumulation_steps
    rollouts = "1 rollout" if total == 1 else f"{total} rollouts"
    amount = (
        f"{as_yaml(value)} comes to {rollouts} a step (training.per_device_train_batch_size"
        f" {training.per_device_train_batch_size} x learner.world_size {ranks} x"
        f" {accumulation_steps(run)} accumulation steps), which"
    )
    return f"training.{key}", amount, micro_step


def batch_size_is_one(run: RunConfig) -> Iterator[Problem]:
    """The accumulation steps and the effective batch size say the same where both are written."""
    steps, effective = run.training.gradient_accumulation_steps, run.training.effective_batch_size
    if steps is None or effective is None:
        return
    needed = needed_accumulation_steps(run, effective)
    if steps != needed:
        yield Problem(
            "training.gradient_accumulation_steps",
            f"{steps} contradicts effective_batch_size {effective}, which takes {needed} with"
            f" {run.training.per_device_train_batch_size} per device and {run.learner.world_size}"
            " learner ranks",
            "remove one of the two keys",
        )
