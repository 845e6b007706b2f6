"""What generates: values that contradict each other, or that it cannot do or does not look at."""

from __future__ import annotations

from collections.abc import Iterator

from shared.chunking import chunk_size
from shared.config.algorithm import TrainerVariant
from shared.config.base import Problem
from shared.config.derive import (
    EngineLocation,
    engine_devices,
    engines_in,
    is_sharded,
    resolved_sync_mode,
    tokens_beside_adapter,
)
from shared.config.pipeline import PolicyGradientEntry
from shared.config.run import RunConfig
from shared.rollouts import MAX_TEMPERATURE, DecodeMode
from shared.weight_sync.offer import LORA_RANKS

_MODE = "rollout_matching.decode_mode"
_VLLM = "rollout_matching.vllm"

MAX_VLLM_BEAMS = 10
"""vLLM's beam search asks for the log-probabilities of twice as many tokens, and an engine gives 20
(its default `max_logprobs`).
"""


def servers_or_actors(run: RunConfig) -> Iterator[Problem]:
    """Beside `colocate` and `hf`, to which the messages about a server that fails send the user,
    the list stays without harm (`derive.remarks`).
    """
    if engines_in(run) is EngineLocation.ACTORS and run.rollout_matching.vllm.server is not None:
        yield Problem(
            f"{_VLLM}.server",
            "has no effect: under vllm.mode actors nobody asks a server",
            f"set {_VLLM}.mode: server, or remove the section",
        )


def servers_are_listed(run: RunConfig) -> Iterator[Problem]:
    if engines_in(run) is EngineLocation.SERVERS and run.rollout_matching.vllm.server is None:
        yield Problem(
            f"{_VLLM}.server",
            "is required by vllm.mode server, and missing",
            "add it, for example `server: {servers: [{base_url: http://127.0.0.1:8000,"
            f" group_port: 0}}]}}`, or set {_VLLM}.mode: colocate, or"
            " rollout_matching.rollout_backend: hf",
        )


def queue_has_devices_of_its_own(run: RunConfig) -> Iterator[Problem]:
    if run.stage2_ab.channel_b.enable_pipeline and engines_in(run) is EngineLocation.RANKS:
        yield Problem(
            "stage2_ab.channel_b.enable_pipeline",
            f"the in-step queue needs rollouts on dedicated devices, which {_where(run)} does not"
            " have",
            f"set rollout_matching.rollout_backend: vllm and {_VLLM}.mode: server or actors, or"
            " switch the queue off",
        )


def _where(run: RunConfig) -> str:
    backend = run.rollout_matching.rollout_backend
    return (
        f"rollout_backend {backend}"
        if backend != "vllm"
        else f"vllm.mode {run.rollout_matching.vllm.mode}"
    )


def staleness_has_queue(run: RunConfig) -> Iterator[Problem]:
    if run.rollout_matching.max_staleness and not run.stage2_ab.channel_b.enable_pipeline:
        yield Problem(
            "rollout_matching.max_staleness",
            f"{run.rollout_matching.max_staleness} lets the queue between generation and learning"
            " run on into the next step, and there is no queue",
            "set stage2_ab.channel_b.enable_pipeline: true, or max_staleness: 0",
        )
    elif run.rollout_matching.max_staleness and not _has_b_steps_in_a_row(run):
        yield Problem(
            "rollout_matching.max_staleness",
            f"{run.rollout_matching.max_staleness} has no effect: the queue runs on from a"
            " channel-B step into the next one, and no two of them are in a row",
            "set max_staleness: 0, or under stage2_two_channel a stage2_ab.schedule.b_ratio"
            " above 0.5",
        )


def _has_b_steps_in_a_row(run: RunConfig) -> bool:
    """Were the run long enough."""
    if run.custom.trainer_variant is TrainerVariant.STAGE2_TWO_CHANNEL:
        return run.stage2_ab.schedule.b_ratio > 0.5
    return run.custom.trainer_variant.uses_rollouts


def whole_model_generates(run: RunConfig) -> Iterator[Problem]:
    if run.rollout_matching.rollout_backend == "hf" and is_sharded(run):
        yield Problem(
            "rollout_matching.rollout_backend",
            "'hf' generates with the learner's own model, of which each of"
            f" {run.learner.world_size} ranks has a part (learner.parallel: fsdp)",
            "set learner.parallel: ddp, or rollout_matching.rollout_backend: vllm",
        )


