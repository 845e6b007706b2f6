"""A rollout server without its HTTP part: which calls it accepts, and how it answers them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

from rollout_actors.engine.sampling import open_image
from rollout_actors.engine.settings import EngineSettings
from rollout_actors.server import messages
from rollout_actors.server.lease import LEASE_S, Lease
from shared.config.rollout import RepeatTerminateSection
from shared.errors import RolloutError
from shared.protocols import RolloutEngine
from shared.records import ImageRef
from shared.rollouts import (
    MAX_TEMPERATURE,
    REPETITION_PENALTIES,
    DecodeMode,
    Rollout,
    RolloutRequest,
    SyncReport,
    WeightOffer,
)
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.offer import FullOffer
from shared.weight_sync.phases import SyncPhase

PHASES = tuple(SyncPhase)
MAX_INT = 2**31 - 1
"""Largest token id, and largest number of tokens, that vLLM's processes can hold."""
MAX_SEED = 2**63 - 1
"""Largest seed of vLLM. There -1 means no seed."""
MAX_PARTS = 500_000
"""Most JSON objects, lists and keys, and most commas, of a call's body, unless the permitted number
of requests needs more. An invalid object or key takes 500 bytes while the body is parsed."""
PARTS_PER_REQUEST = 100
"""Upper bound of the JSON objects, lists and keys of one request."""
OWN_SERVERS = "give every run its own servers"


class RefusalError(Exception):
    """The server refuses a call. It has the HTTP status, and a message that says what to do."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.message = message
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class SyncState:
    """Which phase of a weight sync the server accepts next, and whose weights it has.

    Every phase calls `enter` and, if it succeeds, `finish`. `pause` is always accepted, any other
    phase only when it is due. While a phase runs, and after it failed, only `pause` is due.

    Example:
        After `pause` has succeeded, `rendezvous` is due, then `wire`, `verify`, `reset` and
        `canary`. After `canary`, `pause` is due, and `run` is the run that has sent the weights.
    """

    run: str | None = None
    """Training run whose weights the engine has; None: no particular run."""
    syncing: str | None = None
    """Training run of the current weight sync, or else of the last weight sync."""
    offer: WeightOffer | None = None
    """Offer of the weight sync of `syncing`; None: there was no weight sync."""
    due: SyncPhase = SyncPhase.PAUSE

    def enter(self, phase: SyncPhase, call: messages.SyncCall) -> SyncState:
        """Return the state while this phase runs. Raises RefusalError if the phase is not due."""
        offer = call.offer
        name = f"phase {phase} of version {call.version}"
        if phase is SyncPhase.PAUSE:
            if offer is None:
                raise RefusalError(400, f"offer: is null; send it, as phase {phase} begins a sync")
            return replace(self, syncing=call.run, offer=offer, due=SyncPhase.PAUSE)
        if _differ(self.syncing, call.run) and self.due is not SyncPhase.PAUSE:
            raise RefusalError(409, f"{name}: another run's sync is running; {OWN_SERVERS}")
        if self.offer is None or (phase, call.version) != (self.due, self.offer.version):
            expected = str(SyncPhase.PAUSE)
            if self.offer is not None and self.due is not SyncPhase.PAUSE:
                expected = f"{self.due} of version {self.offer.version}"
            order = f"begin with {SyncPhase.PAUSE} and keep the order {', '.join(PHASES)}"
            why = f"{name} is out of order, the server expects {expected}"
            raise RefusalError(409, f"{why}; {order}")
        # `pause` is due until the phase has finished: after a failure a sync starts again.
        return replace(self, offer=offer or self.offer, due=SyncPhase.PAUSE)

    def finish(self, phase: SyncPhase) -> SyncState:
        if phase is PHASES[-1]:
            return replace(self, due=SyncPhase.PAUSE, run=self.syncing)
        return replace(self, due=PHASES[PHASES.index(phase) + 1])


def _differ(run: str | None, other: str | None) -> bool:
    # A caller that names no run, for example `curl`, may use the weights of any run.
    return None not in (run, other) and run != other


def request_problems(
    requests: Sequence[RolloutRequest], settings: EngineSettings, image_token_id: int | None = None
) -> Iterator[str]:
    """Yield a text for each value in rollout requests that the engine cannot process.

    Each text has the form `path: what is wrong; what to do`. `image_token_id` is the model's image
    placeholder; None: the model has none, or it is unknown.
    """
    for index, request in enumerate(requests):
        for problem in _problems(request, settings, image_token_id):
            yield f"requests[{index}].{problem}"


def _problems(
    request: RolloutRequest, settings: EngineSettings, image_token_id: int | None
) -> Iterator[str]:
    decode = request.decode
    prompt = request.prompt_token_ids
    num_images = len(request.images)
    if not prompt:
        yield "prompt_token_ids: is empty; send at least one token"
    if len(prompt) >= settings.max_model_len:
        limit = f"but prompt and response together may have {settings.max_model_len}"
        remedy = "shorten the prompt, or start the server with max_model_len=N"
        yield f"prompt_token_ids: has {len(prompt)} tokens, {limit}; {remedy}"
    if num_images > settings.max_images_per_prompt:
        limit = f"but the server accepts {settings.max_images_per_prompt}"
        remedy = f"start the server with max_images_per_prompt={num_images}"
        yield f"images: has {num_images}, {limit}; {remedy}"
    if image_token_id is not None and (number := prompt.count(image_token_id)) < num_images:
        has = f"but prompt_token_ids has {number} of the placeholder {image_token_id}"
        yield f"images: has {num_images}, {has}; send one placeholder for each image"
    for key, token_ids in (
        ("prompt_token_ids", prompt),
        ("decode.stop_token_ids", decode.stop_token_ids),
        ("decode.banned_token_ids", decode.banned_token_ids),
    ):
        wrong = next((one for one in token_ids if not 0 <= one <= MAX_INT), None)
        if wrong is not None:
            yield f"{key}: {wrong} is not a token id; send ids of the model's tokenizer"
    if decode.mode is DecodeMode.BEAM:
        remedy = "send greedy or sample, or decode beams with hf or colocate"
        yield f"decode.mode: 'beam' is not served; {remedy}"
    if not 0 < decode.top_p <= 1:
        yield f"decode.top_p: is {decode.top_p}; send a value within (0, 1]"
    least, most = REPETITION_PENALTIES
    penalty = decode.repetition_penalty
    for key, value, low, high in (
        ("seed", request.seed, 0, MAX_SEED),
        ("decode.temperature", decode.temperature, 0, MAX_TEMPERATURE),
        ("decode.repetition_penalty", penalty, least, most),
        ("decode.max_new_tokens", decode.max_new_tokens, 1, MAX_INT),
        ("decode.top_k", decode.top_k, -1, MAX_INT),  # -1 and 0: no limit
    ):
        if not low <= value <= high:  # NaN is refused too
            yield f"{key}: is {value}; send a value from {low} to {high}"


class ServedEngine(RolloutEngine, Protocol):
    """The engine of a rollout server: it also reports its state.

    Its properties may be read from any thread, also if the engine is stuck.
    """

    @property
    def why_dead(self) -> str:
        """Reason why the engine's process ended, if `is_dead`."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled since the start, including tokens of unfinished answers."""
        ...

    async def guard_by(self, settings: RepeatGuardSettings | None) -> None:
        """Set when repeating answers to new requests are ended; None: never.

        Raises RolloutError.
        """

    async def check_alive(self) -> None:
        """Wait until the engine has answered a test call: at once, or after its current step."""

    @property
    def shut(self) -> str:
        """Reason why the engine cannot generate rollouts now; empty if it can."""


