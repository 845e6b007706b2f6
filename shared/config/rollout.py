"""`rollout_matching`: how rollouts are generated, matched, and what is learned from them."""

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
    """The process that a run's rollouts are generated in."""

    RANKS = "ranks"
    """Each learner rank's own process, which generates what it learns: the two alternate."""
    ACTORS = "actors"
    """Ray actors of the run, on devices of their own."""
    SERVERS = "servers"
    """Servers that were launched elsewhere."""

    @property
    def engine_noun(self) -> str:
        """The word for one engine in texts."""
        return {"ranks": "engine", "actors": "actor", "servers": "server"}[self]


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """The facts about one rollout backend that the rest of the system asks for."""

    location: EngineLocation
    title: str
    """The keys that choose it, as messages name it."""
    has_beams: bool
    """It has beam search (decision 21)."""
    takes_adapters: bool = True
    """Its engines can be sent a LoRA adapter alone."""
    uses_vllm: bool = True
    """vLLM generates, so vLLM's limits hold."""
    shares_model: bool = False
    """It generates with the learner's own model, so no weights are sent."""


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
"""By `rollout_backend`; if that is vllm, by `vllm.mode`."""


class RepeatTerminateSection(Section):
    enabled: bool = False
    """End a sequence that repeats itself: its next token is the stop token."""
    min_new_tokens: NonNegativeInt = 64
    """New tokens before the guard looks."""
    max_consecutive_token_repeats: PositiveInt = 32
    """The same token this many times in a row is a repetition."""
    ngram_size: PositiveInt = 16
    """Length of the sequences of tokens that are compared."""
    ngram_repeats: Annotated[int, Field(ge=2)] = 4
    """The same `ngram_size` tokens this many times back to back are a repetition."""
    max_object_keys: PositiveInt | None = None
    """More `object_{n}` keys than this are a repetition; null: no limit."""

    def settings(self) -> RepeatGuardSettings | None:
        """Return the settings of a guard; None where it is off."""
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
"""Characters of URLs; a name in other letters is written in its ASCII form, `xn--...`."""


def _http_url(url: str) -> str:
    remedy = "write it as http://127.0.0.1:8000"
    if "@" in url:
        # The URL is not repeated: it may hold a secret.
        raise refusal(
            "must hold no user and password, which no server is sent",
            "write it without, and name the variable with the servers' token in token_env",
        )
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname or ""
        # A connection does so too, and fails with no error of the network.
        host.encode("idna")
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise refusal(f"must be an http(s) URL, got {masked(url)!r}: {reason}", remedy) from error
    is_plain = _CHARACTERS.fullmatch(url) and not parts.query and not parts.fragment
    if parts.scheme not in ("http", "https") or not host or not is_plain:
        raise refusal(f"must be an http(s) URL without query, got {masked(url)!r}", remedy)
    if port == 0:
        raise refusal(f"must name a port that can be called, got {url!r}", remedy)
    return url.rstrip("/")


HttpUrl = Annotated[str, AfterValidator(_http_url), Field(examples=["http://127.0.0.1:8000"])]
"""The address of a server, without the last slash."""


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is the asking machine itself."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return False


class ServerEntry(Section):
    base_url: HttpUrl
    """Prefix of the server's routes."""
    group_port: Annotated[int, Field(ge=0, le=65535, examples=[0])]
    """Port on the first learner rank's node where this server joins the weight transfer; 0: any."""

    @property
    def is_loopback(self) -> bool:
        """Tell whether the server is on the machine that asks for it."""
        host = urlsplit(self.base_url).hostname
        assert host is not None, "checked when it was read"
        return is_loopback(host)


def _addresses(url: str) -> set[tuple[str, int, str]]:
    """Return host, port and path of a URL, without resolving names; two for `localhost`."""
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
                    "give every server its own, or 0 for any free one",
                )
    return servers


class ServerSection(Section):
    servers: Annotated[
        tuple[ServerEntry, ...],
        Field(strict=False, examples=[[{"base_url": "http://127.0.0.1:8000", "group_port": 0}]]),
        AfterValidator(_each_once),
    ]
    """In the order in which a round is split over them."""
    kind: Literal["rollmatch", "vllm"] = "rollmatch"
    """`rollmatch serve`, or a stock `vllm serve` with this package installed."""
    timeout_s: PositiveFloat = 240.0
    """Until every server answers `/health/`, at the start and where one was lost; until the weight
    transfer is set up; and until a server that generates answers, or samples another token."""
    infer_timeout_s: float | None = None
    """HTTP timeout of one `/infer/`; null, 0 or less: none."""
    token_env: Annotated[str, Field(min_length=1)] | None = None
    """Name of the environment variable with the servers' bearer token; null: they ask for none."""

    @property
    def answer_limit(self) -> Timeout:
        """The longest that a server may take to join the communicator of the weight transfer, and
        that it may be silent."""
        return Timeout(self.timeout_s, "rollout_matching.vllm.server.timeout_s")


