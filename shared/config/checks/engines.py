"""Contradictions about what generates rollouts. Listed in `shared.config.checks.general`."""

from __future__ import annotations

from collections.abc import Iterator

from shared.chunking import chunk_size
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
_BEAMS = "rollout_matching.num_beams"
_VLLM = "rollout_matching.vllm"
_SET_HF = "set rollout_matching.rollout_backend: hf"

MAX_VLLM_BEAMS = 10
"""vLLM's beam search asks for the log-probabilities of twice as many tokens, and an engine gives 20
(its default `max_logprobs`)."""


def servers_are_listed_where_used(run: RunConfig) -> Iterator[Problem]:
    """Servers belong to `vllm.mode: server`.

    `colocate` and `hf` may keep the list: messages about a failing server send the user there, and
    `derive.remarks` speaks of it.
    """
    location, servers = engines_in(run), run.rollout_matching.vllm.server
    if location is EngineLocation.ACTORS and servers is not None:
        yield Problem(
            f"{_VLLM}.server",
            "has no effect: under vllm.mode actors nobody asks a server",
            f"set {_VLLM}.mode: server, or remove the section",
        )
    if location is EngineLocation.SERVERS and servers is None:
        yield Problem(
            f"{_VLLM}.server",
            "is required by vllm.mode server, and missing",
            "add it, for example `server: {servers: [{base_url: http://127.0.0.1:8000,"
            f" group_port: 0}}]}}`, or set {_VLLM}.mode: colocate, or"
            " rollout_matching.rollout_backend: hf",
        )


def queue_has_its_own_devices(run: RunConfig) -> Iterator[Problem]:
    """A learner rank that generates itself cannot learn at the same time."""
    if run.stage2_ab.channel_b.enable_pipeline and engines_in(run) is EngineLocation.RANKS:
        yield Problem(
            "stage2_ab.channel_b.enable_pipeline",
            "the in-step queue needs rollouts on dedicated devices, which"
            f" {run.rollout_matching.backend.title} does not have",
            f"set rollout_matching.rollout_backend: vllm and {_VLLM}.mode: server or actors, or"
            " switch the queue off",
        )


def staleness_has_a_queue(run: RunConfig) -> Iterator[Problem]:
    """Overlap across steps needs the queue, and two channel-B steps in a row."""
    staleness = run.rollout_matching.max_staleness
    if not staleness:
        return
    in_a_row = run.algorithm.uses_rollouts
    if run.algorithm.is_scheduled:
        in_a_row = run.stage2_ab.schedule.b_ratio > 0.5
    if not run.stage2_ab.channel_b.enable_pipeline:
        yield Problem(
            "rollout_matching.max_staleness",
            f"{staleness} lets the queue between generation and learning run on into the next"
            " step, and there is no queue",
            "set stage2_ab.channel_b.enable_pipeline: true, or max_staleness: 0",
        )
    elif not in_a_row:
        yield Problem(
            "rollout_matching.max_staleness",
            f"{staleness} has no effect: the queue runs on from a channel-B step into the next"
            " one, and no two of them are in a row",
            "set max_staleness: 0, or under stage2_two_channel a stage2_ab.schedule.b_ratio"
            " above 0.5",
        )


def whole_model_generates(run: RunConfig) -> Iterator[Problem]:
    """transformers cannot generate on a part of the model."""
    if run.rollout_matching.rollout_backend == "hf" and is_sharded(run):
        yield Problem(
            "rollout_matching.rollout_backend",
            "'hf' generates with the learner's own model, of which each of"
            f" {run.learner.world_size} ranks has a part (learner.parallel: fsdp)",
            "set learner.parallel: ddp, or rollout_matching.rollout_backend: vllm",
        )


