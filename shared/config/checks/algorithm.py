"""Contradictions between `custom.trainer_variant` and the other sections (decisions 2, 7, 18, 37).

Listed in `shared.config.checks.general`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from shared.chunking import rank_share
from shared.config.algorithm import TrainerVariant
from shared.config.base import Problem
from shared.config.explain import MISSING, as_yaml
from shared.config.pipeline import (
    EXAMPLE_POLICY_GRADIENT,
    Channel,
    CoordRegEntry,
    LearnsFrom,
    PolicyGradientEntry,
    Reads,
    ReferenceKLEntry,
    TokenCEEntry,
)
from shared.config.run import RowRule, RunConfig
from shared.records import POINT_TOLERANCE, GeometryKind
from shared.rollouts import DecodeMode

_OBJECTIVE = "rollout_matching.pipeline.objective"
_DIAGNOSTICS = "rollout_matching.pipeline.diagnostics"
_TRAJECTORIES = TrainerVariant.TRAJECTORY_PG
_SET_TRAJECTORIES = f"set custom.trainer_variant: {_TRAJECTORIES}"


def has_its_data(run: RunConfig) -> Iterator[Problem]:
    """Trajectories are of an environment, which has its own data; the rest learns from samples."""
    variant = run.custom.trainer_variant
    if run.algorithm.uses_environment:
        if run.environment is None:
            remedy = "add it, for example `environment: {id: guess_number}`"
            yield Problem("environment", MISSING, remedy)
        for key, path in (("data.train", run.data.train), ("data.val", run.data.val)):
            if path is not None:
                wrong = f"has no effect under {variant}: the environment has data of its own"
                remedy = "remove it (`data=none`, or `override /data: none` in an experiment)"
                yield Problem(key, wrong, remedy)
        return
    if run.data.train is None:
        remedy = "add it, for example `train: outputs/demo/data/train.jsonl`"
        yield Problem("data.train", MISSING, remedy)
    if run.environment is not None:
        wrong = f"has no effect under {variant}"
        yield Problem("environment", wrong, f"remove it, or {_SET_TRAJECTORIES}")


def objective_has_its_input(run: RunConfig) -> Iterator[Problem]:
    """Trajectories have advantages and no ground truth; most other variants the reverse."""
    variant = run.custom.trainer_variant
    pipeline = run.rollout_matching.pipeline
    found: frozenset[LearnsFrom | None] = run.algorithm.learns_from | {None}
    for index, entry in enumerate(pipeline.objective):
        if entry.enabled and entry.learns_from not in found:
            wrong = f"'{entry.name}' has no {entry.learns_from} to learn from under {variant}"
            needs_rewards = entry.learns_from is LearnsFrom.ADVANTAGES
            change = _SET_TRAJECTORIES if needs_rewards else "choose another custom.trainer_variant"
            yield Problem(f"{_OBJECTIVE}[{index}].name", wrong, f"remove the entry, or {change}")
    for index, diagnostic in enumerate(pipeline.diagnostics):
        if diagnostic.enabled and diagnostic.learns_from not in found:
            missing = diagnostic.learns_from
            wrong = f"'{diagnostic.name}' has no {missing} to look at under {variant}"
            yield Problem(f"{_DIAGNOSTICS}[{index}].name", wrong, "remove the entry")


def policy_gradient_agrees_with_itself(run: RunConfig) -> Iterator[Problem]:
    """Some of its settings have no effect beside others, or undo what others are for."""
    for index, entry in enumerate(run.rollout_matching.pipeline.objective):
        if not isinstance(entry, PolicyGradientEntry) or not entry.enabled:
            continue
        config = entry.config
        path = f"{_OBJECTIVE}[{index}].config"
        if config.normalize == "batch" and not run.algorithm.uses_environment:
            yield Problem(
                f"{path}.normalize",
                "batch would divide the losses of matched objects by sampled tokens too",
                "set step, rollout or constant",
            )
        if config.advantage_baseline == "leave_one_out" and config.advantage_std:
            yield Problem(
                f"{path}.advantage_baseline",
                "leave_one_out is there to have no bias, which advantage_std: true brings back",
                "set advantage_std: false, or advantage_baseline: mean",
            )
        if config.clip == "dual" and config.above_cap == "mask":
            yield Problem(
                f"{path}.above_cap",
                "mask has no effect beside clip: dual, which stops what is above ratio_cap itself",
                "set above_cap: truncate, or clip: ppo",
            )
        if config.clip == "cispo" and config.ratio_cap < 1 + config.clip_high:
            yield Problem(
                f"{path}.ratio_cap",
                f"{config.ratio_cap:g} is below 1 + clip_high ({config.clip_high:g}), where clip:"
                " cispo ends the factors of the gradient",
                f"set {1 + config.clip_high:g} or more, or lower clip_high",
            )


def reference_kl_can_be_measured(run: RunConfig) -> Iterator[Problem]:
    """It is of the tokens of `policy_gradient`, and sums over as many as it is told to."""
    for index, entry in enumerate(run.rollout_matching.pipeline.objective):
        if not isinstance(entry, ReferenceKLEntry) or not entry.enabled:
            continue
        path = f"{_OBJECTIVE}[{index}]"
        # Trajectories without one, and variants that have none, are told so already.
        if run.algorithm.learns_rewards and run.rollout_matching.pipeline.policy_gradient is None:
            yield Problem(
                f"{path}.name",
                "'reference_kl' takes the tokens of policy_gradient, and none is enabled",
                f"add one such as `{as_yaml(EXAMPLE_POLICY_GRADIENT)}`, or remove the entry",
            )
        key = f"{path}.config.top_tokens"
        if entry.config.estimator == "top" and entry.config.top_tokens is None:
            yield Problem(key, f"{MISSING} beside estimator: top", "write a number such as 20")
        if entry.config.estimator == "k3" and entry.config.top_tokens is not None:
            wrong = f"{entry.config.top_tokens} has no effect beside estimator: k3"
            yield Problem(key, wrong, "remove the key, or set estimator: top")


def updates_have_a_ratio(run: RunConfig) -> Iterator[Problem]:
    """Only the ratio of `policy_gradient` knows of updates since its tokens were sampled."""
    updates = run.training.updates_per_batch
    if updates > 1 and not run.algorithm.uses_environment:
        variant = run.custom.trainer_variant
        yield Problem(
            "training.updates_per_batch",
            f"{updates}, and {variant} learns targets, where no ratio bounds the later updates",
            f"set it to 1, or {_SET_TRAJECTORIES}",
        )


def refills_are_of_one_version(run: RunConfig) -> Iterator[Problem]:
    """A refill depends on all rewards of a step, and a stale next step begins before them."""
    rounds = 0 if run.environment is None else run.environment.refill_rounds
    staleness = run.rollout_matching.max_staleness
    if rounds and staleness:
        yield Problem(
            "environment.refill_rounds",
            f"{rounds}, and rollout_matching.max_staleness {staleness} generates the next step"
            " before it is known which groups of this one to draw again",
            "set one of the two to 0",
        )


def groups_of_samples_are_whole(run: RunConfig) -> Iterator[Problem]:
    """The rollouts of a sample are compared by one rank, and all of them are of one step."""
    size = run.stage2_ab.channel_b.rollouts_per_sample
    key = "stage2_ab.channel_b.rollouts_per_sample"
    if not run.algorithm.learns_rewards:
        if size > 1:
            wrong = f"{size} has no effect under {run.custom.trainer_variant}"
            instead = "environment.rollouts_per_example does this for environments"
            yield Problem(key, wrong, f"remove it; {instead}")
        return
    if run.rollout_matching.pipeline.policy_gradient is not None and size == 1:
        wrong = "1, and policy_gradient compares the rollouts of a sample with each other"
        yield Problem(key, wrong, "set 2 or more, or disable the policy_gradient entry")
    rollouts = run.raw_rollouts_per_step
    ranks = run.learner.world_size
    if size > 1 and rollouts % (size * ranks):
        wrong = f"{size} x {ranks} learner ranks does not divide the {rollouts} rollouts of a step"
        remedy = f"set stage2_ab.channel_b.rollouts_per_step to a multiple of {size * ranks}"
        yield Problem(key, wrong, remedy)


def geometry_is_learned(run: RunConfig) -> Iterator[Problem]:
    """Channel-B v1 matches no polygons (decision 8)."""
    if run.geometry - run.algorithm.geometry:
        yield Problem(
            "rollout_matching.geometry",
            f"poly is not in {run.custom.trainer_variant}, which matches boxes and points only",
            f"remove poly, or set custom.trainer_variant: {TrainerVariant.STAGE2_ROLLOUT_ALIGNED}",
        )


def answers_have_what_is_learned(run: RunConfig) -> Iterator[Problem]:
    """A format other than our own lacks what some keys are about.

    Digits have no distribution over bins, which the terms of coord slots are functions of.
    """
    name = run.data.answer_format
    if run.algorithm.uses_environment or name == "coord_tokens":
        return
    pipeline = run.rollout_matching.pipeline
    has_slots = bool(run.answer_format.coord_tokens)
    for path, entries in ((_OBJECTIVE, pipeline.objective), (_DIAGNOSTICS, pipeline.diagnostics)):
        for index, entry in enumerate(entries):
            if entry.enabled and entry.reads is Reads.SLOTS and not has_slots:
                yield Problem(
                    f"{path}[{index}].name",
                    f"'{entry.name}' reads one token for each coordinate, and data.answer_format"
                    f" {name} writes them in digits",
                    "remove the entry: token_ce teaches digits; or set data.answer_format:"
                    " coord_tokens",
                )
            corrects = isinstance(entry, TokenCEEntry) and entry.config.matched_desc_weight > 0
            if entry.enabled and corrects and not run.answer_format.names_each_object:
                yield Problem(
                    f"{path}[{index}].config.matched_desc_weight",
                    f"in data.answer_format {name} one phrase names several boxes, whose ground"
                    " truths may have several names",
                    "set it to 0, or set data.answer_format: coord_tokens",
                )
    for kind in sorted(run.geometry - run.answer_format.geometry):
        yield Problem(
            "rollout_matching.geometry",
            f"{kind} cannot be written in data.answer_format {name}",
            f"remove {kind}, or set data.answer_format: coord_tokens",
        )
    if run.custom.object_field_order == "geometry_first":
        yield Problem(
            "custom.object_field_order",
            f"geometry_first has no effect in data.answer_format {name}, whose order is its own",
            "remove it",
        )
    guard = run.rollout_matching.repeat_terminate
    if guard.enabled and guard.max_object_keys is not None:
        yield Problem(
            "rollout_matching.repeat_terminate.max_object_keys",
            f"{guard.max_object_keys} counts keys object_n, which data.answer_format {name} has"
            " none of",
            "remove it; ngram_repeats ends answers that go in circles",
        )


def objective_covers_channels(run: RunConfig) -> Iterator[Problem]:
    """A step of every channel must learn something; the declared objective is all there is."""
    pipeline = run.rollout_matching.pipeline
    if run.algorithm.uses_environment:
        if not any(
            isinstance(entry, PolicyGradientEntry) and entry.enabled and entry.teaches
            for entry in pipeline.objective
        ):
            yield Problem(
                _OBJECTIVE,
                "no enabled policy_gradient with a weight above 0, and nothing else teaches"
                f" {_TRAJECTORIES}",
                f"write an entry such as `{as_yaml(EXAMPLE_POLICY_GRADIENT)}`",
            )
        return
    change = ", or change stage2_ab.schedule" if run.algorithm.is_scheduled else ""
    for channel in _channels(run):
        if not any(entry.teaches for entry in pipeline.active(channel)):
            yield Problem(
                _OBJECTIVE,
                f"no enabled entry with a weight above 0, its own and a term's, covers channel"
                f" {channel}",
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
                f"{entry.config.text_gate_weight:g} acts on the text that token_ce weighs, and none"
                f" is active on channel {' and '.join(without_text)}",
                "add one there (weight 0.0: not to learn text), or set text_gate_weight: 0.0",
            )


def options_act(run: RunConfig) -> Iterator[Problem]:
    """An option that changed nothing would pass for one that was tried (decision 30)."""
    section = run.rollout_matching
    if not run.algorithm.uses_rollouts or run.algorithm.uses_environment:
        return  # like the other keys of matching, they may come from an experiment that has it
    variant = run.custom.trainer_variant
    active = section.pipeline.active(Channel.B)
    if section.supervise_separators and not any(isinstance(one, TokenCEEntry) for one in active):
        yield Problem(
            "rollout_matching.supervise_separators",
            "true, and no token_ce, which would weigh them, is active on channel B",
            "add one there, or set it to false",
        )
    if section.ot_epsilon_cap is not None and GeometryKind.POLY not in run.geometry:
        yield Problem(
            "rollout_matching.ot_epsilon_cap",
            f"{section.ot_epsilon_cap:g} has no effect without polygons, which {variant} does not"
            " learn here",
            "remove it, or learn polygons (rollout_matching.geometry)",
        )
    if section.point_tolerance != POINT_TOLERANCE and GeometryKind.POINT not in run.geometry:
        yield Problem(
            "rollout_matching.point_tolerance",
            f"{section.point_tolerance:g} has no effect without points",
            "remove it, or ask for them (rollout_matching.geometry: [bbox_2d, point_2d])",
        )
    for index, entry in enumerate(section.pipeline.objective):
        if not isinstance(entry, TokenCEEntry) or Channel.B in entry.channels:
            continue
        config = entry.config
        for key, value, specified in (
            ("matched_desc_weight", config.matched_desc_weight, 0.0),
            ("fp_end_weight", config.fp_end_weight, 1.0),
        ):
            if value != specified:
                yield Problem(
                    f"{_OBJECTIVE}[{index}].config.{key}",
                    f"{value:g} has no effect on channel A, the only one of the entry",
                    "remove it, or write it in the entry of channel B",
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
    budget = run.stage2_ab.channel_b.rollouts_per_step
    effective = run.effective_batch_size
    if run.algorithm.carries_segments and budget not in (None, effective):
        yield Problem(
            "stage2_ab.channel_b.rollouts_per_step",
            f"{budget} has no effect under {run.custom.trainer_variant}, whose steps take the"
            f" effective batch size, {effective}",
            "remove the key, and set training.effective_batch_size to the rollouts of a step",
        )


def leftovers_are_dropped(run: RunConfig) -> Iterator[Problem]:
    """Segments carried to the end of a run can only be dropped (decision 7)."""
    if run.row_rule is RowRule.CARRY and not run.training.packing_drop_last:
        yield Problem(
            "training.packing_drop_last",
            f"false, and {run.custom.trainer_variant} has no step for the segments left at the end",
            "set training.packing_drop_last: true, or training.packing: false",
        )


def packing_buffer_is_large_enough(run: RunConfig) -> Iterator[Problem]:
    """A rank's buffer must hold what is inserted before a row is taken."""
    buffer = run.training.packing_buffer
    ranks = run.learner.world_size
    rule = run.row_rule
    # Nobody knows how many segments an environment's rollouts are: there a full buffer gives a row.
    if run.algorithm.uses_environment or rule is RowRule.SEGMENT:
        return
    if rule is RowRule.CARRY:
        # Carried segments come on top. How many depends on lengths that are not known yet, so
        # that is checked when it happens.
        needed = run.training.per_device_train_batch_size
        unit = "micro-step"
        what = f"the {needed} raw rollouts of a micro-step (training.per_device_train_batch_size)"
    else:
        # A step begins with an empty buffer. How much of it waits for a row depends on lengths
        # that are not known yet: only room for all of it is safe.
        samples = len(rank_share(run.effective_batch_size, ranks, 0))
        rollouts = len(rank_share(run.raw_rollouts_per_step, ranks, 0))
        is_twice = run.rollout_matching.pipeline.policy_gradient is not None
        needed = max(samples, 2 * rollouts if is_twice else rollouts)
        unit = "step"
        share = "a whole step" if ranks == 1 else f"a rank's share of a step, of {ranks} ranks"
        what = f"{share} ({samples} samples on channel A, {rollouts} raw rollouts on channel B"
        what += ", each matched and learned by its reward)" if is_twice else ")"
    if buffer < needed:
        wrong = f"{buffer} segments cannot hold {what}"
        remedy = f"raise it to at least {needed}, or take fewer per {unit}"
        yield Problem("training.packing_buffer", wrong, remedy)


