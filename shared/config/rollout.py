"""`rollout_matching`: how rollouts are generated and matched, and what is learned from them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from shared.config.base import Fraction01, Section, WholeGPUs, refusal
from shared.config.pipeline import EXAMPLE_PIPELINE, PipelineSection
from shared.config.secrets import masked
from shared.errors import Timeout
from shared.records import POINT_TOLERANCE, GeometryKind
from shared.rollouts import REPETITION_PENALTIES, DecodeMode, DecodeSettings
from shared.tokens.repeat_guard import RepeatGuardSettings


class EngineLocation(StrEnum):
    """The kind of process that contains the engines of a run."""

    RANKS = "ranks"
    """Engines are in the learner ranks' processes; generating and learning alternate."""
    ACTORS = "actors"
    """Engines are in Ray actors of the run, on their own devices."""
    SERVERS = "servers"
    """Engines are servers that the user has started separately."""

    @property
    def engine_noun(self) -> str:
        """The word that messages use for one engine at this location."""
        return {"ranks": "engine", "actors": "actor", "servers": "server"}[self]


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """Properties of a rollout backend, which is a way to run engines."""

    location: EngineLocation
    title: str
    """The key of the configuration that selects the backend, with its value, as messages show it:
    `vllm.mode colocate`."""
    has_beams: bool
    """Whether the backend supports beam search (decision 21)."""
    takes_adapters: bool = True
    """Whether a weight sync can send the engines a LoRA adapter without the base weights."""
    uses_vllm: bool = True
    """Whether the engines are vLLM, so that vLLM's limits apply."""
    shares_model: bool = False
    """Whether the engine is the learner's own model, so that no weights are sent."""


BACKENDS: dict[str, BackendSpec] = {
    "hf": BackendSpec(
        EngineLocation.RANKS,
        "rollout_backend hf",
        has_beams=True,
        takes_adapters=False,
        uses_vllm=False,
        shares_model=True,
    ),
    "colocate": BackendSpec(EngineLocation.RANKS, "vllm.mode colocate", True),
    "actors": BackendSpec(EngineLocation.ACTORS, "vllm.mode actors", False),
    "server": BackendSpec(EngineLocation.SERVERS, "vllm.mode server", False),
}
"""The backends by name: `rollout_backend`, or `vllm.mode` for `rollout_backend: vllm`."""


class RepeatTerminateSection(Section):
    enabled: bool = False
    """Turn on the repeat guard, which forces the stop token when an answer repeats itself."""
    min_new_tokens: NonNegativeInt = 64
    """Number of new tokens before the repeat guard starts to check."""
    max_consecutive_token_repeats: PositiveInt = 32
    """End the answer after the same token this many times in a row."""
    ngram_size: PositiveInt = 16
    """Length, in tokens, of the sequences that `ngram_repeats` counts."""
    ngram_repeats: Annotated[int, Field(ge=2)] = 4
    """End the answer after the same `ngram_size` tokens this many times in a row."""
    max_object_keys: PositiveInt | None = None
    """End the answer after more `object_{n}` keys than this; null: no limit."""

    def settings(self) -> RepeatGuardSettings | None:
        """Return the settings of the repeat guard, which ends answers that repeat themselves.

        None if the guard is off.
        """
        if not self.enabled:
            return None
        return RepeatGuardSettings(
            self.min_new_tokens,
            self.max_consecutive_token_repeats,
            self.ngram_size,
            self.ngram_repeats,
            self.max_object_keys,
        )


_CHARACTERS = re.compile(r"[A-Za-z0-9._~:/!$&'()*+,;=%\[\]-]+")
"""Characters of a URL; a host name with other letters is written in its ASCII form, `xn--...`."""


def _http_url(url: str) -> str:
    remedy = "write it as http://127.0.0.1:8000"
    if "@" in url:
        # The message does not show the URL: it may contain a secret.
        raise refusal(
            "must not contain a user and password, because they are not sent to servers",
            "remove them, and set token_env to the variable that holds the servers' token",
        )
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname or ""
        # A connection encodes the host too, and would fail with an error of another kind.
        host.encode("idna")
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise refusal(f"must be an http(s) URL, got {masked(url)!r}: {reason}", remedy) from error
    is_plain = _CHARACTERS.fullmatch(url) and not parts.query and not parts.fragment
    if parts.scheme not in ("http", "https") or not host or not is_plain:
        raise refusal(f"must be an http(s) URL without query, got {masked(url)!r}", remedy)
    if port == 0:
        raise refusal(f"must have a port above 0, got {url!r}", remedy)
    return url.rstrip("/")


