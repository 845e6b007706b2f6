"""A rollout server apart from HTTP: whom it answers, and in which order it takes weights."""

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
"""Largest token id and count of vLLM's processes."""
MAX_SEED = 2**63 - 1
"""Largest seed of vLLM, which takes -1 for none at all."""
MAX_PARTS = 500_000
"""Most objects, lists and keys, and most commas, of a body that needs no more for its requests: an
object or a key that is wrong takes 500 bytes while the body is read."""
PARTS_PER_REQUEST = 100
"""More than a request has, but for the tokens of its prompt."""
OWN_SERVERS = "give every run servers of its own"


class RefusalError(Exception):
    """A call that its caller can mend: an HTTP status and what to do."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.message = message
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class SyncState:
    """The phase of a sync that may come next, and the run whose weights are served.

    Every phase goes through `enter` and, if it ends well, `finish`. `pause` may always come, any
    other phase only when it is due. While a phase runs, and after it failed, only `pause` is due.

    Example:
        pause -> due: rendezvous -> wire -> verify -> reset -> canary -> due: pause, run: the caller
    """

    run: str | None = None
    """Run whose weights the engine serves; None: nobody in particular's."""
    syncing: str | None = None
    """Run of the sync under way, or of the last one."""
    offer: WeightOffer | None = None
    """Its offer; None: there was no sync."""
    due: SyncPhase = SyncPhase.PAUSE

    def enter(self, phase: SyncPhase, call: messages.SyncCall) -> SyncState:
        """Return the state while the phase runs. Raises RefusalError for one that is not due."""
        offer = call.offer
        name = f"phase {phase} of version {call.version}"
        if phase is SyncPhase.PAUSE:
            if offer is None:
                raise RefusalError(400, f"offer: is null; phase {phase} begins a sync, send it")
            return replace(self, syncing=call.run, offer=offer, due=SyncPhase.PAUSE)
        if _differ(self.syncing, call.run) and self.due is not SyncPhase.PAUSE:
            raise RefusalError(409, f"{name}: another run's sync is under way; {OWN_SERVERS}")
        if self.offer is None or (phase, call.version) != (self.due, self.offer.version):
            expected = str(SyncPhase.PAUSE)
            if self.offer is not None and self.due is not SyncPhase.PAUSE:
                expected = f"{self.due} of version {self.offer.version}"
            order = f"begin with {SyncPhase.PAUSE} and keep the order {', '.join(PHASES)}"
            why = f"{name} is out of turn, the server waits for {expected}"
            raise RefusalError(409, f"{why}; {order}")
        # `pause` is due until the phase has finished: after a failure a sync begins anew.
        return replace(self, offer=offer or self.offer, due=SyncPhase.PAUSE)

    def finish(self, phase: SyncPhase) -> SyncState:
        """Return the state after a phase that ended well."""
        if phase is PHASES[-1]:
            return replace(self, due=SyncPhase.PAUSE, run=self.syncing)
        return replace(self, due=PHASES[PHASES.index(phase) + 1])


def _differ(run: str | None, other: str | None) -> bool:
    # A caller that names no run, such as `curl`, suits the weights of any.
    return None not in (run, other) and run != other


def request_problems(
    requests: Sequence[RolloutRequest], settings: EngineSettings, image_token_id: int | None = None
) -> Iterator[str]:
    """Yield `path: what is wrong; what to do` for what the types allow and the engine cannot do.

    `image_token_id` is the model's placeholder of an image; None: it has none, or is not known.
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
        limit = f"prompt and response may have {settings.max_model_len}"
        remedy = "shorten it, or start the server with max_model_len=N"
        yield f"prompt_token_ids: has {len(prompt)} tokens, {limit}; {remedy}"
    if num_images > settings.max_images_per_prompt:
        limit = f"the server takes {settings.max_images_per_prompt}"
        remedy = f"start it with max_images_per_prompt={num_images}"
        yield f"images: has {num_images}, {limit}; {remedy}"
    if image_token_id is not None and (number := prompt.count(image_token_id)) < num_images:
        has = f"and prompt_token_ids {number} of the placeholder {image_token_id}"
        yield f"images: has {num_images}, {has}; send one placeholder for each image"
    for key, token_ids in (
        ("prompt_token_ids", prompt),
        ("decode.stop_token_ids", decode.stop_token_ids),
        ("decode.banned_token_ids", decode.banned_token_ids),
    ):
        wrong = next((one for one in token_ids if not 0 <= one <= MAX_INT), None)
        if wrong is not None:
            yield f"{key}: has {wrong}, which is no token; send ids of the model's tokenizer"
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
        if not low <= value <= high:  # NaN is refused, too
            yield f"{key}: is {value}; send a value from {low} to {high}"


class ServedEngine(RolloutEngine, Protocol):
    """An engine that tells how it is, and takes the repeat guard's rule from any caller.

    Its properties may be asked from any thread, also of a stuck engine.
    """

    @property
    def why_dead(self) -> str:
        """Reason why the engine's process ended, where `is_dead`."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the start, those of unfinished answers included."""
        ...

    async def guard_by(self, settings: RepeatGuardSettings | None) -> None:
        """Guard what begins from now on; None: not at all. Raises RolloutError."""

    async def check_alive(self) -> None:
        """Return as soon as the engine answers: at once, or behind its present step."""

    @property
    def shut(self) -> str:
        """Reason why it serves no rollouts; empty: it does."""


