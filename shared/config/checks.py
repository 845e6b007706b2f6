"""What no single key can get wrong: values that contradict each other, and what a part of the system cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from shared.chunking import chunk_size
from shared.config import variants
from shared.config.base import Problem
from shared.config.derive import engine_devices, needed_accumulation_steps, resolved_sync_mode
from shared.config.pipeline import Channel
from shared.config.run import RunConfig
from shared.rollouts import DecodeMode

Find = Callable[[RunConfig], Iterator[Problem]]

_PIPELINE = "rollout_matching.pipeline"
_DECODING = "rollout_matching.decoding.temperature"
_MODE = "rollout_matching.decode_mode"
_VLLM = "rollout_matching.vllm"
_MAX_SERVED_RANK = 512
"""Of an adapter in vLLM."""


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


def _staleness(run: RunConfig) -> Iterator[Problem]:
    if run.rollout_matching.max_staleness and not run.stage2_ab.channel_b.enable_pipeline:
        yield Problem(
            "rollout_matching.max_staleness",
            f"{run.rollout_matching.max_staleness} lets the queue between generation and learning run on into the next step, and there is no queue",
            "set stage2_ab.channel_b.enable_pipeline: true, or max_staleness: 0",
        )


def _adapter_sync(run: RunConfig) -> Iterator[Problem]:
    """What `sync.mode` asks for (spec: weight sync modes; DESIGN 9)."""
    adapter, vllm, ranks = run.model.adapter, run.rollout_matching.vllm, run.learner.world_size
    if vllm.enable_lora and adapter is None:
        yield Problem(f"{_VLLM}.enable_lora", "true, and the learner trains no adapter", "set model.adapter, or remove the key")
    if vllm.enable_lora and vllm.mode == "server" and vllm.server is not None and vllm.server.kind == "vllm":
        yield Problem(f"{_VLLM}.enable_lora", "true, and a stock vllm serve takes no adapter alone", f"remove the key, or set {_VLLM}.server.kind: rollmatch")
    if vllm.enable_lora and adapter is not None and adapter.rank > _MAX_SERVED_RANK:
        yield Problem(
            "model.adapter.rank", f"{adapter.rank} is more than the {_MAX_SERVED_RANK} that vLLM serves", f"lower it, or set {_VLLM}.enable_lora: false"
        )
    if vllm.sync.mode == "adapter":
        if not vllm.enable_lora:
            yield Problem(f"{_VLLM}.sync.mode", "'adapter' needs engines that serve adapters", f"set {_VLLM}.enable_lora: true, or {_VLLM}.sync.mode: full")
        if adapter is not None and adapter.kind == "dora":
            yield Problem(f"{_VLLM}.sync.mode", "'adapter' cannot carry DoRA, which vLLM does not serve unmerged", f"set {_VLLM}.sync.mode: full or auto")
    if ranks > 1 and resolved_sync_mode(run) == "adapter":
        yield Problem(
            f"{_VLLM}.sync.mode",
            f"'{vllm.sync.mode}' syncs adapters alone, which {ranks} learner ranks cannot",
            f"set {_VLLM}.sync.mode: full, or learner.world_size: 1",
        )


def _parts(run: RunConfig) -> Iterator[Problem]:
    of = run.training.parts
    parts = {"vision_tower": of.vision_tower, "aligner": of.aligner, "language_model": of.language_model}
    for name, section in parts.items():
        if section.frozen and section.learning_rate is not None:
            yield Problem(f"training.parts.{name}.learning_rate", f"{section.learning_rate:g}, and the part is frozen", "remove one of the two keys")
    if all(section.frozen for section in parts.values()):
        yield Problem("training.parts", "all of them are frozen: nothing is left to train", "unfreeze one")
    elif run.model.adapter is not None and of.language_model.frozen:
        yield Problem("training.parts.language_model.frozen", "true, and model.adapter, all that is trained, is in it", "unfreeze it, or remove model.adapter")


def _flash_attention(run: RunConfig) -> Iterator[Problem]:
    if run.model.attn_implementation == "flash_attention_2" and run.model.dtype != "bfloat16":
        yield Problem("model.attn_implementation", f"'flash_attention_2' does not compute in {run.model.dtype}", "set model.dtype: bfloat16, or sdpa or eager")


def _server(run: RunConfig) -> Iterator[Problem]:
    vllm = run.rollout_matching.vllm
    if run.rollout_matching.rollout_backend == "vllm" and vllm.mode == "server" and vllm.server is None:
        yield Problem(
            f"{_VLLM}.server",
            "is required by vllm.mode server, and missing",
            f"add it, for example `server: {{servers: [{{base_url: http://127.0.0.1:8000, group_port: 0}}]}}`, or set {_VLLM}.mode: colocate, "
            "or rollout_matching.rollout_backend: hf",
        )


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


def _modules_once_per_channel(run: RunConfig) -> Iterator[Problem]:
    pipeline = run.rollout_matching.pipeline
    for path, entries in ((f"{_PIPELINE}.objective", pipeline.objective), (f"{_PIPELINE}.diagnostics", pipeline.diagnostics)):
        taken: dict[tuple[str, Channel], int] = {}
        for index, entry in enumerate(entries):
            channels = entry.channels if entry.enabled else ()
            again = [channel for channel in channels if (entry.name, channel) in taken]
            if again:
                yield Problem(
                    f"{path}[{index}].name",
                    f"'{entry.name}' is active on channel {' and '.join(again)} already, by {path}[{taken[entry.name, again[0]]}]",
                    "remove or disable one of the two entries, or give each its own channel",
                )
            for channel in channels:
                taken.setdefault((entry.name, channel), index)


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
            f"vllm.mode {run.rollout_matching.vllm.mode} has no beam search",
            f"set rollout_matching.rollout_backend: hf or {_VLLM}.mode: colocate, which have it, or remove {_MODE}",
        )
    if is_beam and run.rollout_matching.rollout_backend == "vllm" and run.rollout_matching.repeat_terminate.enabled:
        yield Problem(
            "rollout_matching.repeat_terminate.enabled",
            "true, and vLLM's beam search asks for every token anew, so that its guard sees no repetition",
            f"set rollout_matching.rollout_backend: hf, whose guard watches beams, or remove {_MODE} or repeat_terminate",
        )
    if is_beam and num_beams == 1:
        yield Problem("rollout_matching.num_beams", "1 beam is greedy search", f"set at least 2, or remove {_MODE}")
    if not is_beam and num_beams > 1:
        yield Problem("rollout_matching.num_beams", f"{num_beams} beams need decode_mode: beam", f"set {_MODE}: beam, or remove num_beams")


def _whole_model(run: RunConfig) -> Iterator[Problem]:
    if run.rollout_matching.rollout_backend == "hf" and run.learner.parallel == "fsdp" and run.learner.world_size > 1:
        yield Problem(
            "rollout_matching.rollout_backend",
            f"'hf' generates with the learner's own model, of which each of {run.learner.world_size} ranks has a part (learner.parallel: fsdp)",
            "set learner.parallel: ddp, or rollout_matching.rollout_backend: vllm",
        )


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
    devices = engine_devices(run)
    if devices is None:  # servers are asked at the start
        return
    try:
        chunk_size(run.rollout_matching.decode_batch_size, devices, run.learner.world_size)
    except ValueError as error:
        wrong, _, remedy = str(error).partition("; ")
        yield Problem("rollout_matching.decode_batch_size", wrong, remedy)


def _eval_steps(run: RunConfig) -> Iterator[Problem]:
    if run.training.eval_steps is not None and run.data.val is None:
        yield Problem(
            "training.eval_steps",
            f"{run.training.eval_steps} asks for reports on held-out samples, and data.val is not set",
            "set data.val to a JSONL file, or remove training.eval_steps",
        )


def _actor_devices(run: RunConfig) -> Iterator[Problem]:
    actors = run.rollout_matching.vllm.actors
    if actors.tensor_parallel_size > 1 and actors.gpus_per_actor is not None and 0 < actors.gpus_per_actor != actors.tensor_parallel_size:
        yield Problem(
            f"{_VLLM}.actors.gpus_per_actor",
            f"{actors.gpus_per_actor:g} GPUs cannot hold an engine of tensor_parallel_size {actors.tensor_parallel_size}",
            f"set it to {actors.tensor_parallel_size}, or remove the key",
        )


_VARIANT = "custom.trainer_variant"
_SCHEDULE = "stage2_ab.schedule"
_BUDGET = "stage2_ab.channel_b.rollouts_per_step"
_ENGINES = ("rollout_matching.rollout_backend", f"{_VLLM}.mode")
_BATCH = ("training.gradient_accumulation_steps", "training.effective_batch_size", "training.per_device_train_batch_size", "learner.world_size")
_DEVICES = (*_ENGINES, f"{_VLLM}.actors.num_actors", f"{_VLLM}.actors.tensor_parallel_size", f"{_VLLM}.tensor_parallel_size", "learner.world_size")

CHECKS: tuple[Check, ...] = (
    Check(variants.known_variant, (_VARIANT,)),
    Check(_staleness, ("rollout_matching.max_staleness", "stage2_ab.channel_b.enable_pipeline")),
    Check(_adapter_sync, (f"{_VLLM}.sync.mode", f"{_VLLM}.enable_lora", f"{_VLLM}.mode", f"{_VLLM}.server", "model.adapter", "learner.world_size")),
    Check(_parts, ("training.parts", "model.adapter")),
    Check(_flash_attention, ("model.attn_implementation", "model.dtype")),
    Check(_server, (*_ENGINES, f"{_VLLM}.server")),
    Check(_dedicated_devices, ("stage2_ab.channel_b.enable_pipeline", *_ENGINES)),
    Check(variants.boxes_only, (_VARIANT, "rollout_matching.geometry")),
    Check(variants.objective_covers_channels, (_VARIANT, _SCHEDULE, _PIPELINE)),
    Check(variants.text_gate_has_text, (_VARIANT, _SCHEDULE, _PIPELINE)),
    Check(variants.budget_has_effect, (_VARIANT, _BUDGET, *_BATCH)),
    Check(variants.carry_only, (_VARIANT, "training.packing", "training.packing_drop_last")),
    Check(variants.packing_buffer, (_VARIANT, _BUDGET, "training.packing", "training.packing_buffer", *_BATCH)),
    Check(_modules_once_per_channel, (_PIPELINE,)),
    Check(_decode_mode, (_MODE, _DECODING)),
    Check(_beams, (_MODE, "rollout_matching.num_beams", "rollout_matching.repeat_terminate", *_ENGINES)),
    Check(_whole_model, ("rollout_matching.rollout_backend", "learner.parallel", "learner.world_size")),
    Check(_lengths, ("global_max_length", "rollout_matching.max_new_tokens")),
    Check(_model_length, ("global_max_length", f"{_VLLM}.max_model_len")),
    Check(_accumulation, _BATCH),
    Check(_chunking, ("rollout_matching.decode_batch_size", *_DEVICES)),
    Check(_eval_steps, ("training.eval_steps", "data.val")),
    Check(_actor_devices, (f"{_VLLM}.actors.gpus_per_actor", f"{_VLLM}.actors.tensor_parallel_size")),
)