HttpUrl = Annotated[str, AfterValidator(_http_url), Field(examples=["http://127.0.0.1:8000"])]
"""The URL of a server, without a slash at the end."""


def is_loopback(host: str) -> bool:
    """Return whether a host name or address means the local machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return False


class ServerEntry(Section):
    base_url: HttpUrl
    """URL of the server; the paths of requests are added to it."""
    group_port: Annotated[int, Field(ge=0, le=65535, examples=[0])]
    """Port for the weight transfer to this server, on the first learner rank's node; 0: any."""

    @property
    def is_loopback(self) -> bool:
        """Return whether the server runs on the local machine."""
        host = urlsplit(self.base_url).hostname
        assert host is not None, "checked when it was read"
        return is_loopback(host)


def _addresses(url: str) -> set[tuple[str, int, str]]:
    """Return (host, port, path) of a URL without resolving names; two addresses for `localhost`."""
    parts = urlsplit(url)
    assert parts.hostname is not None, "checked when it was read"
    hosts = ("127.0.0.1", "::1") if parts.hostname == "localhost" else (parts.hostname,)
    return {
        (host, parts.port or (443 if parts.scheme == "https" else 80), parts.path) for host in hosts
    }


def _each_once(servers: tuple[ServerEntry, ...]) -> tuple[ServerEntry, ...]:
    if not servers:
        raise refusal(
            "must list at least one server, got an empty list",
            "write [{base_url: http://127.0.0.1:8000, group_port: 0}]",
        )
    for index, server in enumerate(servers):
        for earlier in servers[:index]:
            if _addresses(server.base_url) & _addresses(earlier.base_url):
                also = "" if server.base_url == earlier.base_url else f", as {earlier.base_url} too"
                raise refusal(f"{server.base_url} is listed twice{also}", "list every server once")
            if server.group_port and server.group_port == earlier.group_port:
                raise refusal(
                    f"group_port {server.group_port} is listed twice",
                    "give every server its own port, or 0 for any free port",
                )
    return servers


class ServerSection(Section):
    servers: Annotated[
        tuple[ServerEntry, ...],
        Field(strict=False, examples=[[{"base_url": "http://127.0.0.1:8000", "group_port": 0}]]),
        AfterValidator(_each_once),
    ]
    """The servers; each round is split over them in this order."""
    kind: Literal["rollmatch", "vllm"] = "rollmatch"
    """rollmatch: `rollmatch serve`; vllm: a stock `vllm serve` with this package installed."""
    timeout_s: PositiveFloat = 240.0
    """Limit, in seconds, of three waits: until a server answers `/health/` (at the start or after a
    loss), until the weight transfer is set up, and until a generating server answers or samples
    another token."""
    infer_timeout_s: float | None = None
    """HTTP timeout of one `/infer/` request in seconds; null, 0 or negative: no timeout."""
    token_env: Annotated[str, Field(min_length=1)] | None = None
    """Environment variable with the servers' bearer token; null: the servers need no token."""

    @property
    def answer_limit(self) -> Timeout:
        """Time limit for a server to join a weight sync, and to answer or sample another token."""
        return Timeout(self.timeout_s, "rollout_matching.vllm.server.timeout_s")


LOWEST_TEMPERATURE = 0.01
"""Lower positive temperatures are raised to this, by vLLM, all other backends and the learner."""
HIGHEST_TEMPERATURE = 5.0
"""The highest temperature of the backend `hf`, so that banned tokens are not sampled.

Token ids are banned by a logit bias of -100, which is divided by the temperature. At 5 a banned
token keeps e^-20 of its probability; at 50 it would keep e^-2.
"""
LEAST_BUCKET_BYTES = 1 << 16
"""Least bytes of a bucket of weights in a sync; each bucket costs a message and a checksum.

A smaller bucket would hold only one tensor.
"""
DEDICATED_MEMORY_UTILIZATION = 0.85
"""Default fraction of a GPU's memory for an engine that does not share the GPU."""


def _boxes_at_least(kinds: tuple[GeometryKind, ...]) -> tuple[GeometryKind, ...]:
    if GeometryKind.BBOX not in kinds or len(set(kinds)) < len(kinds):
        raise refusal(
            f"must list bbox_2d, and no kind of shape twice, got [{', '.join(kinds)}]",
            "write bbox_2d, and add poly or point_2d if you need them",
        )
    return kinds


def _keeps_bans(temperature: float) -> float:
    if temperature > HIGHEST_TEMPERATURE:
        raise refusal(
            f"must be at most {HIGHEST_TEMPERATURE:g}, got {temperature:g}: at a higher one banned"
            " token ids could be sampled",
            "lower it",
        )
    return temperature