@dataclass(eq=False, repr=False)
class RolloutService:
    """One engine for callers, open but from the beginning of a sync to its end."""

    engine: ServedEngine
    _: KW_ONLY
    name: str
    model_type: str
    settings: EngineSettings
    limits: messages.CallLimits
    image_root: Path | None
    """Resolved folder of images that may be named by path; None: images come as data."""
    image_token_id: int | None = None
    """The model's placeholder of an image; None: it has none."""
    lease: Lease = field(default_factory=lambda: Lease(LEASE_S))
    """The run whose weights it takes."""

    def __post_init__(self) -> None:
        self._world_size: int | None = None
        self._process = uuid.uuid4().hex
        self._num_running = 0
        """Requests of `infer` that the engine has, all guarded by one rule."""
        self.num_joined = 0
        """Phases under way in which the engine waits for others of a group."""
        self._guard: RepeatTerminateSection | None = None
        """Rule of the requests of `infer`; None: not known."""
        self._guard_turn = asyncio.Lock()
        self._num_arrivals = 0
        """Times that weights arrived, completely or not."""
        self._sync = SyncState()

    async def start(self) -> None:
        """Start the engine. Raises what it raises."""
        self._world_size = await self.engine.start()

    @property
    def world_size(self) -> int:
        """Rollout devices. Raises RefusalError while the engine loads, and when it has died."""
        if self.engine.is_dead:
            raise RefusalError(503, f"{self.name} has died; see its output, and start it again")
        if self._world_size is None:
            raise RefusalError(503, f"{self.name} is starting; ask /health/ until it answers 200")
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
        """Describe the server to a caller of this run; empty: of none."""
        settings = self.settings
        return messages.ServerInfo(
            name=self.name,
            model=settings.model_path,
            model_type=self.model_type,
            dtype=settings.dtype,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            transport=settings.transport,
            world_size=self.world_size,
            max_images_per_prompt=settings.max_images_per_prompt,
            enable_lora=settings.enable_lora,
            max_lora_rank=settings.max_lora_rank,
            limits=self.limits,
            version=self.version,
            process=self._process,
            taken=self.lease.taken(run),
        )

    def require_small(self, body: bytes | bytearray) -> None:
        """Raise RefusalError for JSON that would take many times its size while it is read."""
        num_parts = sum(body.count(sign) for sign in (b"{", b"[", b":"))
        of_request = PARTS_PER_REQUEST
        for name, number in (("objects, lists and keys", num_parts), ("commas", body.count(b","))):
            limit = max(MAX_PARTS, of_request * self.limits.max_requests)
            if number > limit:
                why = f"body: has {number} {name}, a call may have {limit}"
                raise RefusalError(400, f"{why}; send less at a time")
            of_request += self.settings.max_model_len

    async def infer(self, call: messages.InferCall) -> list[Rollout]:
        """Generate rollouts; cancelling aborts them. Raises RefusalError, and as the engine."""
        self._check_open(call.run, call.version)
        # Compared again after the generation, across which a sync may begin.
        arrivals = self._num_arrivals
        held = self.version
        if len(call.requests) > self.limits.max_requests:
            limit = f"one call may have {self.limits.max_requests}"
            remedy = "split it, or start the server with max_requests=N"
            raise RefusalError(400, f"requests: has {len(call.requests)}, {limit}; {remedy}")
        problems = request_problems(call.requests, self.settings, self.image_token_id)
        if first := list(islice(problems, messages.MAX_PROBLEMS)):
            raise RefusalError(400, "\n".join(first))
        # In a thread: files are read, and the server answers others meanwhile.
        requests = await asyncio.to_thread(self._with_image_data, call.requests)
        await self._guard_by(call.repeat_terminate)
        # Nothing may be awaited in between: a call with another rule looks at these numbers.
        self._num_running += len(requests)
        try:
            rollouts = await self.engine.generate(requests)
        except RolloutError:
            # A sync may have begun while the images were read; then this is a refusal.
            self._check_open(call.run, call.version)
            raise
        finally:
            self._num_running -= len(requests)
        assert self.world_size
        if self._num_arrivals != arrivals:
            why = f"was given other weights than version {held} before it had answered"
            raise RefusalError(409, f"{self.name} {why}; ask again")
        return rollouts

    async def run_sync_phase(
        self, phase: SyncPhase, call: messages.SyncCall, run: str = ""
    ) -> SyncReport | None:
        """Run a phase; when it fails the sync has to begin anew.

        Args:
            run: takes the lease; empty: a caller of no run, which needs none while there is none.

        Raises RefusalError for a phase that is not due or where another run has the lease, and what
        the engine raises.
        """
        num_workers = self.world_size
        if taken := self.lease.take(run):
            raise RefusalError(409, f"{self.name} takes no weights of {run or 'no run'}: {taken}")
        if call.offer is not None and isinstance(call.offer.terms, FullOffer):
            # Checked before the engine joins: a group of another size would never be whole, and
            # the join would wait for its limit.
            sizes = [group.world_size for group in call.offer.terms.groups]
            if sizes != [1 + num_workers]:
                group = f"this server's group is the sender and its {num_workers} workers"
                raise RefusalError(400, f"offer.terms.groups: have {sizes} ranks; {group}")
        # A later sync may begin while this phase runs: then the state is another.
        state = self._sync = self._sync.enter(phase, call)
        assert state.offer is not None
        # The pause has ended what was running; what was queued would be answered under the weights
        # that arrive now.
        self._num_arrivals += phase is SyncPhase.WIRE
        waits = phase in (SyncPhase.RENDEZVOUS, SyncPhase.WIRE)
        self.num_joined += waits
        try:
            report = await self.engine.run_sync_phase(phase, state.offer)
        finally:
            self.num_joined -= waits
        if self._sync is not state:
            raise RefusalError(409, f"the sync to version {call.version} was given up for another")
        self._sync = state.finish(phase)
        return report

    async def _guard_by(self, rule: RepeatTerminateSection) -> None:
        """Set the engine's guard to a call's rule. Raises RefusalError under another one."""
        # One at a time: of two callers with different rules only the first may set its own.
        async with self._guard_turn:
            if rule == self._guard:
                return
            if self._num_running:
                busy = f"{self.name} answers {self._num_running} requests under another one"
                raise RefusalError(409, f"repeat_terminate: {busy}; {OWN_SERVERS}, or wait")
            self._guard = None  # not known until the engine has it: this call may be cancelled
            await self.engine.guard_by(rule.settings())
            self._guard = rule

    def _check_open(self, run: str | None, version: int | None) -> None:
        assert self.world_size
        if shut := self.engine.shut:
            raise RefusalError(409, f"{self.name} serves no rollouts: {shut}; complete a sync")
        held = f"{self.name} holds version {self.version}"
        if _differ(self._sync.run, run):
            why = f"{held} of another run's weights; sync first, and {OWN_SERVERS}"
            raise RefusalError(409, why)
        if version is not None and version != self.version:
            remedy = "if it was started again, start the run again, too, from its last checkpoint"
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
        """Return the image with its bytes, whose size was checked. Raises RefusalError."""
        if image.data is None:
            image = self._read_file(image, path)
        assert image.data is not None
        try:
            # Its header alone: a small file can decode to more memory than there is.
            size = open_image(image.data).size
        except ValueError as error:
            message = f"{path}: is no image that can be read ({error}); send PNG, JPEG or WebP"
            raise RefusalError(400, message) from error
        if problem := self.limits.pixel_problem(*size):
            raise RefusalError(413, f"{path}: of sample {sample_id} has {problem}")
        return image

    def _read_file(self, image: ImageRef, path: str) -> ImageRef:
        root = self.image_root
        send_data = "send data (base64)"
        if image.path is None:
            raise RefusalError(400, f"{path}: has neither data nor path; {send_data}")
        if root is None:
            remedy = f"start it with image_root=FOLDER, or {send_data}"
            raise RefusalError(403, f"{path}.path: this server reads no files; {remedy}")
        try:
            # Resolved first: neither `..` nor a link leads out of the root.
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
        # No permission, a name that no file can have, or bytes that are not the digest's.
        except (OSError, ValueError) as error:
            raise RefusalError(400, f"{path}.path: {error}; correct it, or {send_data}") from error
