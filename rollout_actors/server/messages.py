"""What a rollout server and its client say to each other, as JSON: the dataclasses of `shared`,
closed and strictly typed. No pickle.

Bytes are base64, and numbers keep every bit, NaN and infinities included: a canary that met one has
to arrive to be refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from shared.config.base import dotted
from shared.config.rollout import RepeatTerminateSection
from shared.errors import RolloutError, WeightSyncError
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.canary import CanaryProbe
from shared.weight_sync.offer import AdapterOffer, FullOffer, terms_of
from shared.weight_sync.phases import SyncPhase
from shared.weight_sync.transports import TransportKind


class WireMessage(BaseModel):
    """A closed mapping: nothing unknown is accepted, nothing is converted. The settings hold for
    the dataclasses in it too.
    """

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


class InferCall(WireMessage):
    """A share of a round."""

    requests: tuple[RolloutRequest, ...]
    seed: int
    """Of the call: its first request's. Every request brings its own; this one is in the run's plan
    (spec: determinism in server mode).
    """
    run: str | None = None
    """Who asks; null: nobody in particular. See `SyncCall.run`."""
    version: int | None = None
    """Of the weights that are to answer; null: any."""
    repeat_terminate: RepeatTerminateSection = RepeatTerminateSection()
    """The run's `rollout_matching.repeat_terminate`, whole: which of these responses are ended for
    repeating themselves."""

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
        rule = (
            RepeatTerminateSection()
            if guard is None
            else RepeatTerminateSection(enabled=True, **asdict(guard))
        )
        return cls(
            requests=tuple(requests),
            seed=requests[0].seed,
            run=run,
            version=version,
            repeat_terminate=rule,
        )


class InferAnswer(WireMessage):
    rollouts: tuple[Rollout, ...]
    """One for each request, in order."""


class Offer(WireMessage):
    """A `WeightOffer`. An adapter is in it; full weights travel by the process group that the terms
    name.
    """

    transport: str
    terms: FullOffer | None
    """Of full weights, with the one group of this server."""
    adapter: AdapterOffer | None
    """Of an adapter: in place of `terms`."""
    canary: CanaryProbe

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.terms is None) == (self.adapter is None):
            raise ValueError("needs either terms or adapter")
        if (self.adapter is None) == (self.transport == TransportKind.ADAPTER):
            raise ValueError("needs an adapter exactly where that is the transport")
        return self


class SyncCall(WireMessage):
    """One phase of a sync."""

    version: int
    offer: Offer | None
    """At the first phase, and again at the rendezvous, which so brings host, port and world size;
    null: as it was.
    """
    run: str | None = None
    """Whose weights these are: afterwards the server answers this run's requests, and another's
    only when that has sent its own.
    """

    @classmethod
    def of(cls, phase: SyncPhase, offer: WeightOffer, run: str | None) -> SyncCall:
        terms = terms_of(offer)
        if phase not in (SyncPhase.PAUSE, SyncPhase.RENDEZVOUS) or (
            phase is SyncPhase.RENDEZVOUS and offer.sends_adapter
        ):
            return cls(version=offer.version, offer=None, run=run)
        form = Offer(
            transport=offer.transport,
            terms=terms if isinstance(terms, FullOffer) else None,
            adapter=terms if isinstance(terms, AdapterOffer) else None,
            canary=offer.canary,
        )
        return cls(version=offer.version, offer=form, run=run)

    def weight_offer(self) -> WeightOffer | None:
        if self.offer is None:
            return None
        terms = self.offer.terms or self.offer.adapter
        return WeightOffer(self.version, self.offer.transport, {"terms": terms}, self.offer.canary)


class SyncAnswer(WireMessage):
    report: SyncReport | None
    """Of the last phase; null after the others."""


class WorldSize(WireMessage):
    world_size: int
    """Rollout devices of the server."""


class Version(WireMessage):
    version: int
    """Of the weights being served; 0: the checkpoint's."""


class Health(WireMessage):
    """That the server is up, and whether its engine gets on."""

    world_size: int
    num_running: int
    """Requests that the engine has been asked for and not answered."""
    num_tokens: int
    """Sampled since the start, those of unfinished rollouts too: while requests run and this stands
    still, the engine is stuck.
    """


IMAGE_PIXELS = 50_000_000
"""What a server takes of one image where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Of what one call may ask."""

    max_request_bytes: int
    max_requests: int
    max_image_pixels: int
    """Of one image, decoded."""


class ServerInfo(WireMessage):
    """What a server was started with, as far as a run has to agree with it."""

    name: str
    model: str
    """As it was named on the server's command line."""
    model_type: str
    """Of the checkpoint's config.json."""
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
    """Of this start of the server: by it two addresses of one server are known."""


class ErrorKind(StrEnum):
    ROLLOUT = "rollout"
    """A RolloutError of the engine, with actor and phase."""
    WEIGHT_SYNC = "weight_sync"
    """A WeightSyncError of the engine, with all its fields."""
    REFUSED = "refused"
    """The caller's to mend."""
    FAILED = "failed"
    """Whatever else went wrong in the server."""


class ErrorDetail(WireMessage):
    """The fields of an error here, as far as its kind has them."""

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
        if isinstance(error, RolloutError):
            return cls(
                error=ErrorDetail(
                    kind=ErrorKind.ROLLOUT,
                    message=error.message,
                    actor=error.actor,
                    phase=error.phase,
                )
            )
        return cls(
            error=ErrorDetail(
                kind=ErrorKind.WEIGHT_SYNC,
                message=error.message,
                actor=error.actor,
                phase=error.phase,
                quantity=error.quantity,
                size=error.size,
            )
        )


def read(form: type[M], body: bytes) -> M:
    """ValueError with one line per problem, each `path: what is wrong; what to do`."""
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(
            "\n".join(
                _explained(one["loc"], one["type"], one["msg"])
                for one in error.errors(include_url=False, include_input=False)
            )
        ) from None


_REMEDIES = defaultdict(
    lambda: "send a value of that kind",
    {
        "missing": "add it",
        "unexpected_keyword_argument": "remove it",
        "extra_forbidden": "remove it",
        "json_invalid": "send JSON",
    },
)


def _explained(loc: tuple[str | int, ...], kind: str, message: str) -> str:
    return f"{dotted(loc) or 'body'}: {message[0].lower()}{message[1:]}; {_REMEDIES[kind]}"