LOWEST_TEMPERATURE = 0.01
"""vLLM samples lower positive temperatures at this one; so do all backends and the learner."""
HIGHEST_TEMPERATURE = 5.0
"""Ids are banned by a logit bias of -100, which the temperature divides: at 5 a banned token keeps
e^-20 of its probability, at 50 it would keep e^-2."""
LEAST_BUCKET_BYTES = 1 << 16
"""A smaller bucket would hold one tensor at most, and each costs a message and a checksum."""
DEDICATED_MEMORY_UTILIZATION = 0.85
"""Fraction of the device's memory for an engine that does not share it."""


def _boxes_at_least(kinds: tuple[GeometryKind, ...]) -> tuple[GeometryKind, ...]:
    if GeometryKind.BBOX not in kinds or len(set(kinds)) < len(kinds):
        raise refusal(
            f"must hold bbox_2d, and no kind twice, got [{', '.join(kinds)}]",
            "write bbox_2d, with poly and point_2d beside it or not",
        )
    return kinds


def _keeps_bans(temperature: float) -> float:
    if temperature > HIGHEST_TEMPERATURE:
        raise refusal(
            f"must be at most {HIGHEST_TEMPERATURE:g}, got {temperature:g}: higher ones let banned"
            " token ids through",
            "lower it",
        )
    return temperature


class DecodingSection(Section):
    temperature: Annotated[NonNegativeFloat, AfterValidator(_keeps_bans)] = 0.0
    """0: greedy; above, to 2 with vLLM and to 5 without: sampling, under 0.01 as at 0.01."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    """Sample from the this many most probable tokens; -1 or 0: no limit."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    """Of environments: texts that end an answer, as end tokens do. Their tokens are part of the
    answer that the environment reads, and they are learned."""

    @property
    def effective_temperature(self) -> float:
        """The temperature that is sampled at: 0, or at least `LOWEST_TEMPERATURE`."""
        return max(self.temperature, LOWEST_TEMPERATURE) if self.temperature > 0 else 0.0


class ActorsSection(Section):
    num_actors: PositiveInt = 1
    """Rollout actors, one engine each."""
    gpus_per_actor: WholeGPUs | None = None
    """Whole GPUs that Ray reserves for each; null: `tensor_parallel_size` where there are GPUs,
    else 0."""
    cpus_per_actor: NonNegativeFloat | None = None
    """CPU cores that Ray reserves for each actor; null: 1."""
    tensor_parallel_size: PositiveInt = 1
    """Devices of one engine."""
    max_restarts: NonNegativeInt = 3
    """Rollout actors, servers (`vllm.server`) and environment actors that may be lost and come back
    in any `restart_window_s`. 0: a lost actor ends the run; without a server a round is finished,
    and then the run ends."""
    restart_window_s: PositiveFloat = 3600.0
    """The time of `max_restarts`: a loss that is older is not counted."""

    @model_validator(mode="after")
    def _gpus_are_its_engines(self) -> ActorsSection:
        gpus, size = self.gpus_per_actor, self.tensor_parallel_size
        if gpus not in (None, 0, size):
            wrong = f"{gpus:g} GPUs for an engine of tensor_parallel_size {size}"
            remedy = f"set it to {size} or 0, change tensor_parallel_size, or remove the key"
            raise refusal(wrong, remedy, "gpus_per_actor")
        return self


class SyncSection(Section):
    mode: Literal["full", "adapter", "auto"] = "full"
    """What a sync sends: all merged weights, the LoRA tensors alone, or those where it can."""
    fallback_to_full: bool = True
    """After a failed adapter sync: go on with full syncs (true) or stop (false)."""
    bucket_bytes: Annotated[int, Field(ge=LEAST_BUCKET_BYTES)] | None = None
    """Bytes of one packed bucket, at least 64 KiB; null: 256 MiB between GPUs (nccl, ipc), where
    each costs a call of the loader, and 16 MiB on CPU, where larger ones are slower."""
    canary_tolerance: PositiveFloat | None = None
    """Largest difference of a canary log-probability, in nats, between learner and engine. null:
    1e-4 for float32; for bfloat16 mean and share are bounded by the noise measured before the first
    sync (`canary_noise.json`), never beyond 0.1 for the mean and 0.5 for a token."""


class VllmSection(Section):
    mode: Literal["colocate", "server", "actors"] = "colocate"
    """Engines on the learner's devices, on servers launched elsewhere, or in Ray actors of this
    run."""
    tensor_parallel_size: PositiveInt | None = None
    """Mode `colocate`: devices of one engine; null: 4, or the largest of 2 and 1 that each rank can
    have on its node. The other modes have a setting of their own."""
    enable_lora: bool = False
    """Let the engines serve the adapter beside the base weights, for `sync.mode: adapter`."""
    sleep: bool = True
    """Mode `colocate`: give the engine's memory back while the learner learns (GPUs)."""
    max_model_len: PositiveInt | None = None
    """Longest prompt + response an engine takes, in tokens; null: `global_max_length`."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Bytes of each engine's key-value cache on each device; null: what `gpu_memory_utilization`
    leaves, on CPU room for the longest sequences that are decoded at a time."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Fraction of the device's memory an engine may use, where `kv_cache_memory_bytes` is not
    given; null: 0.45 in mode `colocate`, which shares the device with the learner, else 0.85."""
    enforce_eager: bool = False
    """No compilation and no graph capture: a quicker start, a slower decode."""
    actors: ActorsSection = ActorsSection()
    """Mode `actors`: how many, and where; of other modes, those of `rollmatch evaluate`. In all
    modes: how often what is lost may come back."""
    server: ServerSection | None = None
    """Mode `server`: which, and how long to wait for them."""
    sync: SyncSection = SyncSection()
    """How weights reach the engines, and how it is checked."""

    @property
    def resolved_gpu_memory_utilization(self) -> float:
        if self.gpu_memory_utilization is not None:
            return self.gpu_memory_utilization
        return 0.45 if self.mode == "colocate" else DEDICATED_MEMORY_UTILIZATION