def rollouts_differ(run: RunConfig) -> Iterator[Problem]:
    """Advantages are differences between several answers to one prompt, so they are sampled."""
    mode = run.rollout_matching.resolved_decode_mode
    is_learner = "policy_gradient"
    if run.algorithm.uses_environment:
        is_learner = _TRAJECTORIES
    elif not run.algorithm.learns_rewards or run.rollout_matching.pipeline.policy_gradient is None:
        return
    if mode is DecodeMode.SAMPLE:
        return
    same = f"makes an example's rollouts all the same, and {is_learner} learns from differences"
    if run.rollout_matching.decode_mode is None:
        yield Problem("rollout_matching.decoding.temperature", f"0 is greedy: it {same}", "set 1.0")
    else:
        remedy = "remove the key, and set rollout_matching.decoding.temperature: 1.0"
        yield Problem("rollout_matching.decode_mode", f"'{mode}' {same}", remedy)


def environments_have_a_process(run: RunConfig) -> Iterator[Problem]:
    """Refuse actors of an environment whose engine is in the learner: it is in that process too."""
    if run.environment is None or not run.rollout_matching.in_learner:
        return
    beside = f"is in the learner's process under '{run.rollout_matching.backend_name}'"
    actors = "choose engines of their own (`backend=actors`)"
    if run.environment.num_actors > 1:
        wrong = f"{run.environment.num_actors}, and the environment {beside}, one in each rank"
        yield Problem("environment.num_actors", wrong, f"remove the key, or {actors}")
    if run.environment.cpus_per_actor:
        wrong = f"{run.environment.cpus_per_actor:g}, and the environment {beside}"
        remedy = f"remove the key and set learner.cpus, or {actors}"
        yield Problem("environment.cpus_per_actor", wrong, remedy)


