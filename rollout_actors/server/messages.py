"""Messages between a rollout server and its client, as JSON. No pickle.

They hold the dataclasses of `shared`. Numbers keep every bit, NaN and infinities included: a canary
that met one has to arrive to be refused.
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
"""Largest image of a server where nobody says otherwise."""
MAX_PROBLEMS = 20
"""Most problems of a call that an answer names."""
MAX_LISTED = 1000
"""More problems are only counted: pydantic would write a thousand bytes about each."""
MAX_MESSAGE_CHARS = 10_000
"""Longest message of an error: parts of it are the caller's own words."""
REMEDIES = {
    "missing": "add it",
    "unexpected_keyword_argument": "remove it",
    "extra_forbidden": "remove it",
    "json_invalid": "send JSON",
}
"""By pydantic's kind of problem; for others: send a value of that kind."""


class WireMessage(BaseModel):
    """A closed mapping: nothing unknown is accepted, nothing is converted."""

    # It holds for the dataclasses in a message, too.
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
    """Return a validator that leaves a list at its first wrong item.

    pydantic's own one goes on: three million wrong items of a body of 6 MB took it 4 GiB.
    """

    def at_first(part: Any) -> Any:
        if isinstance(part, list | tuple):
            return type(part)(map(at_first, part))
        if not isinstance(part, dict):
            return part
        made = {key: at_first(value) for key, value in part.items()}
        return made | {"fail_fast": True} if part.get("type") in ("list", "tuple") else made

    # Else it would take the class's own one, which is made already.
    return SchemaValidator(at_first(form.__pydantic_core_schema__), _use_prebuilt=False)


def shortened(message: str) -> str:
    """Return the message of an error, cut where it would repeat what the caller has sent."""
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    return f"{message[:MAX_MESSAGE_CHARS]}... ({len(message)} characters)"


def problem_lines(error: ValidationError) -> str:
    """Return a line for each of the first problems: `path: what is wrong; what to do`."""
    number = error.error_count()
    if number > MAX_LISTED:
        return f"body: has {number} problems; send what docs/serve.md describes"
    lines = []
    for problem in error.errors(include_url=False, include_input=False)[:MAX_PROBLEMS]:
        message = problem["msg"][:1].lower() + problem["msg"][1:]
        remedy = REMEDIES.get(problem["type"]) or "send a value of that kind"
        lines.append(f"{dotted(problem['loc']) or 'body'}: {message}; {remedy}")
    return "\n".join(lines)


def read(form: type[M], body: bytes) -> M:
    """Read a message.

    Raises ValueError: a line per problem, at most `MAX_PROBLEMS`, of a list the first wrong item's.
    """
    try:
        message: M = brief_validator(form).validate_json(body)
    except ValidationError as error:
        raise ValueError(problem_lines(error)) from None
    return message


class InferCall(WireMessage):
    """A share of a round, or a part of it."""

    requests: tuple[RolloutRequest, ...]
    seed: int
    """Seed of the first request, as in the run's plan; every request brings its own."""
    run: str | None = None
    """Run that asks; null: nobody in particular. See `SyncCall.run`."""
    version: int | None = None
    """Weight version that must answer; null: any."""
    repeat_terminate: RepeatTerminateSection = RepeatTerminateSection()
    """The run's whole `rollout_matching.repeat_terminate`: which responses end for repeating."""

    @classmethod
    def of(
        cls,
        requests: Sequence[RolloutRequest],
        *,
        run: str | None = None,
        version: int | None = None,
        guard: RepeatGuardSettings | None = None,
    ) -> InferCall:
        """Make the call of these requests; `guard` None: none of them is guarded."""
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
    """One for each request, in order."""


class SyncCall(WireMessage):
    """One phase of a sync."""

    version: int
    offer: WeightOffer | None
    """At the first phase, and for full weights again at the rendezvous; null: as it was.

    Full weights travel by the group in its terms, an adapter is in it.
    """
    run: str | None = None
    """Run whose weights these are; afterwards the server answers no other run's requests until that
    has sent its own.
    """

    @model_validator(mode="after")
    def _check_offer(self) -> Self:
        offer = self.offer
        if offer is None:
            return self
        if offer.version != self.version:
            raise ValueError("needs an offer of its own version")
        if offer.sends_adapter != (offer.transport == TransportKind.ADAPTER):
            raise ValueError("needs an adapter exactly where that is the transport")
        return self

    @classmethod
    def of(cls, phase: SyncPhase, offer: WeightOffer, run: str | None) -> SyncCall:
        """Make the call of a phase, with the offer where the phase needs it."""
        joins = phase is SyncPhase.RENDEZVOUS and not offer.sends_adapter
        needed = offer if joins or phase is SyncPhase.PAUSE else None
        return cls(version=offer.version, offer=needed, run=run)


class SyncAnswer(WireMessage):
    report: SyncReport | None
    """Report of the last phase; null after the others."""


class WorldSize(WireMessage):
    world_size: int
    """Rollout devices of the server."""


class Version(WireMessage):
    version: int
    """Version of the weights being served; 0: the checkpoint's."""


class Health(WireMessage):
    """State of a server that is up, and progress of its engine."""

    world_size: int
    num_running: int
    """Requests that the engine has not answered."""
    num_tokens: int
    """Tokens sampled since the start.

    While requests run and this stands still, the engine is stuck.
    """


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of one call."""

    max_request_bytes: int
    max_requests: int
    max_image_pixels: int
    """Pixels of one image, decoded."""

    def pixel_problem(self, width: int, height: int) -> str:
        """Return what is wrong with an image of this size; empty: nothing."""
        if width * height <= self.max_image_pixels:
            return ""
        return (
            f"{width} x {height} pixels, one image may have {self.max_image_pixels}; send a smaller"
            f" one, or start the server with max_image_pixels={width * height}"
        )


class ServerInfo(WireMessage):
    """Settings of a server that a run has to agree with."""

    name: str
    model: str
    """As it was named on the server's command line."""
    model_type: str
    """From the checkpoint's config.json."""
    dtype: str
    max_model_len: int
    max_num_seqs: int
    transport: str
    world_size: int
    max_images_per_prompt: int
    enable_lora: bool
    max_lora_rank: int
    limits: CallLimits
    version: int
    process: str
    """Name of this start of the server, by which two addresses of one server are known."""
    taken: str = ""
    """Why it takes no weights of the run that asks; empty: it does."""


class ErrorKind(StrEnum):
    ROLLOUT = "rollout"
    """A RolloutError of the engine."""
    WEIGHT_SYNC = "weight_sync"
    """A WeightSyncError of the engine."""
    REFUSED = "refused"
    """The caller's to mend."""
    FAILED = "failed"
    """Any other failure in the server."""


class ErrorDetail(WireMessage):
    """Fields of an error, as far as its kind has them."""

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
        """Make the answer that carries this error to the client."""
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
