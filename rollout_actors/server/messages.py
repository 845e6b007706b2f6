"""JSON messages between a rollout server (`rollmatch serve`) and its client in a training run.

They contain dataclasses of `shared`. Numbers keep all bits, including NaN and infinity: a canary
with such a value must arrive unchanged to be refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import SchemaValidator

from shared.config.base import dotted
from shared.config.rollout import RepeatTerminateSection
from shared.errors import RolloutError, WeightSyncError
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.phases import SyncPhase
from shared.weight_sync.transports import TransportKind

IMAGE_PIXELS = 50_000_000
"""Default limit for the pixels of one image in a call."""
MAX_PROBLEMS = 20
"""Largest number of errors that the server's answer to an invalid call lists."""
MAX_LISTED = 1000
"""With more errors, an invalid call is answered only with their number, because pydantic would
write a thousand bytes for each."""
MAX_MESSAGE_CHARS = 10_000
"""Longest error message. It is limited because parts of it are the caller's own text."""
REMEDIES = {
    "missing": "add it",
    "unexpected_keyword_argument": "remove it",
    "extra_forbidden": "remove it",
    "json_invalid": "send JSON",
}
"""Maps pydantic's types of errors to what the caller should do, for error messages."""


class WireMessage(BaseModel):
    """Base class of the JSON messages. Unknown keys are refused, and values are not converted."""

    # This also applies to the dataclasses in a message.
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        ser_json_bytes="base64",
        val_json_bytes="base64",
        ser_json_inf_nan="constants",
    )

    def body(self) -> bytes:
        return self.model_dump_json().encode()


M = TypeVar("M", bound=WireMessage)


@cache
def brief_validator(form: type[BaseModel]) -> SchemaValidator:
    """Return a validator of a message class that stops reading a list at its first invalid item.

    pydantic's own validator continues: with three million invalid items in 6 MB it took 4 GiB.
    """

    def at_first(part: Any) -> Any:
        if isinstance(part, list | tuple):
            return type(part)(map(at_first, part))
        if not isinstance(part, dict):
            return part
        made = {key: at_first(value) for key, value in part.items()}
        return made | {"fail_fast": True} if part.get("type") in ("list", "tuple") else made

    # Otherwise pydantic would use the class's existing validator.
    return SchemaValidator(at_first(form.__pydantic_core_schema__), _use_prebuilt=False)


def shortened(message: str) -> str:
    """Return an error message, cut after `MAX_MESSAGE_CHARS` characters."""
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    return f"{message[:MAX_MESSAGE_CHARS]}... ({len(message)} characters)"


def problem_lines(error: ValidationError) -> str:
    """Return the lines of the error message about an invalid call.

    Each line describes one error: `path: what is wrong; what to do`.
    """
    number = error.error_count()
    if number > MAX_LISTED:
        return f"body: has {number} problems; send what docs/reference/server_api.md describes"
    lines = []
    for problem in error.errors(include_url=False, include_input=False)[:MAX_PROBLEMS]:
        message = problem["msg"][:1].lower() + problem["msg"][1:]
        remedy = REMEDIES.get(problem["type"]) or "send a value of that kind"
        lines.append(f"{dotted(problem['loc']) or 'body'}: {message}; {remedy}")
    return "\n".join(lines)


def read(form: type[M], body: bytes) -> M:
    """Parse the JSON body of a call or answer as a message of class `form`.

    Raises ValueError with at most `MAX_PROBLEMS` lines, each about one error. Only the first error
    in a list is reported.
    """
    try:
        message: M = brief_validator(form).validate_json(body)
    except ValidationError as error:
        raise ValueError(problem_lines(error)) from None
    return message


class InferCall(WireMessage):
    """The body of a call of `/infer/`: requests for rollouts."""

    requests: tuple[RolloutRequest, ...]
    seed: int
    """Seed of the first request. It is only for information: every request has its own seed."""
    run: str | None = None
    """Name of the training run that calls; null: no run. See `SyncCall.run`."""
    version: int | None = None
    """Version of the weights that must sample the rollouts; null: any."""
    repeat_terminate: RepeatTerminateSection = RepeatTerminateSection()
    """The run's whole `rollout_matching.repeat_terminate`: which repeating responses are ended."""

    @classmethod
    def of(
        cls,
        requests: Sequence[RolloutRequest],
        *,
        run: str | None = None,
        version: int | None = None,
        guard: RepeatGuardSettings | None = None,
    ) -> InferCall:
        """Build the call for these requests.

        `version`: the weight version that must answer; None: any. `guard` None: repeating answers
        are not ended.
        """
        rule = {} if guard is None else {"enabled": True} | asdict(guard)
        return cls(
            requests=tuple(requests),
            seed=requests[0].seed,
            run=run,
            version=version,
            repeat_terminate=RepeatTerminateSection(**rule),
        )