class DecodingSection(Section):
    temperature: Annotated[NonNegativeFloat, AfterValidator(_keeps_bans)] = 0.0
    """Sampling temperature, at most 2 (vLLM) or 5 (hf). 0: greedy; between 0 and 0.01: 0.01."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample only from the most probable tokens with this total probability; 1: all tokens."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    """Sample only from this many most probable tokens; -1 or 0: no limit."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    """Texts that end an answer, for environments only. Their tokens belong to the answer: the
    environment reads them, and they are learned."""

    @property
    def effective_temperature(self) -> float:
        """The temperature of sampling: 0 (greedy), or at least `LOWEST_TEMPERATURE`."""
        return max(self.temperature, LOWEST_TEMPERATURE) if self.temperature > 0 else 0.0


class ActorsSection(Section):
    num_actors: PositiveInt = 1
    """Number of rollout actors, with one engine each."""
    gpus_per_actor: WholeGPUs | None = None
    """Number of GPUs that Ray reserves for each rollout actor. null: `tensor_parallel_size` if the
    cluster has GPUs, else 0."""
    cpus_per_actor: NonNegativeFloat | None = None
    """Number of CPU cores that Ray reserves for each rollout actor. null: 1; without GPUs
    `tensor_parallel_size`."""
    tensor_parallel_size: PositiveInt = 1
    """Devices of each engine. Raise it if the model does not fit on one device."""
    max_restarts: NonNegativeInt = 3
    """How many rollout actors, servers and environment actors may be lost and replaced within
    `restart_window_s`. With 0 a lost actor ends the run; after the loss of a server the round is
    finished first."""
    restart_window_s: PositiveFloat = 3600.0
    """Period in seconds for `max_restarts`: older losses do not count."""

    @model_validator(mode="after")
    def _gpus_are_its_engines(self) -> ActorsSection:
        gpus, size = self.gpus_per_actor, self.tensor_parallel_size
        if gpus not in (None, 0, size):
            wrong = f"{gpus:g} GPUs do not suit an engine with tensor_parallel_size {size}"
            remedy = f"set it to {size} or 0, change tensor_parallel_size, or remove the key"
            raise refusal(wrong, remedy, "gpus_per_actor")
        return self


class SyncSection(Section):
    mode: Literal["full", "adapter", "auto"] = "full"
    """full: all weights, adapters merged; adapter: only the LoRA adapter; auto: adapter if
    possible."""
    fallback_to_full: bool = True
    """After a failed adapter sync: continue with full syncs (true), or stop the run (false)."""
    bucket_bytes: Annotated[int, Field(ge=LEAST_BUCKET_BYTES)] | None = None
    """Size in bytes of the buckets in which weights are sent to engines; at least 64 KiB. null: 256
    MiB between GPUs (nccl, ipc), where each bucket costs a call of the engine's weight loader; 16
    MiB on CPU, where larger buckets are slower."""
    canary_tolerance: PositiveFloat | None = None
    """Largest allowed difference, in nats, of a test prompt's log-probabilities between learner and
    engine after a weight sync. The test prompt is called canary. null: limits that follow the noise
    measured before the first sync (`canary_noise.json`): in float32 three times the noise, at least
    1e-4 and at most 3e-3; in bfloat16 at most 0.1 for the mean and 0.5 for a token."""


class VllmSection(Section):
    mode: Literal["colocate", "server", "actors"] = "colocate"
    """colocate: engines on the learner's devices; server: on servers that you start; actors: in Ray
    actors of this run, on their own devices."""
    tensor_parallel_size: PositiveInt | None = None
    """Devices of one engine in mode `colocate`. null: the largest of 4, 2 and 1 for which each
    rank has enough devices on its node. The other modes have their own keys."""
    enable_lora: bool = False
    """Let the engines serve the adapter next to the base weights. `sync.mode: adapter` needs it."""
    sleep: bool = True
    """Mode `colocate`: free the engine's GPU memory while the learner learns."""
    max_model_len: PositiveInt | None = None
    """Maximum tokens of prompt + answer in an engine; null: `global_max_length`."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Bytes of each engine's key-value cache on each device. null: what `gpu_memory_utilization`
    leaves; on CPU, room for the longest sequences that are decoded at the same time."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Fraction of the device's memory for an engine, if `kv_cache_memory_bytes` is not set. null:
    0.45 in mode `colocate`, which shares the device with the learner, else 0.85."""
    enforce_eager: bool = False
    """Disable compilation and CUDA graphs: engines start sooner and decode more slowly."""
    actors: ActorsSection = ActorsSection()
    """Mode `actors`: number of actors and their devices; in other modes these are for `rollmatch
    evaluate`. In all modes: how often lost processes are replaced."""
    server: ServerSection | None = None
    """Mode `server`: the servers, and time limits for them."""
    sync: SyncSection = SyncSection()
    """How weights are sent to the engines, and how a sync is checked."""

    @property
    def resolved_gpu_memory_utilization(self) -> float:
        if self.gpu_memory_utilization is not None:
            return self.gpu_memory_utilization
        return 0.45 if self.mode == "colocate" else DEDICATED_MEMORY_UTILIZATION