def beams(run: RunConfig) -> Iterator[Problem]:
    num_beams, is_beam = (
        run.rollout_matching.num_beams,
        run.rollout_matching.decode_mode is DecodeMode.BEAM,
    )
    if is_beam and engines_in(run) is not EngineLocation.RANKS:
        yield Problem(
            _MODE,
            f"vllm.mode {run.rollout_matching.vllm.mode} has no beam search",
            f"set rollout_matching.rollout_backend: hf or {_VLLM}.mode: colocate, which have it, or"
            f" remove {_MODE}",
        )
    if (
        is_beam
        and run.rollout_matching.rollout_backend == "vllm"
        and run.rollout_matching.repeat_terminate.enabled
    ):
        yield Problem(
            "rollout_matching.repeat_terminate.enabled",
            "true, and vLLM's beam search asks for every token anew, so that its guard sees no"
            " repetition",
            "set rollout_matching.rollout_backend: hf, whose guard watches beams, or remove"
            f" {_MODE} or repeat_terminate",
        )
    if is_beam and num_beams == 1:
        yield Problem(
            "rollout_matching.num_beams",
            "1 beam is greedy search",
            f"set at least 2, or remove {_MODE}",
        )
    if (
        is_beam
        and run.rollout_matching.rollout_backend == "hf"
        and num_beams > run.rollout_matching.decode_batch_size
    ):
        yield Problem(
            "rollout_matching.num_beams",
            f"{num_beams} beams of one rollout are more than the"
            f" {run.rollout_matching.decode_batch_size} sequences that 'hf' decodes at a time",
            f"set rollout_matching.decode_batch_size to at least {num_beams}, or lower num_beams",
        )
    if is_beam and run.rollout_matching.rollout_backend == "vllm" and num_beams > MAX_VLLM_BEAMS:
        yield Problem(
            "rollout_matching.num_beams",
            f"{num_beams} is more than the {MAX_VLLM_BEAMS} beams of vLLM's search",
            "lower it, or set rollout_matching.rollout_backend: hf",
        )
    if not is_beam and num_beams > 1:
        yield Problem(
            "rollout_matching.num_beams",
            f"{num_beams} beams need decode_mode: beam",
            f"set {_MODE}: beam, or remove num_beams",
        )


def sampling_is_whole(run: RunConfig) -> Iterator[Problem]:
    """What `policy_gradient` asks of sampling: engine and learner can then compute the same
    probability of every token (DESIGN 5, decision 25).
    """
    if not any(
        isinstance(entry, PolicyGradientEntry) and entry.enabled
        for entry in run.rollout_matching.pipeline.objective
    ):
        return
    decoding, penalty = run.rollout_matching.decoding, run.rollout_matching.repetition_penalty
    needs = "and policy_gradient needs the probability of every token under the whole vocabulary"
    if decoding.top_p < 1:
        yield Problem(
            "rollout_matching.decoding.top_p",
            f"{decoding.top_p:g} cuts improbable tokens off, {needs}",
            "set 1.0, or remove the key",
        )
    if decoding.top_k > 0:
        yield Problem(
            "rollout_matching.decoding.top_k",
            f"{decoding.top_k} cuts improbable tokens off, {needs}",
            "set -1, or remove the key",
        )
    if penalty != 1:
        yield Problem(
            "rollout_matching.repetition_penalty",
            f"{penalty:g} makes a token's probability depend on what was said before in a way that"
            f" the model does not learn, {needs}",
            "set 1.0, or remove the key",
        )


_TRANSPORTS = {
    EngineLocation.RANKS: ("ipc", "inproc"),
    EngineLocation.ACTORS: ("nccl", "rollmatch_gloo"),
    EngineLocation.SERVERS: ("nccl", "rollmatch_gloo"),
}
"""One of the two is for GPUs, the other for CPUs: which of them a run needs is known when it is
placed.
"""


def transport_leads_there(run: RunConfig) -> Iterator[Problem]:
    asked, place = run.rollout_matching.vllm.sync.transport, engines_in(run)
    if run.rollout_matching.rollout_backend == "vllm" and asked not in (
        "auto",
        *_TRANSPORTS[place],
    ):
        yield Problem(
            f"{_VLLM}.sync.transport",
            f"'{asked}' does not lead to engines of {_where(run)}",
            f"set auto, or {' or '.join(_TRANSPORTS[place])}",
        )