class OffloadSection(Section):
    """The parts that leave the learner's device during generation; mode `colocate` alone."""

    enabled: bool = False
    """Move away what the other two keys name; both where they name nothing."""
    offload_model: bool = False
    """The learner's weights."""
    offload_optimizer: bool = False
    """The optimizer's state."""

    @property
    def moves_model(self) -> bool:
        """Tell whether the learner's weights leave the device."""
        return self.enabled and (self.offload_model or not self.offload_optimizer)

    @property
    def moves_optimizer(self) -> bool:
        """Tell whether the optimizer's state leaves the device."""
        return self.enabled and (self.offload_optimizer or not self.offload_model)


class GateScheduleSection(Section):
    start: Annotated[Fraction01, Field(examples=[0.1])]
    """The gate of the first step behind the channel-A warm-up, and of those before it."""
    steps: Annotated[PositiveInt, Field(examples=[100])]
    """Steps, of any channel, in which it moves from there to `maskiou_gate`, where it stays."""


class RolloutMatchingSection(Section):
    pipeline: Annotated[PipelineSection, Field(examples=[EXAMPLE_PIPELINE])]
    """The objective: it is declared in full, nothing is assumed."""
    rollout_backend: Literal["vllm", "hf"] = "vllm"
    """What generates: vLLM engines, or the learner's own `generate`."""
    decode_batch_size: PositiveInt = 1
    """Most sequences that one rollout device decodes at a time, in training and evaluation."""
    decode_mode: Annotated[DecodeMode, Field(strict=False)] | None = None
    """greedy, sample or beam; null: by the temperature."""
    num_beams: PositiveInt = 1
    """Beams of `decode_mode: beam`: at most decode_batch_size with hf, at most 10 in a vLLM
    engine."""
    length_penalty: FiniteFloat = 1.0
    """Exponent of the length that a beam's log-probability is divided by: 1 is the mean, above it
    favours long answers. The best beam is the first of the library's own order; vLLM counts the
    prompt's tokens as length too."""
    max_new_tokens: PositiveInt = 1024
    """Longest response, in tokens; of environments, the longest answer to one call of the model."""
    repetition_penalty: Annotated[
        float, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    ] = 1.0
    """1: none."""
    decoding: DecodingSection = DecodingSection()
    """How a token is chosen."""
    geometry: (
        Annotated[
            tuple[Annotated[GeometryKind, Field(strict=False)], ...],
            Field(strict=False),
            AfterValidator(_boxes_at_least),
        ]
        | None
    ) = None
    """Kinds of shapes that are taught and read: bbox_2d, poly, point_2d; null: bbox_2d alone for
    stage2_two_channel, and poly too for the others where `data.answer_format` can write it. A
    ground truth of another kind is a bad row; a predicted one is dropped and counted."""
    candidate_top_k: PositiveInt = 10
    """Ground truths that are compared with each prediction by mask IoU."""
    maskiou_gate: Fraction01 = 0.3
    """Pairs under this mask IoU cannot match."""
    maskiou_gate_schedule: GateScheduleSection | None = None
    """Beyond the specification: a gate that moves linearly to `maskiou_gate`, by the number of the
    step alone; null: none."""
    maskiou_resolution: Annotated[int, Field(ge=2, le=4096)] = 256
    """Side of the canvas of the mask IoU, in pixels."""
    fp_cost: NonNegativeFloat = 1.0
    """Cost of an unmatched prediction, where a pair costs 1 - mask IoU."""
    fn_cost: NonNegativeFloat = 1.0
    """Cost of an unmatched ground truth."""
    point_tolerance: PositiveFloat = POINT_TOLERANCE
    """Distance of two points, in bins, that counts as a mask IoU of 0.5 wherever pairs are made, in
    the matching and in reports: none is 1, twice this is 0. Without points it has no effect."""
    ot_cost: Literal["l1", "l2"] = "l2"
    """Distance of points, in bins, that the transport of a polygon to its match minimises."""
    ot_epsilon: PositiveFloat = 10.0
    """Entropic regularisation of that transport, in bins. Shapes not much larger are taught smaller
    than they are."""
    ot_epsilon_cap: PositiveFloat | None = None
    """Beyond the specification: `ot_epsilon` is at most this times the shorter side, in bins, of
    the box around the ground-truth shape, which counts as 1 bin at least; null: no cap."""
    ot_iters: PositiveInt = 30
    """Sinkhorn iterations of that transport."""
    trim_trailing_false_positives: bool = False
    """Beyond the specification: keep a rollout as far as its last matched object, and nothing of
    one that has none."""
    supervise_separators: bool = False
    """Beyond the specification: teach the token that goes on to a matched object in the kept
    rollout, with the weight of appended structure."""
    max_staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """Updates by which a rollout's weights may be older than the learner's; 1: the next step's
    first round is generated while this step's last is learned."""
    logprob_tolerance: PositiveFloat | None = None
    """Largest difference, in nats, between the learner's and the engine's log-probability of a
    sampled token; null: 1e-4 for float32 and 1 for bfloat16. In float32 the first token beyond it
    ends the run; in bfloat16 more than 10 tokens of a step do, where they are more than 1 in 1,000
    of those compared."""
    repeat_terminate: RepeatTerminateSection = RepeatTerminateSection()
    """When a response that repeats itself is ended early, in every backend alike."""
    offload: OffloadSection = OffloadSection()
    """Mode `colocate`: what makes room for the engine."""
    vllm: VllmSection = VllmSection()
    """The engines."""

    @property
    def backend_name(self) -> str:
        """The key of `BACKENDS` that the configuration chooses."""
        return self.vllm.mode if self.rollout_backend == "vllm" else self.rollout_backend

    @property
    def backend(self) -> BackendSpec:
        return BACKENDS[self.backend_name]

    @property
    def in_learner(self) -> bool:
        """Tell whether each learner rank generates its rollouts in its own process."""
        return self.backend.location is EngineLocation.RANKS

    @property
    def servers(self) -> ServerSection | None:
        """The servers that generate; None where the run's own processes do."""
        return self.vllm.server if self.backend.location is EngineLocation.SERVERS else None

    @property
    def starts_engines(self) -> bool:
        """Tell whether the run has vLLM engines of its own, next to the learner or in actors."""
        return self.backend.uses_vllm and self.servers is None

    @property
    def resolved_decode_mode(self) -> DecodeMode:
        """The mode as written or, where it is not, by the temperature (decision 27)."""
        if self.decode_mode is not None:
            return self.decode_mode
        return DecodeMode.SAMPLE if self.decoding.temperature > 0 else DecodeMode.GREEDY

    def decode_settings(
        self, *, stop_token_ids: tuple[int, ...], banned_token_ids: tuple[int, ...]
    ) -> DecodeSettings:
        """Make the settings of every response from the ids that end one and the banned ids."""
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