class OffloadSection(Section):
    """What is moved off the learner's device while the engine generates; mode `colocate` only."""

    enabled: bool = False
    """Move the learner's weights, optimizer state or both to host memory while the engine
    generates. `offload_model` and `offload_optimizer` select what is moved; both if neither is
    true."""
    offload_model: bool = False
    """Move the learner's weights to host memory while the engine generates. No effect without
    `enabled`."""
    offload_optimizer: bool = False
    """Move the optimizer's state to host memory while the engine generates. No effect without
    `enabled`."""

    @property
    def moves_model(self) -> bool:
        """Return whether the learner's weights leave the device while the engine generates."""
        return self.enabled and (self.offload_model or not self.offload_optimizer)

    @property
    def moves_optimizer(self) -> bool:
        """Return whether the optimizer's state leaves the device while the engine generates."""
        return self.enabled and (self.offload_optimizer or not self.offload_model)


class GateScheduleSection(Section):
    start: Annotated[Fraction01, Field(examples=[0.1])]
    """Least mask IoU of a match during the channel-A warm-up and in the first step after it."""
    steps: Annotated[PositiveInt, Field(examples=[100])]
    """Number of steps over which the least mask IoU of a match moves from `start` to
    `maskiou_gate`. Steps of both channels count, from the end of the channel-A warm-up."""