def beams_are_possible(run: RunConfig) -> Iterator[Problem]:
    """Beam search exists in some backends, each with its own bounds (decision 21)."""
    matching = run.rollout_matching
    num_beams, is_hf = matching.num_beams, matching.rollout_backend == "hf"
    if matching.decode_mode is not DecodeMode.BEAM:
        if num_beams > 1:
            wrong = f"{num_beams} beams need decode_mode: beam"
            yield Problem(_BEAMS, wrong, f"set {_MODE}: beam, or remove num_beams")
        return
    if not matching.backend.has_beams:
        yield Problem(
            _MODE,
            f"{matching.backend.title} has no beam search",
            f"{_SET_HF} or {_VLLM}.mode: colocate, which have it, or remove {_MODE}",
        )
    if not is_hf and matching.repeat_terminate.enabled:
        yield Problem(
            "rollout_matching.repeat_terminate.enabled",
            "true, and vLLM's beam search asks for every token anew, so that its guard sees no"
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


def sampling_is_whole(run: RunConfig) -> Iterator[Problem]:
    """`policy_gradient` needs every token's probability under the whole vocabulary.

    Only then can engine and learner compute the same number (decision 25).
    """
    decoding, penalty = run.rollout_matching.decoding, run.rollout_matching.repetition_penalty
    objective = run.rollout_matching.pipeline.objective
    if not any(isinstance(entry, PolicyGradientEntry) and entry.enabled for entry in objective):
        return
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


def adapters_can_be_sent(run: RunConfig) -> Iterator[Problem]:
    """`sync.mode: adapter` needs LoRA, engines that serve it, and one rank (decision 38)."""
    adapter, vllm, ranks = run.model.adapter, run.rollout_matching.vllm, run.learner.world_size
    if not run.rollout_matching.backend.takes_adapters:
        nobody = "and rollout_backend hf has no engine that takes adapters"
        remedy = "remove the key, or set rollout_backend: vllm"
        if vllm.enable_lora:
            yield Problem(f"{_VLLM}.enable_lora", f"true, {nobody}", remedy)
        if vllm.sync.mode == "adapter":
            yield Problem(f"{_VLLM}.sync.mode", f"'adapter', {nobody}", remedy)
        return
    if vllm.enable_lora:
        is_stock = vllm.mode == "server" and vllm.server is not None and vllm.server.kind == "vllm"
        if adapter is None:
            yield Problem(
                f"{_VLLM}.enable_lora",
                "true, and the learner trains no adapter",
                "set model.adapter, or remove the key",
            )
        if is_stock:
            yield Problem(
                f"{_VLLM}.enable_lora",
                "true, and a stock vllm serve takes no adapter alone",
                f"remove the key, or set {_VLLM}.server.kind: rollmatch",
            )
        if adapter is not None and adapter.rank > LORA_RANKS[-1]:
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
                f"'adapter' cannot carry the embeddings of the {tokens.count:,} fresh tokens of"
                " model.path, which are trained with it and which vLLM takes in full weights only",
                f"set {_VLLM}.sync.mode: full or auto",
            )
    if ranks > 1 and resolved_sync_mode(run) == "adapter":
        yield Problem(
            f"{_VLLM}.sync.mode",
            f"'{vllm.sync.mode}' sends adapters alone, which works with one learner rank only, not"
            f" {ranks}",
            f"set {_VLLM}.sync.mode: full, or learner.world_size: 1",
        )


def temperature_suits_vllm(run: RunConfig) -> Iterator[Problem]:
    """vLLM samples at lower temperatures than transformers does."""
    temperature = run.rollout_matching.decoding.temperature
    if run.rollout_matching.rollout_backend == "vllm" and temperature > MAX_TEMPERATURE:
        yield Problem(
            "rollout_matching.decoding.temperature",
            f"{temperature:g} is above {MAX_TEMPERATURE:g}, the highest at which vLLM samples",
            f"lower it, or {_SET_HF}",
        )


def devices_are_set_once(run: RunConfig) -> Iterator[Problem]:
    """`vllm.tensor_parallel_size` is colocate's; actors and servers have their own setting."""
    elsewhere = {
        EngineLocation.ACTORS: f"set {_VLLM}.actors.tensor_parallel_size",
        EngineLocation.SERVERS: "start the servers with tensor_parallel_size",
    }
    size, location = run.rollout_matching.vllm.tensor_parallel_size, engines_in(run)
    if size is not None and location in elsewhere:
        remedy = f"{elsewhere[location]}, and remove this key"
        yield Problem(f"{_VLLM}.tensor_parallel_size", f"{size} is for mode colocate", remedy)


def actor_devices_hold_an_engine(run: RunConfig) -> Iterator[Problem]:
    """An actor reserves exactly the GPUs of its engine, or none."""
    actors = run.rollout_matching.vllm.actors
    gpus, size = actors.gpus_per_actor, actors.tensor_parallel_size
    if gpus is None or gpus in (0, size):
        return
    misfit, remedy = "cannot hold an engine", f"set it to {size}"
    if gpus > size:
        misfit = "are reserved for an engine"
        remedy = f"set {_VLLM}.actors.tensor_parallel_size: {gpus:g} for engines of so many devices"
    wrong = f"{gpus:g} GPUs {misfit} of tensor_parallel_size {size}"
    yield Problem(f"{_VLLM}.actors.gpus_per_actor", wrong, f"{remedy}, or remove the key")


def engines_take_every_prompt(run: RunConfig) -> Iterator[Problem]:
    """Samples are admitted by `global_max_length` alone, so an engine's window is no shorter.

    Otherwise it would refuse some of them in the middle of the run.
    """
    longest = run.rollout_matching.vllm.max_model_len
    if longest is not None and longest < run.global_max_length:
        yield Problem(
            f"{_VLLM}.max_model_len",
            f"{longest} is less than global_max_length {run.global_max_length}, so engines would"
            " refuse prompts that the learner admits",
            "raise it to global_max_length, or remove the key",
        )


def ranks_have_rollouts(run: RunConfig) -> Iterator[Problem]:
    """A round has at least one request for every learner rank."""
    devices = engine_devices(run)
    if devices is None:  # servers are asked at the start
        return
    try:
        chunk_size(run.rollout_matching.decode_batch_size, devices, run.learner.world_size)
    except ValueError as error:
        wrong, _, remedy = str(error).partition("; ")
        yield Problem("rollout_matching.decode_batch_size", wrong, remedy)
