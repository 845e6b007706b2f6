"""Contradictions about what generates rollouts. Listed in `shared.config.checks.general`."""

from __future__ import annotations

from collections.abc import Iterator

from shared.chunking import chunk_size
from shared.config.base import Problem
from shared.config.rollout import EngineLocation, RolloutMatchingSection
from shared.config.run import RunConfig
from shared.rollouts import MAX_TEMPERATURE, DecodeMode
from shared.weight_sync.offer import LORA_RANKS

_MODE = "rollout_matching.decode_mode"
_BEAMS = "rollout_matching.num_beams"
_VLLM = "rollout_matching.vllm"
_SET_HF = "set rollout_matching.rollout_backend: hf"
_SYNC = f"{_VLLM}.sync.mode"
_LORA = f"{_VLLM}.enable_lora"

MAX_VLLM_BEAMS = 10
"""vLLM's beam search asks for the log-probabilities of twice as many tokens, and an engine gives 20
(its default `max_logprobs`)."""


def servers_are_listed_where_used(matching: RolloutMatchingSection) -> Iterator[Problem]:
    """Servers belong to `vllm.mode: server`; `colocate` and `hf` may keep the list.

    Messages about a failing server send the user there, and `derive.remarks` speaks of it.
    """
    location = matching.backend.location
    servers = matching.vllm.server
    if location is EngineLocation.ACTORS and servers is not None:
        wrong = "has no effect: under vllm.mode actors nobody asks a server"
        yield Problem(f"{_VLLM}.server", wrong, f"set {_VLLM}.mode: server, or remove the section")
    if location is EngineLocation.SERVERS and servers is None:
        yield Problem(
            f"{_VLLM}.server",
            "is required by vllm.mode server, and missing",
            "add it, for example `server: {servers: [{base_url: http://127.0.0.1:8000,"
            f" group_port: 0}}]}}`, or set {_VLLM}.mode: colocate",
        )


def one_process_has_everything(run: RunConfig) -> Iterator[Problem]:
    """Under `cluster.kind: local` the engine is in the learner's process, and there is one rank."""
    if run.cluster.kind != "local":
        return
    wrong = "local has one process for everything, and "
    back = "or set cluster.kind: ray"
    if not run.rollout_matching.in_learner:
        wrong += f"the engines of {run.rollout_matching.backend.title} have processes of their own"
        remedy = f"{_SET_HF} or {_VLLM}.mode: colocate (+experiment=stage2_hf, stage2_colocate)"
        yield Problem("cluster.kind", wrong, f"{remedy}, {back}")
    elif run.learner.world_size > 1:
        wrong += f"learner.world_size is {run.learner.world_size}"
        yield Problem("cluster.kind", wrong, f"set it to 1, {back}")
    elif run.cluster.address != "local":
        yield Problem("cluster.kind", f"{wrong}cluster.address is set", f"remove that, {back}")


def queue_has_its_own_devices(run: RunConfig) -> Iterator[Problem]:
    """A learner rank that generates itself cannot learn at the same time."""
    if run.stage2_ab.channel_b.enable_pipeline and run.rollout_matching.in_learner:
        yield Problem(
            "stage2_ab.channel_b.enable_pipeline",
            "the in-step queue needs rollouts on dedicated devices, which"
            f" {run.rollout_matching.backend.title} does not have",
            f"set {_VLLM}.mode: server or actors (rollout_backend: vllm), or switch the queue off",
        )


def staleness_has_a_queue(run: RunConfig) -> Iterator[Problem]:
    """Overlap across steps needs the queue, and two channel-B steps in a row."""
    path = "rollout_matching.max_staleness"
    staleness = run.rollout_matching.max_staleness
    if not staleness:
        return
    in_a_row = run.algorithm.uses_rollouts
    if run.algorithm.is_scheduled:
        in_a_row = run.stage2_ab.schedule.b_ratio > 0.5
    if not run.stage2_ab.channel_b.enable_pipeline:
        wrong = f"{staleness} lets the queue run on into the next step, and there is no queue"
        remedy = "set stage2_ab.channel_b.enable_pipeline: true, or max_staleness: 0"
        yield Problem(path, wrong, remedy)
    elif not in_a_row:
        wrong = f"{staleness} has no effect: no two channel-B steps are in a row"
        remedy = "set it to 0, or (stage2_two_channel) stage2_ab.schedule.b_ratio above 0.5"
        yield Problem(path, wrong, remedy)


