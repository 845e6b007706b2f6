"""What no single key can get wrong: values that contradict each other, and values that this version does not serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from shared.chunking import chunk_size
from shared.config.base import Problem
from shared.config.custom import TrainerVariant
from shared.config.derive import needed_accumulation_steps
from shared.config.pipeline import Channel
from shared.config.run import RunConfig
from shared.rollouts import DecodeMode

Find = Callable[[RunConfig], Iterator[Problem]]

_DECODING = "rollout_matching.decoding.temperature"
_MODE = "rollout_matching.decode_mode"
_VLLM = "rollout_matching.vllm"


@dataclass(frozen=True, slots=True)
class Check:
    find: Find
    reads: tuple[str, ...]
    """The keys it compares: while one of them is wrong in itself, the check has nothing to say."""


def cross_check(run: RunConfig, unsound: Iterable[str] = ()) -> list[Problem]:
    """Every contradiction in `run` that does not involve an unsound path (one whose value was replaced so that the rest could be checked)."""
    untrusted = tuple(unsound)
    return [problem for check in CHECKS if not any(overlaps(read, path) for read in check.reads for path in untrusted) for problem in check.find(run)]


def overlaps(a: str, b: str) -> bool:
    """Whether one dotted path lies in the other."""
    return a == b or a.startswith((f"{b}.", f"{b}[")) or b.startswith((f"{a}.", f"{a}["))


def _variant(run: RunConfig) -> Iterator[Problem]:
    variant = run.custom.trainer_variant
    if variant not in (TrainerVariant.STAGE1_SFT, TrainerVariant.STAGE2_TWO_CHANNEL):
        yield Problem("custom.trainer_variant", f"'{variant}' is not in this version", "set stage2_two_channel or stage1_sft")


def _world_size(run: RunConfig) -> Iterator[Problem]:
    if run.learner.world_size > 1:
        yield Problem("learner.world_size", f"{run.learner.world_size} learner ranks are not in this version", "set learner.world_size: 1")


def _staleness(run: RunConfig) -> Iterator[Problem]:
    if run.rollout_matching.max_staleness > 0:
        yield Problem("rollout_matching.max_staleness", "rollouts of older weights are not in this version", "set rollout_matching.max_staleness: 0")


def _sync_mode(run: RunConfig) -> Iterator[Problem]:
    mode = run.rollout_matching.vllm.sync.mode
    if mode != "full":
        yield Problem(f"{_VLLM}.sync.mode", f"'{mode}' needs LoRA, which is not in this version", f"set {_VLLM}.sync.mode: full")


def _backend(run: RunConfig) -> Iterator[Problem]:
    if run.custom.trainer_variant.uses_rollouts and run.rollout_matching.rollout_backend != "vllm":
        yield Problem("rollout_matching.rollout_backend", "'hf' is not in this version", f"set rollout_matching.rollout_backend: vllm and {_VLLM}.mode: actors")


def _vllm_mode(run: RunConfig) -> Iterator[Problem]:
    mode = run.rollout_matching.vllm.mode
    if run.custom.trainer_variant.uses_rollouts and run.rollout_matching.rollout_backend == "vllm" and mode != "actors":
        yield Problem(f"{_VLLM}.mode", f"'{mode}' is not in this version", f"set {_VLLM}.mode: actors")


def _dedicated_devices(run: RunConfig) -> Iterator[Problem]:
    matching = run.rollout_matching
    if run.stage2_ab.channel_b.enable_pipeline and (matching.rollout_backend != "vllm" or matching.vllm.mode == "colocate"):
        yield Problem(
            "stage2_ab.channel_b.enable_pipeline",
            f"the in-step queue needs rollouts on dedicated devices, which {_where(run)} does not have",
            f"set rollout_matching.rollout_backend: vllm and {_VLLM}.mode: server or actors, or switch the queue off",
        )


def _where(run: RunConfig) -> str:
    backend = run.rollout_matching.rollout_backend
    return f"rollout_backend {backend}" if backend != "vllm" else f"vllm.mode {run.rollout_matching.vllm.mode}"


def _objective_covers_channels(run: RunConfig) -> Iterator[Problem]:
    b_ratio = run.stage2_ab.schedule.b_ratio
    two_channels = run.custom.trainer_variant is TrainerVariant.STAGE2_TWO_CHANNEL
    needed = {Channel.A: not two_channels or b_ratio < 1 or run.stage2_ab.schedule.warmup_steps > 0, Channel.B: two_channels and b_ratio > 0}
    for channel in (channel for channel, is_used in needed.items() if is_used):
        if not any(entry.weight > 0 for entry in run.rollout_matching.pipeline.active(channel)):
            yield Problem(
                "rollout_matching.pipeline.objective",
                f"no enabled entry with a weight above 0 covers channel {channel}, so its steps would learn nothing",
                f"add {channel} to the channels of an entry, or change stage2_ab.schedule",
            )


def _decode_mode(run: RunConfig) -> Iterator[Problem]:
    mode, temperature = run.rollout_matching.decode_mode, run.rollout_matching.decoding.temperature
    if mode is DecodeMode.SAMPLE and temperature == 0:
        yield Problem(_MODE, "'sample' contradicts decoding.temperature 0, which is greedy", f"raise {_DECODING} above 0, or remove {_MODE}")
    if mode in (DecodeMode.GREEDY, DecodeMode.BEAM) and temperature > 0:
        yield Problem(_MODE, f"'{mode}' contradicts decoding.temperature {temperature:g}, which is sampling", f"set {_DECODING}: 0.0, or remove {_MODE}")


def _beams(run: RunConfig) -> Iterator[Problem]:
    num_beams, is_beam = run.rollout_matching.num_beams, run.rollout_matching.decode_mode is DecodeMode.BEAM
    if is_beam and run.rollout_matching.rollout_backend == "vllm" and run.rollout_matching.vllm.mode != "colocate":
        yield Problem(
            _MODE,
            f"vllm.mode {run.rollout_matching.vllm.mode} has no beam search; rollout_backend hf and vllm.mode colocate have it, which are not in this version",
            f"remove {_MODE}",
        )
    if is_beam and num_beams == 1:
        yield Problem("rollout_matching.num_beams", "1 beam is greedy search", f"set at least 2, or remove {_MODE}")
    if not is_beam and num_beams > 1:
        yield Problem("rollout_matching.num_beams", f"{num_beams} beams need decode_mode: beam", f"set {_MODE}: beam, or remove num_beams")


def _lengths(run: RunConfig) -> Iterator[Problem]:
    if run.rollout_matching.max_new_tokens >= run.global_max_length:
        yield Problem(
            "global_max_length",
            f"{run.global_max_length} tokens leave no room for a prompt beside rollout_matching.max_new_tokens {run.rollout_matching.max_new_tokens}",
            "raise global_max_length or lower rollout_matching.max_new_tokens",
        )


def _model_length(run: RunConfig) -> Iterator[Problem]:
    longest = run.rollout_matching.vllm.max_model_len
    # Samples are admitted by global_max_length alone; an engine with a shorter window would refuse some of them in the middle of the run.
    if longest is not None and longest < run.global_max_length:
        yield Problem(
            f"{_VLLM}.max_model_len",
            f"{longest} is less than global_max_length {run.global_max_length}, so engines would refuse prompts that the learner admits",
            "raise it to global_max_length, or remove the key",
        )


def _accumulation(run: RunConfig) -> Iterator[Problem]:
    given, effective = run.training.gradient_accumulation_steps, run.training.effective_batch_size
    if given is None or effective is None:
        return
    needed = needed_accumulation_steps(run, effective)
    if given != needed:
        yield Problem(
            "training.gradient_accumulation_steps",
            f"{given} contradicts effective_batch_size {effective}, which takes {needed} with {run.training.per_device_train_batch_size} per device "
            f"and {run.learner.world_size} learner ranks",
            "remove one of the two keys",
        )


def _chunking(run: RunConfig) -> Iterator[Problem]:
    actors = run.rollout_matching.vllm.actors
    try:
        chunk_size(run.rollout_matching.decode_batch_size, [actors.tensor_parallel_size] * actors.num_actors, run.learner.world_size)
    except ValueError as error:
        wrong, _, remedy = str(error).partition("; ")
        yield Problem("rollout_matching.decode_batch_size", wrong, remedy)


def _packing_buffer(run: RunConfig) -> Iterator[Problem]:
    buffer, window = run.training.packing_buffer, run.training.packing_window
    if run.training.packing and buffer < window:
        yield Problem(
            "training.packing_buffer",
            f"{buffer} segments cannot hold a packing_window of {window} rollouts",
            f"raise it to at least {window}, or lower training.packing_window",
        )


def _flash_attention(run: RunConfig) -> Iterator[Problem]:
    if run.model.attn_implementation == "flash_attention_2" and run.model.dtype != "bfloat16":
        yield Problem("model.attn_implementation", f"flash_attention_2 does not compute in {run.model.dtype}", "set model.dtype: bfloat16, or choose sdpa")


def _actor_devices(run: RunConfig) -> Iterator[Problem]:
    actors = run.rollout_matching.vllm.actors
    if actors.tensor_parallel_size > 1 and actors.gpus_per_actor is not None and 0 < actors.gpus_per_actor != actors.tensor_parallel_size:
        yield Problem(
            f"{_VLLM}.actors.gpus_per_actor",
            f"{actors.gpus_per_actor:g} GPUs cannot hold an engine of tensor_parallel_size {actors.tensor_parallel_size}",
            f"set it to {actors.tensor_parallel_size}, or remove the key",
        )


_VARIANT = "custom.trainer_variant"
_ENGINES = ("rollout_matching.rollout_backend", f"{_VLLM}.mode")
_DEVICES = (f"{_VLLM}.actors.num_actors", f"{_VLLM}.actors.tensor_parallel_size", "learner.world_size")

CHECKS: tuple[Check, ...] = (
    Check(_variant, (_VARIANT,)),
    Check(_world_size, ("learner.world_size",)),
    Check(_staleness, ("rollout_matching.max_staleness",)),
    Check(_sync_mode, (f"{_VLLM}.sync.mode",)),
    Check(_backend, (_VARIANT, "rollout_matching.rollout_backend")),
    Check(_vllm_mode, (_VARIANT, *_ENGINES)),
    Check(_dedicated_devices, ("stage2_ab.channel_b.enable_pipeline", *_ENGINES)),
    Check(_objective_covers_channels, (_VARIANT, "stage2_ab.schedule", "rollout_matching.pipeline")),
    Check(_decode_mode, (_MODE, _DECODING)),
    Check(_beams, (_MODE, "rollout_matching.num_beams", *_ENGINES)),
    Check(_lengths, ("global_max_length", "rollout_matching.max_new_tokens")),
    Check(_model_length, ("global_max_length", f"{_VLLM}.max_model_len")),
    Check(
        _accumulation, ("training.gradient_accumulation_steps", "training.effective_batch_size", "training.per_device_train_batch_size", "learner.world_size")
    ),
    Check(_chunking, ("rollout_matching.decode_batch_size", *_DEVICES)),
    Check(_packing_buffer, ("training.packing", "training.packing_buffer", "training.packing_window")),
    Check(_flash_attention, ("model.attn_implementation", "model.dtype")),
    Check(_actor_devices, (f"{_VLLM}.actors.gpus_per_actor", f"{_VLLM}.actors.tensor_parallel_size")),
)