class RolloutMatchingSection(Section):
    pipeline: Annotated[PipelineSection, Field(examples=[EXAMPLE_PIPELINE])]
    """The objective, declared in full: there are no implicit losses."""
    rollout_backend: Literal["vllm", "hf"] = "vllm"
    """vllm: vLLM engines generate; hf: the learner's own model, with transformers' `generate`."""
    decode_batch_size: PositiveInt = 1
    """Maximum sequences that a rollout device decodes at once. Raise it if memory allows."""
    decode_mode: Annotated[DecodeMode, Field(strict=False)] | None = None
    """greedy, sample or beam; null: sample if the temperature is above 0, else greedy."""
    num_beams: PositiveInt = 1
    """Number of beams with `decode_mode: beam`: at most decode_batch_size (hf) or 10 (vLLM)."""
    length_penalty: FiniteFloat = 1.0
    """Exponent p of beam search: a beam's log-probability is divided by length^p. 1 gives the mean;
    a higher value favours long answers. vLLM counts the prompt's tokens in the length. The best
    beam is the first in the library's own order."""
    max_new_tokens: PositiveInt = 1024
    """Maximum tokens of an answer; of environments, of the answer to one model call."""
    repetition_penalty: Annotated[
        float, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    ] = 1.0
    """Values above 1 make tokens that already occurred less probable; 1: off."""
    decoding: DecodingSection = DecodingSection()
    """How the next token is chosen."""
    geometry: (
        Annotated[
            tuple[Annotated[GeometryKind, Field(strict=False)], ...],
            Field(strict=False),
            AfterValidator(_boxes_at_least),
        ]
        | None
    ) = None
    """Kinds of shapes that are taught and parsed: bbox_2d, poly, point_2d. null: bbox_2d, and also
    poly except under stage2_two_channel or if `data.answer_format` has no polygons. A ground truth
    of another kind is a bad row; a predicted one is dropped and counted."""
    candidate_top_k: PositiveInt = 10
    """Number of ground-truth objects whose mask IoU is computed for each prediction."""
    maskiou_gate: Fraction01 = 0.3
    """Least mask IoU of a prediction and a ground-truth object that may be matched."""
    maskiou_gate_schedule: GateScheduleSection | None = None
    """Move the least mask IoU of a match linearly from another value to `maskiou_gate`. Beyond the
    specification. The value depends only on the step number. null: it is constant."""
    maskiou_resolution: Annotated[int, Field(ge=2, le=4096)] = 256
    """Width and height, in pixels, of the canvas on which mask IoU is computed."""
    fp_cost: NonNegativeFloat = 1.0
    """Matching cost of an unmatched prediction, relative to 1 - mask IoU for a pair."""
    fn_cost: NonNegativeFloat = 1.0
    """Matching cost of an unmatched ground-truth object."""
    point_tolerance: PositiveFloat = POINT_TOLERANCE
    """Distance of two points, in bins, that counts as a mask IoU of 0.5 in matching and reports.
    Distance 0 counts as 1, twice the tolerance as 0. No effect without points."""
    ot_cost: Literal["l1", "l2"] = "l2"
    """Distance of points, in bins, in the optimal transport from a polygon to its match."""
    ot_epsilon: PositiveFloat = 10.0
    """Entropic regularisation, in bins, of the optimal transport from a polygon to its match. Lower
    it for small shapes: shapes not much larger than `ot_epsilon` are taught too small."""
    ot_epsilon_cap: PositiveFloat | None = None
    """Limit of `ot_epsilon`, as a multiple of the shorter side of the ground-truth shape's box.
    Beyond the specification. The side counts in bins, and at least as 1. null: no limit."""
    ot_iters: PositiveInt = 30
    """Number of Sinkhorn iterations of the optimal transport from a polygon to its match."""
    trim_trailing_false_positives: bool = False
    """Cut off what a rollout has after its last matched object, before the rollout is learned.
    Beyond the specification. All of a rollout without matches is cut off."""
    supervise_separators: bool = False
    """Teach the separator (such as a comma) before each matched object of a rollout. Beyond the
    specification. The separator has weight 1 in `token_ce`, like the structure tokens of missed
    objects that are appended."""
    max_staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """Updates by which a rollout's weights may be older than the learner's. 1 saves time: the next
    step's first round is generated while this step's last round is learned."""
    logprob_tolerance: PositiveFloat | None = None
    """Largest allowed difference, in nats, of a sampled token's log-probability between learner and
    engine. null: 1 in bfloat16; in float32 1e-4 or, if that is larger, ten times the canary's noise
    (`rollout_matching.vllm.sync.canary_tolerance`). In float32 the first larger difference ends the
    run. In bfloat16 the run ends if a step has more than 10 larger differences, and they are more
    than 1 in 1,000 of the tokens that the step compares."""
    repeat_terminate: RepeatTerminateSection = RepeatTerminateSection()
    """The repeat guard, which ends answers that repeat themselves, in every backend."""
    offload: OffloadSection = OffloadSection()
    """Mode `colocate`: what is moved off the device to make room for the engine."""
    vllm: VllmSection = VllmSection()
    """Settings of the vLLM engines."""

    @property
    def backend_name(self) -> str:
        """The name, in `BACKENDS`, of the rollout backend that the run uses."""
        return self.vllm.mode if self.rollout_backend == "vllm" else self.rollout_backend

    @property
    def backend(self) -> BackendSpec:
        return BACKENDS[self.backend_name]

    @property
    def in_learner(self) -> bool:
        """Return whether each learner rank generates its own rollouts in its process."""
        return self.backend.location is EngineLocation.RANKS

    @property
    def servers(self) -> ServerSection | None:
        """The servers that generate rollouts; None if the run's own processes generate them."""
        return self.vllm.server if self.backend.location is EngineLocation.SERVERS else None

    @property
    def starts_engines(self) -> bool:
        """Return whether the run starts vLLM engines, in the learner or in actors."""
        return self.backend.uses_vllm and self.servers is None

    @property
    def resolved_decode_mode(self) -> DecodeMode:
        """Mode in which engines decode: `decode_mode` if it is set (decision 27).

        If not: sample at temperatures above 0, else greedy.
        """
        if self.decode_mode is not None:
            return self.decode_mode
        return DecodeMode.SAMPLE if self.decoding.temperature > 0 else DecodeMode.GREEDY

    def decode_settings(
        self, *, stop_token_ids: tuple[int, ...], banned_token_ids: tuple[int, ...]
    ) -> DecodeSettings:
        """Return the decoding settings that requests of the run carry, with these token ids."""
        return DecodeSettings(
            mode=self.resolved_decode_mode,
            temperature=self.decoding.effective_temperature,
            top_p=self.decoding.top_p,
            top_k=self.decoding.top_k,
            repetition_penalty=self.repetition_penalty,
            max_new_tokens=self.max_new_tokens,
            num_beams=self.num_beams,
            length_penalty=self.length_penalty,
            stop_token_ids=stop_token_ids,
            banned_token_ids=banned_token_ids,
            return_logprobs=True,
            stop=self.decoding.stop,
        )
