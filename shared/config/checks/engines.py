"""Find contradictions between the settings of learner, engines and weight sync.

`cross_check` of `shared.config.load` calls these functions. Each yields problems.
"""

from __future__ import annotations

from collections.abc import Iterator

from shared.chunking import chunk_size
from shared.config.base import Problem
from shared.config.model import ModelSection
from shared.config.rollout import EngineLocation, RolloutMatchingSection
from shared.config.run import RunConfig
from shared.config.training import PartsSection
from shared.rollouts import MAX_TEMPERATURE, DecodeMode
from shared.weight_sync.offer import LORA_RANKS

_MODE = "rollout_matching.decode_mode"
_TEMPERATURE = "rollout_matching.decoding.temperature"
_BEAMS = "rollout_matching.num_beams"
_VLLM = "rollout_matching.vllm"
_SET_HF = "set rollout_matching.rollout_backend: hf"
_SYNC = f"{_VLLM}.sync.mode"
_LORA = f"{_VLLM}.enable_lora"

MAX_VLLM_BEAMS = 10
"""The highest number of beams with vLLM.

vLLM's beam search needs the log-probabilities of twice as many tokens as beams, and an engine
returns at most 20 (the default of `max_logprobs`).
"""


def processes_suit(run: RunConfig) -> Iterator[Problem]:
    """Report contradictions between cluster, processes, staleness and automatic resume."""
    matching = run.rollout_matching
    queue = run.stage2_ab.channel_b.enable_pipeline
    if run.cluster.kind == "local":
        wrong = "local runs everything in one process, but "
        back = "or set cluster.kind: ray"
        if not matching.in_learner:
            wrong += f"the engines of {matching.backend.title} have their own processes"
            remedy = f"{_SET_HF} or {_VLLM}.mode: colocate (+experiment=stage2_hf, stage2_colocate)"
            yield Problem("cluster.kind", wrong, f"{remedy}, {back}")
        elif run.learner.world_size > 1:
            wrong += f"learner.world_size is {run.learner.world_size}"
            yield Problem("cluster.kind", wrong, f"set it to 1, {back}")
        elif run.cluster.address != "local":
            yield Problem("cluster.kind", f"{wrong}cluster.address is set", f"unset it, {back}")
    if queue and matching.in_learner:
        yield Problem(
            "stage2_ab.channel_b.enable_pipeline",
            f"true needs engines on their own devices, unlike {matching.backend.title}",
            f"set {_VLLM}.mode: server or actors (rollout_backend: vllm), or set it to false",
        )
    if matching.max_staleness:
        path = "rollout_matching.max_staleness"
        in_a_row = run.algorithm.uses_rollouts
        if run.algorithm.is_scheduled:
            in_a_row = run.stage2_ab.schedule.b_ratio > 0.5
        if not queue:
            wrong = "needs stage2_ab.channel_b.enable_pipeline: true, and that is false"
            remedy = "set stage2_ab.channel_b.enable_pipeline: true, or max_staleness: 0"
            yield Problem(path, wrong, remedy)
        elif not in_a_row:
            wrong = "has no effect: no two channel-B steps follow each other"
            remedy = "set it to 0, or (stage2_two_channel) stage2_ab.schedule.b_ratio above 0.5"
            yield Problem(path, wrong, remedy)
    if run.resume.automatic:
        if not run.checkpoint.full:
            wrong = "true needs full checkpoints to continue from, but checkpoint.full is false"
            yield Problem("resume.automatic", wrong, "set checkpoint.full: true")
        if matching.vllm.actors.max_restarts == 0:
            wrong = f"true has no effect: {_VLLM}.actors.max_restarts is 0, so no job is restarted"
            yield Problem("resume.automatic", wrong, "raise max_restarts, or set it to false")


def sharding_suits(run: RunConfig) -> Iterator[Problem]:
    """Report settings that contradict a sharded, quantized or offloaded model in the learner."""
    quantized = "model.adapter.quantize"
    if run.learner.is_sharded:
        for key, is_set, wrong in (
            (
                "rollout_matching.rollout_backend",
                run.rollout_matching.backend.shares_model,
                f"'{run.rollout_matching.backend_name}' needs the whole model in each rank",
            ),
            (quantized, run.model.is_quantized, "4-bit weights cannot be sharded"),
            (
                "training.optimizer",
                run.training.optimizer != "adamw_torch",
                f"'{run.training.optimizer}' does not support sharded weights",
            ),
        ):
            if is_set:
                wrong = f"{wrong}, but each rank holds a shard (learner.parallel: fsdp)"
                yield Problem(key, wrong, "set learner.parallel: ddp, or change the key")
    matching = run.rollout_matching
    is_moved = matching.backend_name == "colocate" and matching.offload.moves_model
    if run.model.is_quantized and is_moved:
        wrong = "moves the model off the device, which is not possible with 4-bit weights"
        remedy = "set offload_optimizer: true and offload_model: false, or remove"
        yield Problem("rollout_matching.offload", wrong, f"{remedy} {quantized}")