def whole_model_generates(run: RunConfig) -> Iterator[Problem]:
    """transformers cannot generate on a part of the model."""
    if run.rollout_matching.rollout_backend == "hf" and run.learner.is_sharded:
        yield Problem(
            "rollout_matching.rollout_backend",
            "'hf' generates with the learner's own model, of which each of"
            f" {run.learner.world_size} ranks has a part (learner.parallel: fsdp)",
            "set learner.parallel: ddp, or rollout_matching.rollout_backend: vllm",
        )


def beams_are_possible(matching: RolloutMatchingSection) -> Iterator[Problem]:
    """Beam search exists in some backends, each with its own bounds (decision 21)."""
    num_beams = matching.num_beams
    is_hf = matching.rollout_backend == "hf"
    if matching.decode_mode is not DecodeMode.BEAM:
        if num_beams > 1:
            wrong = f"{num_beams} beams need decode_mode: beam"
            yield Problem(_BEAMS, wrong, f"set {_MODE}: beam, or remove num_beams")
        if matching.length_penalty != 1.0:
            wrong = f"{matching.length_penalty:g} is of beams, and there are none"
            remedy = f"set {_MODE}: beam, or remove length_penalty"
            yield Problem("rollout_matching.length_penalty", wrong, remedy)
        return
    if not matching.backend.has_beams:
        remedy = f"{_SET_HF} or {_VLLM}.mode: colocate, which have it, or remove {_MODE}"
        yield Problem(_MODE, f"{matching.backend.title} has no beam search", remedy)
    if not is_hf and matching.repeat_terminate.enabled:
        yield Problem(
            "rollout_matching.repeat_terminate.enabled",
            "true, and vLLM's beam search asks for every token anew, so its guard sees no"
            " repetition",
            f"{_SET_HF}, whose guard watches beams, or remove {_MODE} or repeat_terminate",
        )
    if num_beams == 1:
        yield Problem(_BEAMS, "1 beam is greedy search", f"set at least 2, or remove {_MODE}")
    if is_hf and num_beams > matching.decode_batch_size:
        yield Problem(
            _BEAMS,
            f"{num_beams} beams of one rollout are more than the {matching.decode_batch_size}"
            " sequences that 'hf' decodes at a time",
            f"set rollout_matching.decode_batch_size to at least {num_beams}, or lower num_beams",
        )
    if not is_hf and num_beams > MAX_VLLM_BEAMS:
        wrong = f"{num_beams} is more than the {MAX_VLLM_BEAMS} beams of vLLM's search"
        yield Problem(_BEAMS, wrong, f"lower it, or {_SET_HF}")


def sampling_is_whole(matching: RolloutMatchingSection) -> Iterator[Problem]:
    """`policy_gradient` needs every token's probability under the whole vocabulary.

    Only then can engine and learner compute the same number (decision 25).
    """
    if matching.pipeline.policy_gradient is None:
        return
    top_p = matching.decoding.top_p
    top_k = matching.decoding.top_k
    penalty = matching.repetition_penalty
    needs = "and policy_gradient needs the probability of every token under the whole vocabulary"
    for key, value, is_whole, whole in (
        ("decoding.top_p", top_p, top_p >= 1, "1.0"),
        ("decoding.top_k", top_k, top_k <= 0, "-1"),
        ("repetition_penalty", penalty, penalty == 1, "1.0"),
    ):
        if not is_whole:
            wrong = f"{value} changes what is sampled, {needs}"
            yield Problem(f"rollout_matching.{key}", wrong, f"set {whole}, or remove the key")


