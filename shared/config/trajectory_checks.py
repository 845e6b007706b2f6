"""What `custom.trainer_variant: trajectory_pg` asks of the other sections (DESIGN 8, `policy_gradient`). Listed in `shared.config.checks`."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from shared.config.base import Problem
from shared.config.custom import TrainerVariant
from shared.config.derive import (
    EnginePlace,
    accumulation_steps,
    effective_batch_size,
    engines_in,
    group_size,
    is_sharded,
    needed_accumulation_steps,
    raw_rollouts_per_step,
)
from shared.config.explain import as_yaml
from shared.config.pipeline import EXAMPLE_POLICY_GRADIENT, PolicyGradientEntry
from shared.config.run import RunConfig
from shared.rollouts import DecodeMode

_VARIANT = TrainerVariant.TRAJECTORY_PG


def rollouts_differ(run: RunConfig) -> Iterator[Problem]:
    """What is learned is the difference between several answers to one prompt."""
    mode = run.rollout_matching.resolved_decode_mode
    if run.custom.trainer_variant is not _VARIANT or mode is DecodeMode.SAMPLE:
        return
    same = f"the rollouts of an example all the same, and {_VARIANT} learns from their differences"
    if run.rollout_matching.decode_mode is None:
        yield Problem("rollout_matching.decoding.temperature", f"0 is greedy decoding, which makes {same}", "set 1.0")
    else:
        yield Problem("rollout_matching.decode_mode", f"'{mode}' makes {same}", "remove the key, and set rollout_matching.decoding.temperature: 1.0")


def engines_can_be_asked(run: RunConfig) -> Iterator[Problem]:
    """Environments ask call by call, whenever they have an answer to what was said before."""
    if run.custom.trainer_variant is not _VARIANT or engines_in(run) is not EnginePlace.RANKS:
        return
    is_hf = run.rollout_matching.rollout_backend == "hf"
    yield Problem(
        "rollout_matching.rollout_backend" if is_hf else "rollout_matching.vllm.mode",
        f"'{'hf' if is_hf else 'colocate'}' generates in the learner, in turn with its learning, and environments ask for answers at any time",
        f"set {'vllm, and rollout_matching.vllm.mode: ' if is_hf else ''}actors or server "
        "(`backend=actors` on the command line, `override /backend: actors` in an experiment)",
    )


def images_reach_all_ranks(run: RunConfig) -> Iterator[Problem]:
    """A row of sharded ranks gathers the vision tower on all of them or on none, and whether an example shows an image is the environment's to say."""
    if run.environment is not None and run.environment.max_images_per_prompt and is_sharded(run):
        yield Problem(
            "learner.parallel",
            "fsdp cannot learn trajectories with images (environment.max_images_per_prompt), which only some rows have",
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
            f"{number} share the {size} that an engine decodes at a time (rollout_matching.decode_batch_size), and each needs one of them",
            f"set it to {size} or less, or raise rollout_matching.decode_batch_size",
        )


def has_policy_gradient(run: RunConfig) -> Iterator[Problem]:
    """What takes part beside it is refused with its name (`shared.config.variant_checks.only_its_objective`)."""
    objective = run.rollout_matching.pipeline.objective
    if run.custom.trainer_variant is _VARIANT and not any(isinstance(entry, PolicyGradientEntry) and entry.enabled and entry.teaches for entry in objective):
        yield Problem(
            "rollout_matching.pipeline.objective",
            f"no enabled policy_gradient with a weight above 0, and {_VARIANT} learns by nothing else",
            f"write an entry such as `{as_yaml(EXAMPLE_POLICY_GRADIENT)}`",
        )


def groups_are_whole(run: RunConfig) -> Iterator[Problem]:
    """A step has whole groups, and every learner rank at least one."""
    if run.custom.trainer_variant is not _VARIANT or run.environment is None or _contradicts_itself(run):
        return
    size, rollouts, ranks = group_size(run), raw_rollouts_per_step(run), run.learner.world_size
    if rollouts % size == 0 and rollouts >= size * ranks:
        return
    group = f"of {size} (environment.rollouts_per_example)"
    cannot = f"be cut into groups {group}" if rollouts % size else f"give each of {ranks} learner ranks a group {group}"
    key, comes_to, unit = _rollouts_of_a_step(run)
    unit = lcm(size, unit)
    needed = -(-max(rollouts, size * ranks) // unit) * unit
    replace = "replace it by training.effective_batch_size:" if key == "training.gradient_accumulation_steps" else "set"
    yield Problem(key, f"{comes_to} cannot {cannot}", f"{replace} {needed}, or a larger multiple of {unit}")


def _contradicts_itself(run: RunConfig) -> bool:
    """Two keys give the batch size, and not the same: how many rollouts a step has is open until one of them is gone."""
    wanted, steps, given = run.training.effective_batch_size, run.training.gradient_accumulation_steps, run.stage2_ab.channel_b.rollouts_per_step
    return wanted is not None and steps is not None and given is None and steps != needed_accumulation_steps(run, wanted)


def _rollouts_of_a_step(run: RunConfig) -> tuple[str, str, int]:
    """The key that says how many they are, what it comes to, and of what that is always a multiple."""
    training, given = run.training, run.stage2_ab.channel_b.rollouts_per_step
    if given is not None:
        return "stage2_ab.channel_b.rollouts_per_step", f"{given} rollouts a step", 1
    ranks, total = run.learner.world_size, effective_batch_size(run)
    micro_step = training.per_device_train_batch_size * ranks
    if training.effective_batch_size == total:
        return "training.effective_batch_size", f"{total} rollouts a step", micro_step
    is_by_steps = training.effective_batch_size is None and training.gradient_accumulation_steps is not None
    key, value = (
        ("gradient_accumulation_steps", training.gradient_accumulation_steps) if is_by_steps else ("effective_batch_size", training.effective_batch_size)
    )
    factors = f"training.per_device_train_batch_size {training.per_device_train_batch_size} x learner.world_size {ranks} x {accumulation_steps(run)}"
    rollouts = "1 rollout" if total == 1 else f"{total} rollouts"
    return f"training.{key}", f"{as_yaml(value)} comes to {rollouts} a step ({factors} accumulation steps), which", micro_step