def adapter_is_trained(model: ModelSection, parts: PartsSection) -> Iterator[Problem]:
    """Report contradictions between `model.adapter` and the keys `adapted` and `frozen` of parts.

    These are `adapted` without an adapter, and an adapter in no part or in a frozen part.
    """
    if model.adapter is None:
        for name, section in parts.items():
            if section.adapted is not None:
                wrong = f"{str(section.adapted).lower()} has no effect: the run trains no adapter"
                remedy = "set model.adapter, or remove the key"
                yield Problem(f"training.parts.{name}.adapted", wrong, remedy)
        return
    if not parts.adapted:
        wrong = "false, and no other part is adapted, so nothing is trained"
        yield Problem("training.parts.language_model.adapted", wrong, "set it to true")
    for name, section in parts.items():
        if name in parts.adapted and section.frozen:
            path = f"training.parts.{name}"
            wrong = "true contradicts model.adapter, which trains an adapter in this part"
            remedy = f"unfreeze it, adapt another part ({path}.adapted: false), or remove"
            yield Problem(f"{path}.frozen", wrong, f"{remedy} model.adapter")


def adapters_can_be_sent(run: RunConfig) -> Iterator[Problem]:
    """Report settings under which a sync cannot send only the adapter (decision 38)."""
    adapter = run.model.adapter
    vllm = run.rollout_matching.vllm
    ranks = run.learner.world_size
    if not run.rollout_matching.backend.takes_adapters:
        for key, is_set in ((_LORA, vllm.enable_lora), (_SYNC, vllm.sync.mode == "adapter")):
            if is_set:
                wrong = "is not possible: rollout_backend hf has no engine that takes adapters"
                yield Problem(key, wrong, "remove the key, or set rollout_backend: vllm")
        return
    if vllm.enable_lora:
        if adapter is None:
            wrong = "true has no effect: the learner trains no adapter"
            yield Problem(_LORA, wrong, "set model.adapter, or remove the key")
        if vllm.mode == "server" and vllm.server is not None and vllm.server.kind == "vllm":
            wrong = "true is not possible: a stock vllm serve does not take adapters"
            yield Problem(_LORA, wrong, f"remove the key, or set {_VLLM}.server.kind: rollmatch")
        if adapter is not None and adapter.rank > LORA_RANKS[-1]:
            wrong = f"{adapter.rank} is above {LORA_RANKS[-1]}, the highest rank that vLLM serves"
            yield Problem("model.adapter.rank", wrong, f"lower it, or set {_LORA}: false")
    if vllm.sync.mode == "adapter" and (reason := run.why_full_sync) is not None:
        yield Problem(_SYNC, f"'adapter' is not possible: {reason}", f"set {_SYNC}: full or auto")
    elif ranks > 1 and vllm.mode == "server" and run.sync_mode == "adapter":
        wrong = f"'{vllm.sync.mode}' sends adapters, which servers take only from a single learner"
        remedy = f"set {_SYNC}: full, or learner.world_size: 1"
        yield Problem(_SYNC, f"{wrong} rank, not {ranks}", remedy)


def lengths_and_rounds_suit(run: RunConfig) -> Iterator[Problem]:
    """Report prompts that are too long for engines, and rounds that are too small.

    A round must have at least one request of each learner rank.
    """
    matching = run.rollout_matching
    if matching.max_new_tokens >= run.global_max_length:
        wrong = f"{run.global_max_length} leaves no room for a prompt next to max_new_tokens"
        remedy = "raise it, or lower rollout_matching.max_new_tokens"
        yield Problem("global_max_length", f"{wrong} {matching.max_new_tokens}", remedy)
    longest = matching.vllm.max_model_len
    # Samples are only compared with `global_max_length`: engines with a lower limit would refuse
    # some of them during the run.
    if longest is not None and longest < run.global_max_length:
        wrong = f"{longest} is less than global_max_length {run.global_max_length}, so engines"
        wrong += " would refuse prompts that the learner accepts"
        remedy = "raise it to global_max_length, or remove the key"
        yield Problem(f"{_VLLM}.max_model_len", wrong, remedy)
    if run.engine_devices is not None:  # servers report their devices at the start
        try:
            chunk_size(matching.decode_batch_size, run.engine_devices, run.learner.world_size)
        except ValueError as error:
            wrong, _, remedy = str(error).partition("; ")
            yield Problem("rollout_matching.decode_batch_size", wrong, remedy)