def stop_texts_end_answers_of_environments(run: RunConfig) -> Iterator[Problem]:
    """A detection answer ends with its list, which the parser reads to the end."""
    stop = run.rollout_matching.decoding.stop
    if stop and not run.algorithm.uses_environment:
        wrong = f"{list(stop)} ends answers of environments, and this run learns from samples"
        yield Problem("rollout_matching.decoding.stop", wrong, "remove the key")


def teacher_scores_what_is_sampled(run: RunConfig) -> Iterator[Problem]:
    """A teacher reads token ids, and its log-probabilities are those of temperature 1."""
    if run.environment is None or run.environment.teacher is None:
        return
    temperature = run.rollout_matching.decoding.temperature
    if temperature not in (0.0, 1.0):  # `rollouts_differ` refuses 0
        yield Problem(
            "rollout_matching.decoding.temperature",
            f"{temperature:g}, and environment.teacher scores tokens at temperature 1",
            "set 1.0, or remove environment.teacher",
        )
    if run.environment.max_images_per_prompt:
        yield Problem(
            "environment.max_images_per_prompt",
            f"{run.environment.max_images_per_prompt}, and environment.teacher is sent token ids"
            " alone, which carry no pictures",
            "set 0, or remove environment.teacher",
        )
    if run.environment.drop_equal_groups:
        yield Problem(
            "environment.drop_equal_groups",
            "true, and groups of equal rewards are learned from environment.teacher",
            "set it to false, or remove environment.teacher",
        )
    if run.environment.refill_rounds:
        yield Problem(
            "environment.refill_rounds",
            f"{run.environment.refill_rounds}, and groups of equal rewards are learned from"
            " environment.teacher",
            "set it to 0, or remove environment.teacher",
        )


