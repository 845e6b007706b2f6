"""What no single key can get wrong: values that contradict each other, and what a part of the
system cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from shared.config.algorithm import TrainerVariant
from shared.config.base import Problem
from shared.config.checks import algorithm as trajectory_checks
from shared.config.checks import algorithm as variant_checks
from shared.config.checks import engines as engine_checks
from shared.config.derive import has_held_out, needed_accumulation_steps
from shared.config.pipeline import Channel
from shared.config.run import RunConfig
from shared.rollouts import DecodeMode

Find = Callable[[RunConfig], Iterator[Problem]]

_PIPELINE = "rollout_matching.pipeline"
_SAMPLING = "rollout_matching.decoding"
_DECODING = f"{_SAMPLING}.temperature"
_MODE = "rollout_matching.decode_mode"
_VLLM = "rollout_matching.vllm"


@dataclass(frozen=True, slots=True)
class Check:
    find: Find
    reads: tuple[str, ...]
    """The keys it compares: while one of them is wrong in itself, the check has nothing to say."""


def cross_check(run: RunConfig, unsound: Iterable[str] = ()) -> list[Problem]:
    """Every contradiction in `run` that does not involve an unsound path (one whose value was
    replaced so that the rest could be checked).
    """
    untrusted = tuple(unsound)
    return [
        problem
        for check in CHECKS
        if not any(overlaps(read, path) for read in check.reads for path in untrusted)
        for problem in check.find(run)
    ]


def overlaps(a: str, b: str) -> bool:
    """Whether one dotted path lies in the other."""
    return a == b or a.startswith((f"{b}.", f"{b}[")) or b.startswith((f"{a}.", f"{a}["))


def _parts(run: RunConfig) -> Iterator[Problem]:
    of = run.training.parts
    parts = {
        "vision_tower": of.vision_tower,
        "aligner": of.aligner,
        "language_model": of.language_model,
    }
    for name, section in parts.items():
        if section.frozen and section.learning_rate is not None:
            yield Problem(
                f"training.parts.{name}.learning_rate",
                f"{section.learning_rate:g}, and the part is frozen",
                "remove one of the two keys",
            )
    if all(section.frozen for section in parts.values()):
        yield Problem(
            "training.parts", "all of them are frozen: nothing is left to train", "unfreeze one"
        )
    elif run.model.adapter is not None and of.language_model.frozen:
        yield Problem(
            "training.parts.language_model.frozen",
            "true, and model.adapter, all that is trained, is in it",
            "unfreeze it, or remove model.adapter",
        )


def _modules_once_per_channel(run: RunConfig) -> Iterator[Problem]:
    pipeline = run.rollout_matching.pipeline
    for path, entries in (
        (f"{_PIPELINE}.objective", pipeline.objective),
        (f"{_PIPELINE}.diagnostics", pipeline.diagnostics),
    ):
        taken: dict[tuple[str, Channel], int] = {}
        for index, entry in enumerate(entries):
            channels = entry.channels if entry.enabled else ()
            again = [channel for channel in channels if (entry.name, channel) in taken]
            if again:
                yield Problem(
                    f"{path}[{index}].name",
                    f"'{entry.name}' is active on channel {' and '.join(again)} already, by"
                    f" {path}[{taken[entry.name, again[0]]}]",
                    "remove or disable one of the two entries, or give each its own channel",
                )
            for channel in channels:
                taken.setdefault((entry.name, channel), index)


def _decode_mode(run: RunConfig) -> Iterator[Problem]:
    mode, temperature = run.rollout_matching.decode_mode, run.rollout_matching.decoding.temperature
    if mode is DecodeMode.SAMPLE and temperature == 0:
        yield Problem(
            _MODE,
            "'sample' contradicts decoding.temperature 0, which is greedy",
            f"raise {_DECODING} above 0, or remove {_MODE}",
        )
    if mode in (DecodeMode.GREEDY, DecodeMode.BEAM) and temperature > 0:
        yield Problem(
            _MODE,
            f"'{mode}' contradicts decoding.temperature {temperature:g}, which is sampling",
            f"set {_DECODING}: 0.0, or remove {_MODE}",
        )


def _lengths(run: RunConfig) -> Iterator[Problem]:
    if run.rollout_matching.max_new_tokens >= run.global_max_length:
        yield Problem(
            "global_max_length",
            f"{run.global_max_length} tokens leave no room for a prompt beside"
            f" rollout_matching.max_new_tokens {run.rollout_matching.max_new_tokens}",
            "raise global_max_length or lower rollout_matching.max_new_tokens",
        )


def _accumulation(run: RunConfig) -> Iterator[Problem]:
    given, effective = run.training.gradient_accumulation_steps, run.training.effective_batch_size
    if given is None or effective is None:
        return
    needed = needed_accumulation_steps(run, effective)
    if given != needed:
        yield Problem(
            "training.gradient_accumulation_steps",
            f"{given} contradicts effective_batch_size {effective}, which takes {needed} with"
            f" {run.training.per_device_train_batch_size} per device and {run.learner.world_size}"
            " learner ranks",
            "remove one of the two keys",
        )


def _held_out(run: RunConfig) -> Iterator[Problem]:
    """What only a report on held-out samples, or on held-out examples of an environment, gives."""
    if run.custom.trainer_variant is TrainerVariant.TRAJECTORY_PG:
        # Without the section nobody can say whether there are any.
        is_there = run.environment is None or has_held_out(run)
        what, why, remedy = (
            "examples",
            "environment.num_eval_examples is 0",
            "set environment.num_eval_examples above 0",
        )
    else:
        is_there = run.data.val is not None
        what, why, remedy = "samples", "data.val is not set", "set data.val to a JSONL file"
    for key, value, none in (
        ("training.eval_steps", run.training.eval_steps, "null"),
        ("checkpoint.keep_best", run.checkpoint.keep_best, "0"),
    ):
        if value and not is_there:
            yield Problem(
                key,
                f"{value} asks for reports on held-out {what}, and {why}",
                f"{remedy}, or {key}: {none}",
            )


_VARIANT = "custom.trainer_variant"
_SCHEDULE = "stage2_ab.schedule"
_BUDGET = "stage2_ab.channel_b.rollouts_per_step"
_ENGINES = ("rollout_matching.rollout_backend", f"{_VLLM}.mode")
_BATCH = (
    "training.gradient_accumulation_steps",
    "training.effective_batch_size",
    "training.per_device_train_batch_size",
    "learner.world_size",
)
_DEVICES = (
    *_ENGINES,
    f"{_VLLM}.actors.num_actors",
    f"{_VLLM}.actors.tensor_parallel_size",
    f"{_VLLM}.tensor_parallel_size",
    "learner.world_size",
)

CHECKS: tuple[Check, ...] = (
    # Whatever the variant: where that is wrong itself, one of the two is missing still.
    Check(variant_checks.has_samples_or_environment, ("data.train", "environment")),
    Check(
        variant_checks.samples_or_environment_suit,
        (_VARIANT, "data.train", "data.val", "environment"),
    ),
    Check(trajectory_checks.rollouts_differ, (_VARIANT, _DECODING, _MODE)),
    Check(trajectory_checks.engines_can_be_asked, (_VARIANT, *_ENGINES)),
    Check(
        trajectory_checks.images_reach_all_ranks,
        (
            _VARIANT,
            "environment.max_images_per_prompt",
            "learner.parallel",
            "learner.world_size",
        ),
    ),
    Check(
        trajectory_checks.environments_have_room,
        ("environment.num_actors", "rollout_matching.decode_batch_size"),
    ),
    Check(trajectory_checks.has_policy_gradient, (_VARIANT, _PIPELINE)),
    Check(
        trajectory_checks.groups_are_whole,
        (_VARIANT, "environment.rollouts_per_example", _BUDGET, *_BATCH),
    ),
    Check(variant_checks.only_its_objective, (_VARIANT, _PIPELINE)),
    Check(
        engine_checks.staleness_has_queue,
        (
            "rollout_matching.max_staleness",
            "stage2_ab.channel_b.enable_pipeline",
            _VARIANT,
            _SCHEDULE,
        ),
    ),
    Check(
        engine_checks.adapter_sync,
        (
            f"{_VLLM}.sync.mode",
            f"{_VLLM}.enable_lora",
            *_ENGINES,
            f"{_VLLM}.server",
            "model.adapter",
            "model.path",
            "learner.world_size",
        ),
    ),
    Check(_parts, ("training.parts", "model.adapter")),
    Check(engine_checks.servers_or_actors, (*_ENGINES, f"{_VLLM}.server")),
    Check(engine_checks.servers_are_listed, (*_ENGINES, f"{_VLLM}.server")),
    Check(
        engine_checks.queue_has_devices_of_its_own,
        ("stage2_ab.channel_b.enable_pipeline", *_ENGINES),
    ),
    Check(variant_checks.boxes_only, (_VARIANT, "rollout_matching.geometry")),
    Check(variant_checks.objective_covers_channels, (_VARIANT, _SCHEDULE, _PIPELINE)),
    Check(variant_checks.text_gate_has_text, (_VARIANT, _SCHEDULE, _PIPELINE)),
    Check(variant_checks.budget_has_effect, (_VARIANT, _BUDGET, *_BATCH)),
    Check(variant_checks.carry_only, (_VARIANT, "training.packing", "training.packing_drop_last")),
    Check(
        variant_checks.packing_buffer,
        (_VARIANT, _BUDGET, "training.packing", "training.packing_buffer", *_BATCH),
    ),
    Check(_modules_once_per_channel, (_PIPELINE,)),
    Check(_decode_mode, (_MODE, _DECODING)),
    Check(
        engine_checks.beams,
        (
            _MODE,
            "rollout_matching.num_beams",
            "rollout_matching.decode_batch_size",
            "rollout_matching.repeat_terminate",
            *_ENGINES,
        ),
    ),
    Check(
        engine_checks.sampling_is_whole,
        (
            _PIPELINE,
            f"{_SAMPLING}.top_p",
            f"{_SAMPLING}.top_k",
            "rollout_matching.repetition_penalty",
        ),
    ),
    Check(
        engine_checks.whole_model_generates,
        ("rollout_matching.rollout_backend", "learner.parallel", "learner.world_size"),
    ),
    Check(_lengths, ("global_max_length", "rollout_matching.max_new_tokens")),
    Check(engine_checks.engine_length, ("global_max_length", f"{_VLLM}.max_model_len")),
    Check(_accumulation, _BATCH),
    Check(engine_checks.ranks_have_rollouts, ("rollout_matching.decode_batch_size", *_DEVICES)),
    Check(
        _held_out,
        (_VARIANT, "training.eval_steps", "checkpoint.keep_best", "data.val", "environment"),
    ),
    Check(engine_checks.transport_leads_there, (f"{_VLLM}.sync.transport", *_ENGINES)),
    Check(engine_checks.colocated_devices, (f"{_VLLM}.tensor_parallel_size", *_ENGINES)),
    Check(
        engine_checks.temperature_suits_vllm,
        ("rollout_matching.rollout_backend", f"{_SAMPLING}.temperature"),
    ),
    Check(
        engine_checks.actor_devices,
        (f"{_VLLM}.actors.gpus_per_actor", f"{_VLLM}.actors.tensor_parallel_size"),
    ),
)