@dataclass(eq=False, repr=False)
class RolloutService:
    """A rollout server's engine, with the checks that its calls must pass.

    Callers get rollouts, except during a weight sync.
    """

    engine: ServedEngine
    _: KW_ONLY
    name: str
    model_type: str
    settings: EngineSettings
    limits: messages.CallLimits
    image_root: Path | None
    """Folder whose images a call may name by path; None: a call must contain its images."""
    image_token_id: int | None = None
    """The model's image placeholder; None: the model has none."""
    lease: Lease = field(default_factory=lambda: Lease(LEASE_S))
    """Determines from which training run the server accepts weights."""

    def __post_init__(self) -> None:
        self._world_size: int | None = None
        self._process = uuid.uuid4().hex
        self._num_running = 0
        """Number of `infer` requests in the engine. They have the same rule of the repeat guard."""
        self.num_joined = 0
        """Number of running phases that wait for other members of a process group."""
        self._guard: RepeatTerminateSection | None = None
        """Rule of the repeat guard that the engine has now; None: unknown."""
        self._guard_turn = asyncio.Lock()
        self._num_arrivals = 0
        """Number of syncs whose weights began to arrive."""
        self._sync = SyncState()

    async def start(self) -> None:
        """Start the engine, which loads the model. Raises the engine's errors."""
        self._world_size = await self.engine.start()

    @property
    def world_size(self) -> int:
        """Number of rollout devices. Raises RefusalError if the engine is loading or has died."""
        if self.engine.is_dead:
            raise RefusalError(503, f"{self.name} has died; see its output, and start it again")
        if self._world_size is None:
            raise RefusalError(503, f"{self.name} is starting; retry when /health/ answers 200")
        return self._world_size

    @property
    def is_up(self) -> bool:
        return self._world_size is not None

    @property
    def version(self) -> int:
        return self.engine.version

    def health(self) -> messages.Health:
        return messages.Health(
            world_size=self.world_size,
            num_running=self._num_running,
            num_tokens=self.engine.num_tokens,
        )

    def info(self, run: str = "") -> messages.ServerInfo:
        """Return the server's settings for a caller from this training run; empty: no run."""
        settings = self.settings
        return messages.ServerInfo(
            name=self.name,
            model=settings.model_path,
            model_type=self.model_type,
            dtype=settings.dtype,
            head_dtype=settings.head_dtype,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            transport=settings.transport,
            world_size=self.world_size,
            max_images_per_prompt=settings.max_images_per_prompt,
            max_pixels=settings.max_pixels,
            enable_lora=settings.enable_lora,
            max_lora_rank=settings.max_lora_rank,
            limits=self.limits,
            version=self.version,
            process=self._process,
            taken=self.lease.taken(run),
        )

    def require_small(self, body: bytes | bytearray) -> None:
        """Raise RefusalError if parsing this JSON would take many times its size in memory."""
        num_parts = sum(body.count(sign) for sign in (b"{", b"[", b":"))
        of_request = PARTS_PER_REQUEST
        for name, number in (("objects, lists and keys", num_parts), ("commas", body.count(b","))):
            limit = max(MAX_PARTS, of_request * self.limits.max_requests)
            if number > limit:
                why = f"body: has {number} {name}, but a call may have {limit}"
                raise RefusalError(400, f"{why}; send less at a time")
            of_request += self.settings.max_model_len

    async def infer(self, call: messages.InferCall) -> list[Rollout]:
        """Generate one rollout for each request of the call, in order. Cancelling aborts them.

        Raises RefusalError and the engine's errors.
        """
        self._check_open(call.run, call.version)
        # Compared again after the generation, because a sync may begin in between.
        arrivals = self._num_arrivals
        held = self.version
        if len(call.requests) > self.limits.max_requests:
            limit = f"but one call may have {self.limits.max_requests}"
            remedy = "split the call, or start the server with max_requests=N"
            raise RefusalError(400, f"requests: has {len(call.requests)}, {limit}; {remedy}")
        problems = request_problems(call.requests, self.settings, self.image_token_id)
        if first := list(islice(problems, messages.MAX_PROBLEMS)):
            raise RefusalError(400, "\n".join(first))
        # In a thread, because it reads files and the server answers other calls meanwhile.
        requests = await asyncio.to_thread(self._with_image_data, call.requests)
        await self._guard_by(call.repeat_terminate)
        # No await until the number is set, because a call with another rule checks it.
        self._num_running += len(requests)
        try:
            rollouts = await self.engine.generate(requests)
        except RolloutError:
            # If a sync began while the images were read, raise a refusal instead.
            self._check_open(call.run, call.version)
            raise
        finally:
            self._num_running -= len(requests)
        assert self.world_size
        if self._num_arrivals != arrivals:
            why = f"got other weights than version {held} before it answered"
            raise RefusalError(409, f"{self.name} {why}; send the call again")
        return rollouts

    async def run_sync_phase(
        self, phase: SyncPhase, call: messages.SyncCall, run: str = ""
    ) -> SyncReport | None:
        """Run one phase of a weight sync. If it fails, the sync must start again.

        `run`: the training run that sends the weights and gets the lease; empty: no run, which is
        accepted if no run has the lease.

        Raises RefusalError if the phase is not due or another run has the lease. Raises the
        engine's errors.
        """
        num_workers = self.world_size
        if taken := self.lease.take(run):
            caller = f"run {run}" if run else "a caller without a run's name"
            raise RefusalError(409, f"{self.name} accepts no weights from {caller}: {taken}")
        if call.offer is not None and isinstance(call.offer.terms, FullOffer):
            # Checked before the engine joins, because a group of another size would never be
            # complete, and the join would wait for its limit.
            sizes = [group.world_size for group in call.offer.terms.groups]
            if sizes != [1 + num_workers]:
                group = f"this server needs one group of the sender and {num_workers} workers"
                remedy = "if the server was restarted with other devices, start the run again"
                message = f"offer.terms.groups: have {sizes} ranks, but {group}; {remedy}"
                raise RefusalError(400, message)
        # A later sync may begin while this phase runs. Then the state has changed.
        state = self._sync = self._sync.enter(phase, call)
        assert state.offer is not None
        # The pause has ended the running requests. Queued requests would be answered with the new
        # weights.
        self._num_arrivals += phase is SyncPhase.WIRE
        waits = phase in (SyncPhase.RENDEZVOUS, SyncPhase.WIRE)
        self.num_joined += waits
        try:
            report = await self.engine.run_sync_phase(phase, state.offer)
        finally:
            self.num_joined -= waits
        if self._sync is not state:
            raise RefusalError(
                409,
                f"the weight sync to version {call.version} was replaced by a newer sync of this"
                f" server; ignore this if only one run uses the server, else {OWN_SERVERS}",
            )
        self._sync = state.finish(phase)
        return report

    async def _guard_by(self, rule: RepeatTerminateSection) -> None:
        """Set the rule of the engine's repeat guard.

        Raises RefusalError while the engine answers requests with another rule.
        """
        # One call at a time: of two callers with different rules only the first may set its own.
        async with self._guard_turn:
            if rule == self._guard:
                return
            if self._num_running:
                busy = f"{self.name} is answering {self._num_running} requests with another rule"
                raise RefusalError(409, f"repeat_terminate: {busy}; {OWN_SERVERS}, or retry later")
            self._guard = None  # unknown until the engine has it, as this call may be cancelled
            await self.engine.guard_by(rule.settings())
            self._guard = rule

    def _check_open(self, run: str | None, version: int | None) -> None:
        assert self.world_size
        if shut := self.engine.shut:
            # Only a weight sync opens the server: the checkpoint's weights may be half replaced.
            remedy = "wait until a run has sent its weights, or start the server again"
            raise RefusalError(409, f"{self.name} serves no rollouts: {shut}; {remedy}")
        held = f"{self.name} has version {self.version}"
        if _differ(self._sync.run, run):
            why = (
                f"{held} of another run's weights; send this run's weights first, and {OWN_SERVERS}"
            )
            raise RefusalError(409, why)
        if version is not None and version != self.version:
            remedy = "if the server was restarted, restart the run too, from its last checkpoint"
            raise RefusalError(409, f"{held} of the weights, not {version}: {remedy}")

    def _with_image_data(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        loaded = []
        for i, request in enumerate(requests):
            images = tuple(
                self._load_image(image, f"requests[{i}].images[{j}]", request.sample_id)
                for j, image in enumerate(request.images)
            )
            loaded.append(replace(request, images=images))
        return loaded

    def _load_image(self, image: ImageRef, path: str, sample_id: str) -> ImageRef:
        """Return the image with its bytes, after a check of its size. Raises RefusalError."""
        if image.data is None:
            image = self._read_file(image, path)
        assert image.data is not None
        try:
            # Only the header is read: a small file can decode to more than the memory.
            size = open_image(image.data).size
        except ValueError as error:
            message = f"{path}: cannot be read as an image ({error}); send PNG, JPEG or WebP"
            raise RefusalError(400, message) from error
        if problem := self.limits.pixel_problem(*size):
            raise RefusalError(413, f"{path}: this image of sample {sample_id} has {problem}")
        return image

    def _read_file(self, image: ImageRef, path: str) -> ImageRef:
        root = self.image_root
        send_data = "send data (base64)"
        if image.path is None:
            raise RefusalError(400, f"{path}: has neither data nor path; {send_data}")
        if root is None:
            remedy = f"start the server with image_root=FOLDER, or {send_data}"
            raise RefusalError(403, f"{path}.path: this server reads no files; {remedy}")
        try:
            # Resolved first, so that neither `..` nor a link leads out of the root.
            resolved = (root / image.path).resolve()
            if not resolved.is_relative_to(root):
                raise RefusalError(403, f"{path}.path: is outside image_root; {send_data}")
            if not resolved.is_file():
                raise RefusalError(400, f"{path}.path: no file under image_root; {send_data}")
            limit = self.limits.max_request_bytes
            if resolved.stat().st_size > limit:
                why = f"is larger than max_request_bytes = {limit}; send a smaller image"
                raise RefusalError(413, f"{path}.path: {why}")
            return replace(image, path=resolved).with_data()
        # No permission, an invalid file name, or bytes with another digest.
        except (OSError, ValueError) as error:
            raise RefusalError(400, f"{path}.path: {error}; correct it, or {send_data}") from error