class InferAnswer(WireMessage):
    rollouts: tuple[Rollout, ...]
    """One rollout per request, in order."""


class SyncCall(WireMessage):
    """The body of a call that runs one phase of a weight sync."""

    version: int
    offer: WeightOffer | None
    """What the learner offers; null: as in an earlier phase of this weight sync.

    The offer names the process group that sends full weights, or contains a LoRA adapter. It is
    required in the first phase, and for full weights sent again in the phase `rendezvous`.
    """
    run: str | None = None
    """The training run that sends the weights; null: no run. After the weight sync the server
    refuses requests of other runs until they have sent their own weights.
    """

    @model_validator(mode="after")
    def _check_offer(self) -> Self:
        offer = self.offer
        if offer is None:
            return self
        if offer.version != self.version:
            raise ValueError("the offer's version differs from the call's version")
        if offer.sends_adapter != (offer.transport == TransportKind.ADAPTER):
            raise ValueError(
                "the offer must have an adapter if its transport is adapter, and no adapter"
                " otherwise"
            )
        return self

    @classmethod
    def of(cls, phase: SyncPhase, offer: WeightOffer, run: str | None) -> SyncCall:
        """Build the call that runs a phase, with the offer if the phase needs it."""
        joins = phase is SyncPhase.RENDEZVOUS and not offer.sends_adapter
        needed = offer if joins or phase is SyncPhase.PAUSE else None
        return cls(version=offer.version, offer=needed, run=run)


class SyncAnswer(WireMessage):
    report: SyncReport | None
    """The engine's report on the weight sync, after its last phase; null after other phases."""


class WorldSize(WireMessage):
    world_size: int
    """Number of rollout devices of the server."""


class Version(WireMessage):
    version: int
    """Version of the server's weights; 0: the checkpoint's."""


class Health(WireMessage):
    """The answer to `/health/`: state of a running server, and progress of its engine."""

    world_size: int
    num_running: int
    """Number of requests that the engine has not answered yet."""
    num_tokens: int
    """Number of tokens sampled since the server's start.

    If this does not change while requests run, the engine is stuck.
    """


@dataclass(frozen=True, slots=True)
class CallLimits:
    """A rollout server's limits for one call of `/infer/`."""

    max_request_bytes: int
    max_requests: int
    max_image_pixels: int
    """Largest number of pixels of one decoded image."""

    def pixel_problem(self, width: int, height: int) -> str:
        """Return what is wrong with an image of this size; empty if it is accepted."""
        if width * height <= self.max_image_pixels:
            return ""
        return (
            f"{width} x {height} pixels, but one image may have {self.max_image_pixels}; send a"
            f" smaller one, or start the server with max_image_pixels={width * height}"
        )


class ServerInfo(WireMessage):
    """The answer to `/info/`: settings of the server that must suit a training run."""

    name: str
    model: str
    """The model's name on the server's command line."""
    model_type: str
    """Model type in the checkpoint's config.json."""
    dtype: str
    head_dtype: str = "model"
    max_model_len: int
    max_num_seqs: int
    transport: str
    world_size: int
    max_images_per_prompt: int
    max_pixels: int | None = None
    enable_lora: bool
    max_lora_rank: int
    limits: CallLimits
    version: int
    process: str
    """Unique id of this start of the server. It shows whether two addresses are the same server."""
    taken: str = ""
    """Reason why the server refuses weights of the training run that calls; empty: it does not."""


class ErrorKind(StrEnum):
    ROLLOUT = "rollout"
    """The engine raised a RolloutError."""
    WEIGHT_SYNC = "weight_sync"
    """The engine raised a WeightSyncError."""
    REFUSED = "refused"
    """The server refused the call; the caller can correct it."""
    FAILED = "failed"
    """Any other failure in the server."""


class ErrorDetail(WireMessage):
    """The error in an answer to a failed call; fields that its kind does not have are empty."""

    kind: ErrorKind
    message: str
    actor: str = ""
    phase: str = ""
    quantity: str = ""
    size: float | None = None


class ErrorAnswer(WireMessage):
    error: ErrorDetail

    @classmethod
    def of(cls, error: RolloutError | WeightSyncError) -> ErrorAnswer:
        """Build the answer that reports this error of the engine to the client."""
        detail = ErrorDetail(
            kind=ErrorKind.ROLLOUT,
            message=shortened(error.message),
            actor=error.actor,
            phase=error.phase,
        )
        if isinstance(error, WeightSyncError):
            difference = {"quantity": error.quantity, "size": error.size}
            detail = detail.model_copy(update={"kind": ErrorKind.WEIGHT_SYNC} | difference)
        return cls(error=detail)