def adapters_can_be_sent(run: RunConfig) -> Iterator[Problem]:
    """`sync.mode: adapter` needs LoRA, and engines that serve it (decision 38)."""
    adapter = run.model.adapter
    vllm = run.rollout_matching.vllm
    ranks = run.learner.world_size
    if not run.rollout_matching.backend.takes_adapters:
        nobody = "and rollout_backend hf has no engine that takes adapters"
        remedy = "remove the key, or set rollout_backend: vllm"
        if vllm.enable_lora:
            yield Problem(_LORA, f"true, {nobody}", remedy)
        if vllm.sync.mode == "adapter":
            yield Problem(_SYNC, f"'adapter', {nobody}", remedy)
        return
    if vllm.enable_lora:
        if adapter is None:
            wrong = "true, and the learner trains no adapter"
            yield Problem(_LORA, wrong, "set model.adapter, or remove the key")
        if vllm.mode == "server" and vllm.server is not None and vllm.server.kind == "vllm":
            wrong = "true, and a stock vllm serve takes no adapter alone"
            yield Problem(_LORA, wrong, f"remove the key, or set {_VLLM}.server.kind: rollmatch")
        if adapter is not None and adapter.rank > LORA_RANKS[-1]:
            wrong = f"{adapter.rank} is more than the {LORA_RANKS[-1]} that vLLM serves"
            yield Problem("model.adapter.rank", wrong, f"lower it, or set {_LORA}: false")
    if vllm.sync.mode == "adapter":
        if not vllm.enable_lora:
            wrong = "'adapter' needs engines that serve adapters"
            yield Problem(_SYNC, wrong, f"set {_LORA}: true, or {_SYNC}: full")
        if adapter is not None and adapter.kind == "dora":
            wrong = "'adapter' cannot carry DoRA, which vLLM does not serve unmerged"
            yield Problem(_SYNC, wrong, f"set {_SYNC}: full or auto")
        if run.model.is_quantized:
            wrong = (
                "'adapter' cannot carry the weights in 4 bits that the adapter is of"
                " (model.adapter.quantize), and engines hold others"
            )
            yield Problem(_SYNC, wrong, f"set {_SYNC}: full or auto")
        if run.adapts_vision:
            wrong = (
                "'adapter' cannot carry what training.parts adapts of the vision tower or the"
                " aligner, which engines serve merged alone"
            )
            yield Problem(_SYNC, wrong, f"set {_SYNC}: full or auto")
        if (tokens := run.tokens_beside_adapter) is not None:
            wrong = (
                f"'adapter' cannot carry the embeddings of model.path's {tokens.count:,} fresh"
                " tokens, which are trained with it"
            )
            yield Problem(_SYNC, wrong, f"set {_SYNC}: full or auto")
    if ranks > 1 and vllm.mode == "server" and run.sync_mode == "adapter":
        wrong = f"'{vllm.sync.mode}' sends adapters alone, which servers take of one rank, not of"
        remedy = f"set {_SYNC}: full, or learner.world_size: 1"
        yield Problem(_SYNC, f"{wrong} {ranks}", remedy)


def temperature_suits_vllm(matching: RolloutMatchingSection) -> Iterator[Problem]:
    """vLLM samples at lower temperatures than transformers does."""
    temperature = matching.decoding.temperature
    if matching.rollout_backend == "vllm" and temperature > MAX_TEMPERATURE:
        wrong = f"{temperature:g} is above {MAX_TEMPERATURE:g}, the highest at which vLLM samples"
        yield Problem("rollout_matching.decoding.temperature", wrong, f"lower it, or {_SET_HF}")


def devices_are_set_once(matching: RolloutMatchingSection) -> Iterator[Problem]:
    """`vllm.tensor_parallel_size` is colocate's; actors and servers have their own setting."""
    elsewhere = {
        EngineLocation.ACTORS: f"set {_VLLM}.actors.tensor_parallel_size",
        EngineLocation.SERVERS: "start the servers with tensor_parallel_size",
    }
    size = matching.vllm.tensor_parallel_size
    location = matching.backend.location
    if size is not None and location in elsewhere:
        remedy = f"{elsewhere[location]}, and remove this key"
        yield Problem(f"{_VLLM}.tensor_parallel_size", f"{size} is for mode colocate", remedy)


def actor_devices_hold_an_engine(matching: RolloutMatchingSection) -> Iterator[Problem]:
    """An actor reserves exactly the GPUs of its engine, or none."""
    actors = matching.vllm.actors
    gpus = actors.gpus_per_actor
    size = actors.tensor_parallel_size
    if gpus is not None and gpus not in (0, size):
        wrong = f"{gpus:g} GPUs for an engine of tensor_parallel_size {size}"
        remedy = (
            f"set it to {size}, set {_VLLM}.actors.tensor_parallel_size: {gpus:g}, or remove the"
            " key"
        )
        yield Problem(f"{_VLLM}.actors.gpus_per_actor", wrong, remedy)


def engines_take_every_prompt(run: RunConfig) -> Iterator[Problem]:
    """Samples are admitted by `global_max_length` alone, so an engine's window is no shorter.

    Otherwise it would refuse some of them in the middle of the run.
    """
    longest = run.rollout_matching.vllm.max_model_len
    if longest is not None and longest < run.global_max_length:
        wrong = f"{longest} is less than global_max_length {run.global_max_length}, so engines"
        wrong += " would refuse prompts that the learner admits"
        remedy = "raise it to global_max_length, or remove the key"
        yield Problem(f"{_VLLM}.max_model_len", wrong, remedy)


def ranks_have_rollouts(run: RunConfig) -> Iterator[Problem]:
    """A round has at least one request for every learner rank."""
    devices = run.engine_devices
    if devices is None:  # servers are asked at the start
        return
    try:
        chunk_size(run.rollout_matching.decode_batch_size, devices, run.learner.world_size)
    except ValueError as error:
        wrong, _, remedy = str(error).partition("; ")
        yield Problem("rollout_matching.decode_batch_size", wrong, remedy)