def engines_are_set_once(matching: RolloutMatchingSection) -> Iterator[Problem]:
    """Report missing or useless servers, and a `tensor_parallel_size` without effect.

    With `colocate` and `hf` a list of servers is no error, because messages about a failing server
    suggest these backends. `derive.remarks` mentions that the list has no effect.
    """
    location = matching.backend.location
    servers = matching.vllm.server
    if location is EngineLocation.ACTORS and servers is not None:
        wrong = "has no effect with vllm.mode actors"
        yield Problem(f"{_VLLM}.server", wrong, f"set {_VLLM}.mode: server, or remove the section")
    if location is EngineLocation.SERVERS and servers is None:
        yield Problem(
            f"{_VLLM}.server",
            "is required by vllm.mode server, and missing",
            "add it, for example `server: {servers: [{base_url: http://127.0.0.1:8000,"
            f" group_port: 0}}]}}`, or set {_VLLM}.mode: colocate",
        )
    size = matching.vllm.tensor_parallel_size
    if size is not None and location is not EngineLocation.RANKS:
        remedy = f"set {_VLLM}.actors.tensor_parallel_size"
        if location is EngineLocation.SERVERS:
            remedy = "start the servers with tensor_parallel_size"
        wrong = f"{size} has no effect: the key is for mode colocate"
        yield Problem(f"{_VLLM}.tensor_parallel_size", wrong, f"{remedy}, and remove this key")


def tokens_can_be_chosen(matching: RolloutMatchingSection) -> Iterator[Problem]:
    """Report a temperature that contradicts the decode mode, the backend, or `policy_gradient`.

    `policy_gradient` needs every token's probability under the whole vocabulary: only then can
    engine and learner compute the same number (decision 25).
    """
    mode = matching.decode_mode
    decoding = matching.decoding
    temperature = decoding.temperature
    if mode is not None and (mode is DecodeMode.SAMPLE) != (temperature > 0):
        wrong = f"'{mode}' contradicts decoding.temperature {temperature:g}"
        remedy = f"change {_TEMPERATURE} (0.0 is greedy), or remove {_MODE}"
        yield Problem(_MODE, wrong, remedy)
    if matching.backend.uses_vllm and temperature > MAX_TEMPERATURE:
        wrong = f"{temperature:g} is above {MAX_TEMPERATURE:g}, the highest temperature of vLLM"
        yield Problem(_TEMPERATURE, wrong, f"lower it, or {_SET_HF}")
    if matching.pipeline.policy_gradient is None:
        return
    penalty = matching.repetition_penalty
    for key, value, is_whole, whole in (
        ("decoding.top_p", decoding.top_p, decoding.top_p >= 1, "1.0"),
        ("decoding.top_k", decoding.top_k, decoding.top_k <= 0, "-1"),
        ("repetition_penalty", penalty, penalty == 1, "1.0"),
    ):
        if not is_whole:
            wrong = f"{value} changes the sampling distribution, but policy_gradient needs every"
            wrong += " token's probability under the whole vocabulary"
            yield Problem(f"rollout_matching.{key}", wrong, f"set {whole}, or remove the key")


def beams_are_possible(matching: RolloutMatchingSection) -> Iterator[Problem]:
    """Report beam search that the backend does not support, and more beams than it allows.

    See decision 21.
    """
    num_beams = matching.num_beams
    if matching.decode_mode is not DecodeMode.BEAM:
        for key, is_set in (
            ("num_beams", num_beams > 1),
            ("length_penalty", matching.length_penalty != 1.0),
        ):
            if is_set:
                remedy = f"set {_MODE}: beam, or remove {key}"
                yield Problem(f"rollout_matching.{key}", "needs decode_mode: beam", remedy)
        return
    uses_vllm = matching.backend.uses_vllm
    if not matching.backend.has_beams:
        remedy = f"{_SET_HF} or {_VLLM}.mode: colocate, or remove {_MODE}"
        yield Problem(_MODE, f"{matching.backend.title} has no beam search", remedy)
    if uses_vllm and matching.repeat_terminate.enabled:
        yield Problem(
            "rollout_matching.repeat_terminate.enabled",
            "true has no effect: vLLM's beam search requests every token separately, so the guard"
            " sees no repetition",
            f"{_SET_HF}, whose guard works with beams, or remove {_MODE} or repeat_terminate",
        )
    most, what = MAX_VLLM_BEAMS, "the limit of vLLM's beam search"
    if not uses_vllm:
        most, what = matching.decode_batch_size, "the decode_batch_size"
    if num_beams == 1:
        yield Problem(_BEAMS, "1 means greedy search", f"set at least 2, or remove {_MODE}")
    elif num_beams > most:
        wrong = f"{num_beams} is more than {most}, {what}"
        remedy = _SET_HF if uses_vllm else "raise rollout_matching.decode_batch_size"
        yield Problem(_BEAMS, wrong, f"lower it, or {remedy}")
