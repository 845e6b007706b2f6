"""Contradictions between values that are each legal, and the list of all checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shared.config.base import Problem
from shared.config.checks import algorithm, engines
from shared.config.pipeline import Channel
from shared.config.rollout import RolloutMatchingSection
from shared.config.run import RunConfig
from shared.rollouts import DecodeMode

_PIPELINE = "rollout_matching.pipeline"
_TEMPERATURE = "rollout_matching.decoding.temperature"
_MODE = "rollout_matching.decode_mode"


def cross_check(run: RunConfig) -> list[Problem]:
    """List every contradiction in a configuration whose values are each legal."""
    found = [problem for check in CHECKS for problem in check(run)]
    return found + [one for check in _OF_ROLLOUTS for one in check(run.rollout_matching)]


def _something_is_trained(run: RunConfig) -> Iterator[Problem]:
    parts = dict(run.training.parts)
    for name, section in parts.items():
        if section.frozen and section.learning_rate is not None:
            wrong = f"{section.learning_rate:g}, and the part is frozen"
            path = f"training.parts.{name}.learning_rate"
            yield Problem(path, wrong, "remove one of the two keys")
    if all(section.frozen for section in parts.values()):
        wrong = "all of them are frozen: nothing is left to train"
        yield Problem("training.parts", wrong, "unfreeze one")
        return
    if run.model.adapter is None:
        for name, section in parts.items():
            if section.adapted is not None:
                wrong = f"{str(section.adapted).lower()}, and the run trains no adapter"
                remedy = "set model.adapter, or remove the key"
                yield Problem(f"training.parts.{name}.adapted", wrong, remedy)
        return
    adapted = run.training.parts.adapted
    if not adapted:
        wrong = "false, and no other part is adapted: nothing is left to train"
        yield Problem("training.parts.language_model.adapted", wrong, "adapt a part")
    for part in adapted:
        if not parts[part].frozen:
            continue
        path = f"training.parts.{part}.frozen"
        if parts[part].adapted is None and len(adapted) == 1:
            wrong = "true, and model.adapter, all that is trained, is in it"
            yield Problem(path, wrong, "unfreeze it, or remove model.adapter")
        else:
            wrong = "true, and model.adapter is put into the part"
            yield Problem(path, wrong, f"unfreeze it, or set training.parts.{part}.adapted: false")


def _weights_in_4_bits_stay_whole(run: RunConfig) -> Iterator[Problem]:
    adapter = run.model.adapter
    if adapter is None or adapter.quantize is None:
        return
    path = "model.adapter.quantize"
    if adapter.kind != "lora":
        wrong = f"'{adapter.quantize}' is of LoRA alone, and model.adapter.kind is {adapter.kind}"
        yield Problem(path, wrong, "set kind: lora, or remove the key")
    if run.learner.is_sharded:
        wrong = (
            f"'{adapter.quantize}', and weights in 4 bits are not sharded (learner.parallel: fsdp)"
        )
        yield Problem(path, wrong, "set learner.parallel: ddp, or remove the key")
    matching = run.rollout_matching
    if matching.backend_name == "colocate" and matching.offload.moves_model:
        wrong = "moves the model away, and weights in 4 bits stay where they are"
        remedy = "set offload_optimizer: true and offload_model: false, or remove"
        yield Problem("rollout_matching.offload", wrong, f"{remedy} {path}")


def _memory_is_saved_where_it_can_be(run: RunConfig) -> Iterator[Problem]:
    if run.model.activation_offload and not run.model.gradient_checkpointing:
        wrong = "true, and only what a recomputed layer starts from can wait in host memory"
        remedy = "set model.gradient_checkpointing: true, or this to false"
        yield Problem("model.activation_offload", wrong, remedy)
    optimizer = run.training.optimizer
    if optimizer != "adamw_torch" and run.learner.is_sharded:
        wrong = f"'{optimizer}' has no moments of shards (learner.parallel: fsdp)"
        remedy = "set it to adamw_torch, of which each rank has its part, or learner.parallel: ddp"
        yield Problem("training.optimizer", wrong, remedy)


def _a_restart_has_a_checkpoint(run: RunConfig) -> Iterator[Problem]:
    if not run.resume.automatic:
        return
    if not run.checkpoint.full:
        wrong = "true, and checkpoint.full is false: there would be nothing to go on from"
        yield Problem("resume.automatic", wrong, "set checkpoint.full: true")
    if run.rollout_matching.vllm.actors.max_restarts == 0:
        wrong = "true, and rollout_matching.vllm.actors.max_restarts is 0: nothing is started again"
        yield Problem("resume.automatic", wrong, "raise max_restarts, or set it to false")


def _modules_are_once_per_channel(matching: RolloutMatchingSection) -> Iterator[Problem]:
    pipeline = matching.pipeline
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


def _decode_mode_fits_temperature(matching: RolloutMatchingSection) -> Iterator[Problem]:
    mode = matching.decode_mode
    temperature = matching.decoding.temperature
    if mode is DecodeMode.SAMPLE and temperature == 0:
        wrong = "'sample' contradicts decoding.temperature 0, which is greedy"
        yield Problem(_MODE, wrong, f"raise {_TEMPERATURE} above 0, or remove {_MODE}")
    if mode in (DecodeMode.GREEDY, DecodeMode.BEAM) and temperature > 0:
        wrong = f"'{mode}' contradicts decoding.temperature {temperature:g}, which is sampling"
        yield Problem(_MODE, wrong, f"set {_TEMPERATURE}: 0.0, or remove {_MODE}")


def _prompts_have_room(run: RunConfig) -> Iterator[Problem]:
    longest = run.rollout_matching.max_new_tokens
    if longest >= run.global_max_length:
        wrong = f"{run.global_max_length} tokens have no room for a prompt and max_new_tokens"
        remedy = "raise it, or lower rollout_matching.max_new_tokens"
        yield Problem("global_max_length", f"{wrong} {longest}", remedy)


def _reports_have_data(run: RunConfig) -> Iterator[Problem]:
    what = "samples"
    why = "data.val is not set"
    remedy = "set data.val to a JSONL file"
    has_data = run.data.val is not None
    if run.algorithm.uses_environment:
        what = "examples"
        why = "environment.num_eval_examples is 0"
        remedy = "set environment.num_eval_examples above 0"
        # Without the section nobody can say whether there are any examples.
        has_data = run.environment is None or run.has_held_out
    if has_data:
        return
    for key, value, none in (
        ("training.eval_steps", run.training.eval_steps, "null"),
        ("checkpoint.keep_best", run.checkpoint.keep_best, "0"),
    ):
        if value:
            wrong = f"{value} asks for reports on held-out {what}, and {why}"
            yield Problem(key, wrong, f"{remedy}, or {key}: {none}")


CHECKS: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    algorithm.has_its_data,
    algorithm.rollouts_differ,
    algorithm.environments_have_a_process,
    algorithm.environments_have_room,
    algorithm.stop_texts_end_answers_of_environments,
    algorithm.teacher_scores_what_is_sampled,
    algorithm.groups_are_whole,
    algorithm.objective_covers_channels,
    algorithm.objective_has_its_input,
    algorithm.policy_gradient_agrees_with_itself,
    algorithm.reference_kl_can_be_measured,
    algorithm.updates_have_a_ratio,
    algorithm.refills_are_of_one_version,
    algorithm.groups_of_samples_are_whole,
    engines.staleness_has_a_queue,
    engines.adapters_can_be_sent,
    _something_is_trained,
    _weights_in_4_bits_stay_whole,
    _memory_is_saved_where_it_can_be,
    _a_restart_has_a_checkpoint,
    engines.one_process_has_everything,
    engines.queue_has_its_own_devices,
    algorithm.geometry_is_learned,
    algorithm.answers_have_what_is_learned,
    algorithm.text_gate_has_text,
    algorithm.options_act,
    algorithm.budget_has_effect,
    algorithm.leftovers_are_dropped,
    algorithm.packing_buffer_is_large_enough,
    engines.whole_model_generates,
    _prompts_have_room,
    engines.engines_take_every_prompt,
    algorithm.batch_size_is_one,
    engines.ranks_have_rollouts,
    _reports_have_data,
)
_OF_ROLLOUTS: tuple[Callable[[RolloutMatchingSection], Iterator[Problem]], ...] = (
    engines.servers_are_listed_where_used,
    _modules_are_once_per_channel,
    _decode_mode_fits_temperature,
    engines.beams_are_possible,
    engines.sampling_is_whole,
    engines.devices_are_set_once,
    engines.temperature_suits_vllm,
    engines.actor_devices_hold_an_engine,
)
"""Checks within `rollout_matching`."""