def adapter_sync(run: RunConfig) -> Iterator[Problem]:
    """What `sync.mode` asks for (spec: weight sync modes; DESIGN 9)."""
    adapter, vllm, ranks = run.model.adapter, run.rollout_matching.vllm, run.learner.world_size
    if run.rollout_matching.rollout_backend == "hf":
        yield from _engine_adapters(run)
        return
    if vllm.enable_lora and adapter is None:
        yield Problem(
            f"{_VLLM}.enable_lora",
            "true, and the learner trains no adapter",
            "set model.adapter, or remove the key",
        )
    if (
        vllm.enable_lora
        and vllm.mode == "server"
        and vllm.server is not None
        and vllm.server.kind == "vllm"
    ):
        yield Problem(
            f"{_VLLM}.enable_lora",
            "true, and a stock vllm serve takes no adapter alone",
            f"remove the key, or set {_VLLM}.server.kind: rollmatch",
        )
    if vllm.enable_lora and adapter is not None and adapter.rank > LORA_RANKS[-1]:
        yield Problem(
            "model.adapter.rank",
            f"{adapter.rank} is more than the {LORA_RANKS[-1]} that vLLM serves",
            f"lower it, or set {_VLLM}.enable_lora: false",
        )
    if vllm.sync.mode == "adapter":
        if not vllm.enable_lora:
            yield Problem(
                f"{_VLLM}.sync.mode",
                "'adapter' needs engines that serve adapters",
                f"set {_VLLM}.enable_lora: true, or {_VLLM}.sync.mode: full",
            )
        if adapter is not None and adapter.kind == "dora":
            yield Problem(
                f"{_VLLM}.sync.mode",
                "'adapter' cannot carry DoRA, which vLLM does not serve unmerged",
                f"set {_VLLM}.sync.mode: full or auto",
            )
        if (tokens := tokens_beside_adapter(run)) is not None:
            yield Problem(
                f"{_VLLM}.sync.mode",
                f"'adapter' cannot carry the embeddings of the {tokens.count:,} fresh tokens of "
                "model.path, which are trained with it and which vLLM takes in full weights only",
                f"set {_VLLM}.sync.mode: full or auto",
            )
    if ranks > 1 and resolved_sync_mode(run) == "adapter":
        yield Problem(
            f"{_VLLM}.sync.mode",
            f"'{vllm.sync.mode}' sends adapters alone, which works with one learner rank only, not"
            f" {ranks}",
            f"set {_VLLM}.sync.mode: full, or learner.world_size: 1",
        )


def _engine_adapters(run: RunConfig) -> Iterator[Problem]:
    """Under `hf` the learner's own model generates, with its adapter."""
    vllm, nobody = (
        run.rollout_matching.vllm,
        "and rollout_backend hf has no engine that takes adapters",
    )
    remedy = "remove the key, or set rollout_backend: vllm"
    if vllm.enable_lora:
        yield Problem(f"{_VLLM}.enable_lora", f"true, {nobody}", remedy)
    if vllm.sync.mode == "adapter":
        yield Problem(f"{_VLLM}.sync.mode", f"'adapter', {nobody}", remedy)


def temperature_suits_vllm(run: RunConfig) -> Iterator[Problem]:
    temperature = run.rollout_matching.decoding.temperature
    if run.rollout_matching.rollout_backend == "vllm" and temperature > MAX_TEMPERATURE:
        yield Problem(
            "rollout_matching.decoding.temperature",
            f"{temperature:g} is above {MAX_TEMPERATURE:g}, the highest at which vLLM samples",
            "lower it, or set rollout_matching.rollout_backend: hf",
        )


def colocated_devices(run: RunConfig) -> Iterator[Problem]:
    size, place = run.rollout_matching.vllm.tensor_parallel_size, engines_in(run)
    if size is not None and place is EngineLocation.ACTORS:
        yield Problem(
            f"{_VLLM}.tensor_parallel_size",
            f"{size} is for mode colocate",
            f"set {_VLLM}.actors.tensor_parallel_size, and remove this key",
        )
    if size is not None and place is EngineLocation.SERVERS:
        yield Problem(
            f"{_VLLM}.tensor_parallel_size",
            f"{size} is for mode colocate",
            "start the servers with tensor_parallel_size, and remove this key",
        )


def actor_devices(run: RunConfig) -> Iterator[Problem]:
    gpus, size = (
        run.rollout_matching.vllm.actors.gpus_per_actor,
        run.rollout_matching.vllm.actors.tensor_parallel_size,
    )
    if gpus is None or gpus in (0, size):
        return
    misfit = "cannot hold an engine" if gpus < size else "are reserved for an engine"
    larger = (
        f"set {_VLLM}.actors.tensor_parallel_size: {gpus:g} for engines of so many devices"
        if gpus > size
        else f"set it to {size}"
    )
    yield Problem(
        f"{_VLLM}.actors.gpus_per_actor",
        f"{gpus:g} GPUs {misfit} of tensor_parallel_size {size}",
        f"{larger}, or remove the key",
    )


def engine_length(run: RunConfig) -> Iterator[Problem]:
    longest = run.rollout_matching.vllm.max_model_len
    # Samples are admitted by global_max_length alone; an engine with a shorter window would refuse
    # some of them in the middle of the run.
    if longest is not None and longest < run.global_max_length:
        yield Problem(
            f"{_VLLM}.max_model_len",
            f"{longest} is less than global_max_length {run.global_max_length}, so engines would"
            " refuse prompts that the learner admits",
            "raise it to global_max_length, or remove the key",
        )


def ranks_have_rollouts(run: RunConfig) -> Iterator[Problem]:
    devices = engine_devices(run)
    if devices is None:  # servers are asked at the start
        return
    try:
        chunk_size(run.rollout_matching.decode_batch_size, devices, run.learner.world_size)
    except ValueError as error:
        wrong, _, remedy = str(error).partition("; ")
        yield Problem("rollout_matching.decode_batch_size", wrong, remedy)
