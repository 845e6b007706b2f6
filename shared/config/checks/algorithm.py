"""Find contradictions between trainer variant, data and objective (decisions 2, 7, 18, 37).

`cross_check` of `shared.config.load` calls these functions. Each yields problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import lcm

from shared.chunking import rank_share
from shared.config.algorithm import ALGORITHMS, TrainerVariant
from shared.config.base import MISSING, Problem
from shared.config.explain import as_yaml
from shared.config.pipeline import (
    EXAMPLE_POLICY_GRADIENT,
    Channel,
    CoordDiagEntry,
    CoordRegEntry,
    LearnsFrom,
    ObjectiveEntry,
    Reads,
    ReferenceKLEntry,
    TokenCEEntry,
)
from shared.config.rollout import RolloutMatchingSection
from shared.config.run import RowRule, RunConfig
from shared.records import POINT_TOLERANCE, GeometryKind
from shared.rollouts import DecodeMode

_OBJECTIVE = "rollout_matching.pipeline.objective"
_BUDGET = "stage2_ab.channel_b.rollouts_per_step"
_TEMPERATURE = "rollout_matching.decoding.temperature"
_TRAJECTORIES = TrainerVariant.TRAJECTORY_PG


def data_is_there(run: RunConfig) -> Iterator[Problem]:
    """Report missing or useless data, and keys that need held-out reports without held-out data.

    An environment has its own data; all other variants need samples.
    """
    variant = run.custom.trainer_variant
    if run.algorithm.uses_environment:
        if run.environment is None:
            remedy = "add it, for example `environment: {id: guess_number}`"
            yield Problem("environment", MISSING, remedy)
        for key, files in (("data.train", run.data.train), ("data.val", run.data.val)):
            if files is not None:
                wrong = f"has no effect under {variant}: the environment has its own data"
                remedy = "remove it (`data=none`, or `override /data: none` in an experiment)"
                yield Problem(key, wrong, remedy)
    else:
        if run.data.train is None:
            remedy = "add it, for example `train: outputs/demo/data/train.jsonl`"
            yield Problem("data.train", MISSING, remedy)
        if run.environment is not None:
            remedy = f"remove it, or set custom.trainer_variant: {_TRAJECTORIES}"
            yield Problem("environment", f"has no effect under {variant}", remedy)
    if run.has_held_out or run.algorithm.uses_environment != (run.environment is not None):
        return
    why, remedy = "data.val is not set", "set data.val to a JSONL file"
    if run.environment is not None:
        why, remedy = "environment.num_eval_examples is 0", "set it above 0"
    for key, value, none in (
        ("training.eval_steps", run.training.eval_steps, "null"),
        ("checkpoint.keep_best", run.checkpoint.keep_best, "0"),
    ):
        if value:
            wrong = f"{value} needs held-out reports, but {why}"
            yield Problem(key, wrong, f"{remedy}, or {key}: {none}")


def epochs_are_equal(run: RunConfig) -> Iterator[Problem]:
    """Report a number of epochs if some rows are drawn more often than others."""
    epochs = run.training.num_epochs
    if epochs is None:
        return
    why = None
    remedy = "set training.max_steps instead"
    if len(run.data.sources("train")) > 1:
        why = "each of several data files (data.train) has its own weight and epochs"
    elif run.environment is not None and run.environment.refill_rounds:
        why = "environment.refill_rounds draws more rows if rewards are equal"
        remedy += ", or environment.refill_rounds: 0"
    if why is not None:
        yield Problem("training.num_epochs", f"{epochs} has no meaning, because {why}", remedy)


def entries_have_input(
    variant: TrainerVariant, entries: Iterable[tuple[str, ObjectiveEntry | CoordDiagEntry]]
) -> Iterator[Problem]:
    """Report objectives and diagnostics that learn from something that the trainer variant lacks.

    Rollouts of environments have only advantages. Samples have ground truth, and with some variants
    also advantages.
    """
    for path, entry in entries:
        has_advantages = entry.advantage_section is not None
        source = LearnsFrom.ADVANTAGES if has_advantages else entry.learns_from
        if source is not None and source not in ALGORITHMS[variant].learns_from:
            wrong = f"'{entry.name}' has no {source} to learn from under {variant}"
            remedy = "remove the entry, or choose another custom.trainer_variant"
            yield Problem(f"{path}.name", wrong, remedy)


def every_channel_learns(run: RunConfig) -> Iterator[Problem]:
    """Report channels that the run uses but for which no objective is declared.

    No loss is implicit.
    """
    pipeline = run.rollout_matching.pipeline
    if run.algorithm.uses_environment:
        if not any(
            entry.teaches and entry.advantage_section is not None
            for entry in pipeline.active(Channel.B)
        ):
            yield Problem(
                _OBJECTIVE,
                "has no enabled policy_gradient with a weight above 0 (or an objective of your own"
                f" with the key advantages), without which {_TRAJECTORIES} learns nothing",
                f"write an entry such as `{as_yaml(EXAMPLE_POLICY_GRADIENT)}`",
            )
        return
    change = ", or change stage2_ab.schedule" if run.algorithm.is_scheduled else ""
    for channel in run.used_channels:
        active = pipeline.active(channel)
        if not any(entry.teaches for entry in active):
            yield Problem(
                _OBJECTIVE,
                f"has no enabled entry with a loss on channel {channel}: its weight, and the weight"
                " of one of its terms, must be above 0",
                f"add {channel} to the channels of an entry with such weights{change}",
            )
        has_text = any(isinstance(entry, TokenCEEntry) for entry in active)
        for index, entry in enumerate(pipeline.objective):
            is_gate = isinstance(entry, CoordRegEntry) and entry.config.text_gate_weight > 0
            # The gate acts on text that `token_ce` learns (decision 37).
            if is_gate and entry in active and not has_text:
                yield Problem(
                    f"{_OBJECTIVE}[{index}].config.text_gate_weight",
                    f"has no effect without token_ce, which is not active on channel {channel}",
                    "add token_ce there (with weight 0.0 text is not learned), or set"
                    " text_gate_weight: 0.0",
                )


def rewards_can_be_compared(run: RunConfig) -> Iterator[Problem]:
    """Report settings that contradict `policy_gradient`, which compares several sampled answers.

    These are the decode mode, `normalize: batch`, `reference_kl` without `policy_gradient`, and
    repeated updates.
    """
    pipeline = run.rollout_matching.pipeline
    has_gradient = pipeline.policy_gradient is not None
    rewards_samples = run.algorithm.learns_rewards
    mode = run.rollout_matching.resolved_decode_mode
    if mode is not DecodeMode.SAMPLE and (
        run.algorithm.uses_environment or (rewards_samples and has_gradient)
    ):
        is_written = run.rollout_matching.decode_mode is not None
        yield Problem(
            "rollout_matching.decode_mode" if is_written else _TEMPERATURE,
            f"'{mode}' makes all rollouts of a group equal, but policy_gradient learns from their"
            " differences",
            f"set {_TEMPERATURE}: 1.0{', and remove the key' if is_written else ''}",
        )
    for path, config in pipeline.policy_gradients():
        if config.normalize == "batch" and not run.algorithm.uses_environment:
            yield Problem(
                f"{path}.normalize",
                "batch would also divide the losses of matched objects by the number of sampled"
                " tokens",
                "set step, rollout or constant",
            )
    for path, entry in pipeline.enabled():
        # Trajectories without a policy gradient are already an error of another check.
        if isinstance(entry, ReferenceKLEntry) and rewards_samples and not has_gradient:
            yield Problem(
                f"{path}.name",
                "'reference_kl' needs the tokens of policy_gradient, which is not enabled",
                f"add one such as `{as_yaml(EXAMPLE_POLICY_GRADIENT)}`, or remove the entry",
            )
    updates = run.training.updates_per_batch
    if updates > 1 and not run.algorithm.uses_environment:
        yield Problem(
            "training.updates_per_batch",
            f"{updates} is not possible under {run.custom.trainer_variant}, which learns targets:"
            " nothing limits how far the later updates move the model",
            f"set it to 1, or set custom.trainer_variant: {_TRAJECTORIES}",
        )


def groups_of_samples_are_whole(run: RunConfig) -> Iterator[Problem]:
    """Report a wrong number of rollouts per sample.

    Such a number has no effect, is too small, or would divide the rollouts of a sample between
    steps or ranks.
    One rank compares all rollouts of a sample, within one step.
    """
    key = "stage2_ab.channel_b.rollouts_per_sample"
    size = run.stage2_ab.channel_b.rollouts_per_sample
    unit = size * run.learner.world_size
    if not run.algorithm.learns_rewards:
        if size > 1:
            remedy = "remove it; environment.rollouts_per_example does this for environments"
            yield Problem(key, f"{size} has no effect under {run.custom.trainer_variant}", remedy)
    elif size == 1 and run.rollout_matching.pipeline.policy_gradient is not None:
        wrong = "1 is too few: policy_gradient compares the rollouts of a sample with each other"
        yield Problem(key, wrong, "set 2 or more, or disable the policy_gradient entry")
    elif size > 1 and run.raw_rollouts_per_step % unit:
        wrong = f"{run.raw_rollouts_per_step} rollouts per step are not whole groups of {size} for"
        wrong += f" {run.learner.world_size} learner ranks"
        yield Problem(key, wrong, f"set {_BUDGET} to a multiple of {unit}")


def environment_fits_its_engines(run: RunConfig) -> Iterator[Problem]:
    """Report settings of an environment that contradict the engines or the order of steps."""
    matching = run.rollout_matching
    section = run.environment
    if matching.decoding.stop and not run.algorithm.uses_environment:
        wrong = f"{list(matching.decoding.stop)} is only for environments, and this run trains"
        yield Problem("rollout_matching.decoding.stop", f"{wrong} on samples", "remove the key")
    if section is None:
        return
    for key, value in (
        ("num_actors", section.num_actors - 1),
        ("cpus_per_actor", section.cpus_per_actor),
    ):
        if value and matching.in_learner:
            yield Problem(
                f"environment.{key}",
                f"has no effect: '{matching.backend_name}' runs the environment in the learner",
                "remove the key, or use separate engines (`backend=actors`)",
            )
    size = matching.decode_batch_size
    if section.num_actors > size:
        yield Problem(
            "environment.num_actors",
            f"{section.num_actors} is too many: actors share the {size} rollouts that an engine"
            " decodes at the same time, and each needs at least one",
            f"set it to {size} or less, or raise rollout_matching.decode_batch_size",
        )
    if section.refill_rounds and matching.max_staleness:
        yield Problem(
            "environment.refill_rounds",
            f"{section.refill_rounds} contradicts rollout_matching.max_staleness"
            f" {matching.max_staleness}: the next step is generated before it is known which groups"
            " of this step must be replaced",
            "set one of the two to 0",
        )
    temperature = matching.decoding.temperature
    # Temperature 0 is already an error of another check.
    if section.teacher is not None and temperature not in (0.0, 1.0):
        wrong = f"{temperature:g} is not 1, the temperature at which environment.teacher scores"
        yield Problem(_TEMPERATURE, wrong, "set 1.0, or remove environment.teacher")


def batch_is_whole(run: RunConfig) -> Iterator[Problem]:
    """Report numbers of samples per step that contradict each other.

    Also report numbers that would divide the rollouts of one row of an environment.
    """
    training = run.training
    ranks = run.learner.world_size
    budget = run.stage2_ab.channel_b.rollouts_per_step
    steps, effective = training.gradient_accumulation_steps, training.effective_batch_size
    if steps is not None and effective is not None:
        needed = run.needed_accumulation_steps(effective)
        if steps != needed:
            yield Problem(
                "training.gradient_accumulation_steps",
                f"{steps} contradicts effective_batch_size {effective}, which needs {needed} with"
                f" {training.per_device_train_batch_size} per device and {ranks} learner ranks",
                "remove the key, or training.effective_batch_size",
            )
            if budget is None:  # then the number of rollouts of a step is not known
                return
    rollouts = run.raw_rollouts_per_step
    size = run.group_size
    if run.algorithm.carries_segments and budget not in (None, run.effective_batch_size):
        yield Problem(
            _BUDGET,
            f"{budget} has no effect under {run.custom.trainer_variant}, whose steps have the"
            f" effective batch size, {run.effective_batch_size}",
            "remove the key, and set training.effective_batch_size to the rollouts per step",
        )
    if run.algorithm.uses_environment and (rollouts % size or rollouts < size * ranks):
        key, unit, instead = _BUDGET, size, ""
        if budget is None:
            key = "training.effective_batch_size"
            unit = lcm(size, training.per_device_train_batch_size * ranks)
            instead = "" if steps is None else "instead of gradient_accumulation_steps "
        yield Problem(
            key,
            f"{rollouts} rollouts per step are not whole groups of {size}"
            f" (environment.rollouts_per_example), at least one for each of {ranks} learner ranks",
            f"{instead}set {-(-max(rollouts, size * ranks) // unit) * unit}, or a larger multiple"
            f" of {unit}",
        )


def rows_have_room(run: RunConfig) -> Iterator[Problem]:
    """Report a packing buffer that is too small for the segments that wait for a packed row."""
    training = run.training
    rule = run.row_rule
    # Segments in the carry buffer at the end of a run can only be dropped (decision 7).
    if rule is RowRule.CARRY and not training.packing_drop_last:
        yield Problem(
            "training.packing_drop_last",
            f"false is not possible under {run.custom.trainer_variant}: no step follows the"
            " last one, which may leave segments in the carry buffer",
            "set training.packing_drop_last: true, or training.packing: false",
        )
    # The number of segments of an environment's rollouts is unknown: a full buffer becomes a row.
    if run.algorithm.uses_environment or rule is RowRule.SEGMENT:
        return
    # Only room for a whole step (or micro-step) is safe: how many segments wait for a row depends
    # on lengths that are not known yet. Carried segments are extra, and are checked as they come.
    unit, needed = "micro-step", training.per_device_train_batch_size
    if rule is RowRule.STEP:
        unit = "step"
        samples, rollouts = (
            len(rank_share(number, run.learner.world_size, 0))
            for number in (run.effective_batch_size, run.raw_rollouts_per_step)
        )
        # With rewards each rollout gives two segments: a matched one, and one with an advantage.
        is_twice = run.rollout_matching.pipeline.policy_gradient is not None
        needed = max(samples, 2 * rollouts if is_twice else rollouts)
    if training.packing_buffer < needed:
        wrong = f"{training.packing_buffer} is less than the {needed} segments of a rank's {unit}"
        remedy = f"raise it to at least {needed}, or use fewer samples per {unit}"
        yield Problem("training.packing_buffer", wrong, remedy)


def prompts_can_be_shared(run: RunConfig) -> Iterator[Problem]:
    """Report what `training.share_prompts` needs: packed rows, attention by segments, siblings."""
    if not run.training.share_prompts:
        return
    size = run.group_size if run.environment else run.stage2_ab.channel_b.rollouts_per_sample
    why = None
    if run.row_rule is not RowRule.STEP:
        why = "needs rows that contain all rollouts of a prompt"
        remedy = "set training.packing: true"
        if run.algorithm.carries_segments:
            remedy = f"choose another custom.trainer_variant than {run.custom.trainer_variant}"
    elif run.model.attention != "auto":
        why = f"is not possible with model.attention: {run.model.attention}"
        remedy = "set model.attention: auto"
    elif size == 1:
        why = "has no effect with one rollout per prompt"
        remedy = "set stage2_ab.channel_b.rollouts_per_sample to 2 or more"
    if why is not None:
        yield Problem("training.share_prompts", f"true {why}", f"{remedy}, or remove the key")


def answers_have_what_is_learned(run: RunConfig) -> Iterator[Problem]:
    """Report shapes, objectives and keys that do not suit the answer format or trainer variant.

    The variant must be able to match the kinds of shapes (decision 8).
    """
    name = run.data.answer_format
    if run.algorithm.uses_environment:
        return
    instead = "or set data.answer_format: coord_tokens"
    for kind in sorted(run.geometry):
        if kind not in run.algorithm.geometry:
            wrong = f"{run.custom.trainer_variant} cannot match {kind}"
            remedy = f"custom.trainer_variant: {TrainerVariant.STAGE2_ROLLOUT_ALIGNED}"
            yield Problem("rollout_matching.geometry", wrong, f"remove it, or set {remedy}")
        if kind not in run.answer_format.geometry:
            wrong = f"data.answer_format {name} has no {kind}"
            yield Problem("rollout_matching.geometry", wrong, f"remove it, {instead}")
    if name == "coord_tokens":
        return
    for path, entry in run.rollout_matching.pipeline.enabled():
        # Losses at coordinate slots need a distribution over bins, which digits do not have.
        if entry.reads is Reads.SLOTS and not run.answer_format.coord_tokens:
            wrong = f"'{entry.name}' needs one token per coordinate, but {name} writes digits"
            remedy = f"remove the entry (token_ce teaches digits), {instead}"
            yield Problem(f"{path}.name", wrong, remedy)
        corrects = isinstance(entry, TokenCEEntry) and entry.config.matched_desc_weight > 0
        if corrects and not run.answer_format.names_each_object:
            wrong = (
                f"needs a name per object, but in data.answer_format {name} a phrase names several"
            )
            remedy = f"set it to 0, {instead}"
            yield Problem(f"{path}.config.matched_desc_weight", wrong, remedy)
    guard = run.rollout_matching.repeat_terminate
    # The remedy is to set the key, not to remove it: the value may come from the experiment.
    for key, is_set, default in (
        (
            "custom.object_field_order",
            run.custom.object_field_order == "geometry_first",
            "desc_first",
        ),
        (
            "rollout_matching.repeat_terminate.max_object_keys",
            guard.enabled and guard.max_object_keys is not None,
            "null",
        ),
    ):
        if is_set:
            wrong = f"has no effect in data.answer_format {name}"
            yield Problem(key, wrong, f"set it to {default}")


def options_act(
    matching: RolloutMatchingSection, geometry: frozenset[GeometryKind]
) -> Iterator[Problem]:
    """Report options that have no effect with the other settings (decision 30).

    Otherwise the run would look as if the option had been tried.
    """
    active = matching.pipeline.active(Channel.B)
    if matching.supervise_separators and not any(isinstance(one, TokenCEEntry) for one in active):
        yield Problem(
            "rollout_matching.supervise_separators",
            "true has no effect without the module token_ce on channel B",
            "add token_ce to rollout_matching.pipeline, or set supervise_separators to false",
        )
    for key, is_set, kind in (
        ("ot_epsilon_cap", matching.ot_epsilon_cap is not None, GeometryKind.POLY),
        ("point_tolerance", matching.point_tolerance != POINT_TOLERANCE, GeometryKind.POINT),
    ):
        if is_set and kind not in geometry:
            remedy = f"remove it, or learn {kind} (rollout_matching.geometry)"
            yield Problem(f"rollout_matching.{key}", f"has no effect without {kind}", remedy)
    for path, entry in matching.pipeline.enabled():
        if not isinstance(entry, TokenCEEntry) or Channel.B in entry.channels:
            continue
        for key, is_set in (
            ("matched_desc_weight", entry.config.matched_desc_weight != 0.0),
            ("fp_end_weight", entry.config.fp_end_weight != 1.0),
        ):
            if is_set:
                wrong = "has no effect on channel A, the only channel of the entry"
                remedy = "remove it, or set it in the entry of channel B"
                yield Problem(f"{path}.config.{key}", wrong, remedy)