def environments_have_room(run: RunConfig) -> Iterator[Problem]:
    """Environment actors share what an engine decodes at a time."""
    size = run.rollout_matching.decode_batch_size
    if run.environment is not None and run.environment.num_actors > size:
        yield Problem(
            "environment.num_actors",
            f"{run.environment.num_actors} actors share the {size} rollouts that an engine decodes"
            " at a time, and each needs one",
            f"set it to {size} or less, or raise rollout_matching.decode_batch_size",
        )


def groups_are_whole(run: RunConfig) -> Iterator[Problem]:
    """A step has whole groups of rollouts of one example, and every learner rank at least one."""
    is_open = run.stage2_ab.channel_b.rollouts_per_step is None and any(batch_size_is_one(run))
    if not run.algorithm.uses_environment or is_open:
        return
    size = run.group_size
    rollouts = run.raw_rollouts_per_step
    ranks = run.learner.world_size
    if rollouts % size == 0 and rollouts >= size * ranks:
        return
    group = f"of {size} (environment.rollouts_per_example)"
    cannot = f"give each of {ranks} learner ranks a group {group}"
    if rollouts % size:
        cannot = f"be cut into groups {group}"
    key, amount, unit = _rollouts_of_a_step(run)
    unit = lcm(size, unit)
    needed = -(-max(rollouts, size * ranks) // unit) * unit
    change = "set"
    if key == "training.gradient_accumulation_steps":
        change = "replace it by training.effective_batch_size:"
    remedy = f"{change} {needed}, or a larger multiple of {unit}"
    yield Problem(key, f"{amount} cannot {cannot}", remedy)


def _rollouts_of_a_step(run: RunConfig) -> tuple[str, str, int]:
    """Return the key that sets a step's rollouts, their number in words, and a divisor of it."""
    training = run.training
    budget = run.stage2_ab.channel_b.rollouts_per_step
    if budget is not None:
        return "stage2_ab.channel_b.rollouts_per_step", f"{budget} rollouts a step", 1
    ranks = run.learner.world_size
    total = run.effective_batch_size
    micro_step = training.per_device_train_batch_size * ranks
    key = "training.effective_batch_size"
    value = training.effective_batch_size
    if value == total:
        return key, f"{total} rollouts a step", micro_step
    if value is None and training.gradient_accumulation_steps is not None:
        key = "training.gradient_accumulation_steps"
        value = training.gradient_accumulation_steps
    rollouts = "1 rollout" if total == 1 else f"{total} rollouts"
    amount = (
        f"{as_yaml(value)} comes to {rollouts} a step (training.per_device_train_batch_size"
        f" {training.per_device_train_batch_size} x learner.world_size {ranks} x"
        f" {run.accumulation_steps} accumulation steps), which"
    )
    return key, amount, micro_step


def batch_size_is_one(run: RunConfig) -> Iterator[Problem]:
    """The accumulation steps and the effective batch size say the same where both are written."""
    steps = run.training.gradient_accumulation_steps
    effective = run.training.effective_batch_size
    if steps is None or effective is None:
        return
    needed = run.needed_accumulation_steps(effective)
    if steps != needed:
        yield Problem(
            "training.gradient_accumulation_steps",
            f"{steps} contradicts effective_batch_size {effective}, which takes {needed} with"
            f" {run.training.per_device_train_batch_size} per device and {run.learner.world_size}"
            " learner ranks",
            "remove one of the two keys",
        )
