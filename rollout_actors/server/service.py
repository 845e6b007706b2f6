"""What a rollout server does, apart from HTTP: whom it answers, and in which order it is given
weights.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from rollout_actors.engine.sampling import open_image
from rollout_actors.engine.settings import EngineSettings
from rollout_actors.server import messages
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
from shared.weight_sync.phases import SyncPhase

# The door of a rollout server: which phase of a sync is in turn, and of which run.


PHASES = tuple(SyncPhase)
FOLLOWING = dict(pairwise((*PHASES, PHASES[0])))


class RefusalError(Exception):
    """The caller's to mend: an HTTP status and what to do."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class SyncState:
    """Which phase of a sync is in turn, and of which run. Every phase goes through `during` and, if
    it ends well, `after`::

    phase           in turn                     while it runs, or after it failed    when it has
    ended
    pause           always, with an offer       due: pause                           due: rendezvous
    rendezvous ...  where it is due, for the    due: pause                           due: the
    following phase; behind canary: pause
                    version of the offer

    From pause to the end of canary the engine itself serves no rollouts.
    """

    run: str | None = None
    """Whose weights the engine serves, while it serves any; None: nobody in particular's."""
    syncing: str | None = None
    """Whose sync is under way, or was the last one; None: nobody in particular's."""
    offer: WeightOffer | None = None
    """Of the sync under way, or of the last one; None: there was none."""
    due: SyncPhase = SyncPhase.PAUSE
    """What comes next. PAUSE may always come."""

    def during(self, phase: SyncPhase, call: messages.SyncCall) -> SyncState:
        """Raises RefusalError where it is not the phase's turn."""
        brought = call.weight_offer()
        if phase is SyncPhase.PAUSE:
            if brought is None:
                raise RefusalError(
                    400, f"offer: is null; phase {phase} begins a sync, send its offer"
                )
            return replace(self, syncing=call.run, offer=brought, due=SyncPhase.PAUSE)
        if (
            None not in (self.syncing, call.run)
            and self.syncing != call.run
            and self.due is not SyncPhase.PAUSE
        ):
            raise RefusalError(
                409,
                f"phase {phase} of version {call.version}: another run's sync is under way; give"
                " every run servers of its own",
            )
        if self.offer is None or (phase, call.version) != (self.due, self.offer.version):
            expected = str(SyncPhase.PAUSE)
            if self.offer is not None and self.due is not SyncPhase.PAUSE:
                expected = f"{self.due} of version {self.offer.version}"
            raise RefusalError(
                409,
                f"phase {phase} of version {call.version} is out of turn, the server waits for"
                f" {expected}; begin with {SyncPhase.PAUSE} and keep the order {', '.join(PHASES)}",
            )
        return replace(self, offer=brought or self.offer, due=SyncPhase.PAUSE)

    def after(self, phase: SyncPhase) -> SyncState:
        return replace(
            self, due=FOLLOWING[phase], run=self.syncing if phase is PHASES[-1] else self.run
        )


# What is wrong with a request that is well formed.


MAX_INT = 2**31 - 1
"""Of token ids and counts, as vLLM's processes have them."""
MAX_SEED = 2**63 - 1
"""Of vLLM's seeds. It takes -1 for none at all."""


def request_problems(
    requests: Sequence[RolloutRequest], settings: EngineSettings, image_token_id: int | None = None
) -> Iterator[str]:
    """What the types allow and the engine cannot do: one line each, `path: what is wrong; what to
    do`. `image_token_id` is the model's placeholder of an image, one of which stands for each;
    None: it has none, or it is not known."""
    least, most = REPETITION_PENALTIES
    for index, request in enumerate(requests):
        path, decode = f"requests[{index}]", request.decode
        if not request.prompt_token_ids:
            yield f"{path}.prompt_token_ids: is empty; send at least one token"
        if len(request.prompt_token_ids) >= settings.max_model_len:
            yield (
                f"{path}.prompt_token_ids: has {len(request.prompt_token_ids)} tokens, and the"
                f" server's max_model_len is {settings.max_model_len} with the response; send a"
                " shorter prompt, or start the server with a larger max_model_len"
            )
        if len(request.images) > settings.max_images_per_prompt:
            yield (
                f"{path}.images: has {len(request.images)} images, the server takes"
                f" {settings.max_images_per_prompt}; start it with"
                f" max_images_per_prompt={len(request.images)}"
            )
        if image_token_id is not None and (
            number := request.prompt_token_ids.count(image_token_id)
        ) < len(request.images):
            yield (
                f"{path}.images: has {len(request.images)} images, and prompt_token_ids has"
                f" {number} of the placeholder {image_token_id} that stands for one; send one"
                " placeholder for each image"
            )
        for key, token_ids in (
            ("prompt_token_ids", request.prompt_token_ids),
            ("decode.stop_token_ids", decode.stop_token_ids),
            ("decode.banned_token_ids", decode.banned_token_ids),
        ):
            if wrong := [token_id for token_id in token_ids if not 0 <= token_id <= MAX_INT]:
                yield (
                    f"{path}.{key}: has {wrong[0]}, which is no token; send ids of the model's"
                    " tokenizer"
                )
        if decode.mode is DecodeMode.BEAM:
            yield (
                f"{path}.decode.mode: 'beam' is not served; send greedy or sample, or decode beams"
                " with rollout_backend: hf or vllm.mode: colocate"
            )
        bounds = {
            "temperature": (
                0 <= decode.temperature <= MAX_TEMPERATURE,
                decode.temperature,
                f"from 0 to {MAX_TEMPERATURE:g}",
            ),
            "top_p": (0 < decode.top_p <= 1, decode.top_p, "within (0, 1]"),
            "top_k": (
                -1 <= decode.top_k <= MAX_INT,
                decode.top_k,
                f"-1 or 0 (no limit) or from 1 to {MAX_INT}",
            ),
            "repetition_penalty": (
                least <= decode.repetition_penalty <= most,
                decode.repetition_penalty,
                f"from {least:g} to {most:g}",
            ),
            "max_new_tokens": (
                1 <= decode.max_new_tokens <= MAX_INT,
                decode.max_new_tokens,
                f"from 1 to {MAX_INT}",
            ),
        }
        if not 0 <= request.seed <= MAX_SEED:
            yield f"{path}.seed: is {request.seed}; send a value from 0 to {MAX_SEED}"
        yield from (
            f"{path}.decode.{key}: is {value}; send a value {wanted}"
            for key, (sound, value, wanted) in bounds.items()
            if not sound
        )


MAX_PROBLEMS = 20
"""Of one call, in its answer."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What a call was let in under."""

    version: int
    """Of the weights."""
    check: Callable[[], None]
    """Raises RefusalError where the engine has died, or other weights have begun to arrive: what
    has no answer yet would get one of those, verified or not.
    """


class ServedEngine(RolloutEngine, Protocol):
    """An engine that tells how far it is, and takes the repeat guard's rule from whoever asks for
    rollouts."""

    async def guard_by(self, settings: RepeatGuardSettings | None) -> None:
        """Guard what begins from now on by these settings; None: not at all. Raises RolloutError
        where it cannot."""
        ...

    @property
    def shut(self) -> str:
        """Why it serves no rollouts; empty: it does. May be asked from any thread."""
        ...

    @property
    def why_dead(self) -> str:
        """What ended the engine's process, where `is_dead`."""
        ...

    @property
    def num_tokens(self) -> int:
        """Sampled since the start. May be asked from any thread, also while the engine's own is
        stuck.
        """
        ...


class RolloutService:
    """One engine behind a door: open from its start, and from the end of each sync, to the
    beginning of the next.
    """

    def __init__(
        self,
        engine: ServedEngine,
        *,
        name: str,
        model_type: str,
        settings: EngineSettings,
        limits: messages.CallLimits,
        image_root: Path | None,
        image_token_id: int | None = None,
    ) -> None:
        """
        Args:
            image_root: the folder of the images that may be named by path, resolved; None: images
            come as data alone.
            image_token_id: the model's placeholder of an image; None: it has none.
        """
        self.limits = limits
        self._image_token_id = image_token_id
        self._engine, self._image_root = engine, image_root
        self._name, self._model_type, self._settings = name, model_type, settings
        self._world_size: int | None = None
        self._process = uuid.uuid4().hex
        self._num_running = 0
        self._guard: RepeatTerminateSection | None = None
        """By which the engine guards what is asked for by `infer`; None: not known."""
        self._num_guarded = 0
        """Requests of `infer` under way, all of which are guarded by that."""
        self._guard_turn = asyncio.Lock()
        self._num_arrivals = 0
        """Of weights, whether they were completed or not."""
        self._door = SyncState()

    async def start(self, then: Callable[[], Awaitable[None]] | None = None) -> None:
        """`then`: what else has to be there before anybody is answered. Raises what the engine
        raises, and it.
        """
        world_size = await self._engine.start()
        if then is not None:
            await then()
        self._world_size = world_size

    @property
    def world_size(self) -> int:
        """Raises RefusalError while the engine loads, and when it has died."""
        if self._engine.is_dead:
            raise RefusalError(
                503,
                f"the engine of {self._name} has died; see the server's output, and start it again",
            )
        if self._world_size is None:
            raise RefusalError(503, f"{self._name} is starting; ask /health/ until it answers 200")
        return self._world_size

    @property
    def is_up(self) -> bool:
        """Whether the start has ended well."""
        return self._world_size is not None

    @property
    def is_dead(self) -> bool:
        return self._engine.is_dead

    @property
    def why_dead(self) -> str:
        return self._engine.why_dead

    @property
    def version(self) -> int:
        return self._engine.version

    def health(self) -> messages.Health:
        return messages.Health(
            world_size=self.world_size,
            num_running=self._num_running,
            num_tokens=self._engine.num_tokens,
        )

    def info(self) -> messages.ServerInfo:
        settings = self._settings
        return messages.ServerInfo(
            name=self._name,
            model=settings.model_path,
            model_type=self._model_type,
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
        )

    async def infer(self, call: messages.InferCall) -> list[Rollout]:
        """Raises RefusalError, and what the engine raises. Cancelling it aborts its requests."""
        admission = self.admit(call.run, call.version)
        wrong = list(request_problems(call.requests, self._settings, self._image_token_id))
        if len(call.requests) > self.limits.max_requests:
            wrong.append(
                f"requests: has {len(call.requests)}, one call may have {self.limits.max_requests};"
                " split it, or start the server with max_requests=N"
            )
        if wrong:
            raise RefusalError(400, "\n".join(wrong[:MAX_PROBLEMS]))
        requests = await asyncio.to_thread(self._with_image_data, call.requests)
        await self._guard_by(call.repeat_terminate)
        # Nothing may be awaited in between: whoever brings another rule looks at these numbers.
        self._num_guarded += len(requests)
        try:
            with self.running(len(requests)):
                rollouts = await self._engine.generate(requests)
        except RolloutError:
            # A sync may have begun while the images were read.
            self._check_open(call.run, call.version)
            raise
        finally:
            self._num_guarded -= len(requests)
        admission.check()
        return rollouts

    async def _guard_by(self, rule: RepeatTerminateSection) -> None:
        """Have the engine guard by a call's rule. RefusalError while it answers calls with another
        one."""
        async with self._guard_turn:
            if rule == self._guard:
                return
            if self._num_guarded:
                raise RefusalError(
                    409,
                    f"repeat_terminate: {self._name} answers {self._num_guarded} requests under"
                    " another one; give every run servers of its own, or ask when these are done",
                )
            self._guard = None  # until the engine has said so: this call may be given up on the way
            await self._engine.guard_by(rule.settings())
            self._guard = rule

    def admit(self, run: str | None = None, version: int | None = None) -> Admission:
        """Let in a call that names these. Raises RefusalError while no rollouts are served, or
        others than of this run and version.
        """
        self._check_open(run, version)
        before, held = self._num_arrivals, self.version

        def check() -> None:
            assert self.world_size
            if self._num_arrivals != before:
                raise RefusalError(
                    409,
                    f"{self._name} was given other weights than version {held} before it had"
                    " answered; ask again",
                )

        return Admission(held, check)

    @contextmanager
    def running(self, number: int) -> Iterator[None]:
        """So many requests more, by `health`'s account, for as long as the block runs."""
        self._num_running += number
        try:
            yield
        finally:
            self._num_running -= number

    async def run_sync_phase(self, phase: SyncPhase, call: messages.SyncCall) -> SyncReport | None:
        """Raises RefusalError for a phase out of turn, and what the engine raises: then the sync
        begins anew. `pause` is always in turn.
        """
        self._check_group(call)
        # A later sync may begin while this phase runs: then the door is another.
        door = self._door = self._door.during(phase, call)
        assert door.offer is not None
        # What was running has ended by then, with `pause`; what was queued would be answered under
        # what arrives now.
        self._num_arrivals += phase is SyncPhase.WIRE
        report = await self._engine.run_sync_phase(phase, door.offer)
        if self._door is not door:
            raise RefusalError(
                409, f"the sync to version {call.version} was given up: another one has begun"
            )
        self._door = door.after(phase)
        return report

    def _check_group(self, call: messages.SyncCall) -> None:
        num_workers = self.world_size
        if call.offer is None or call.offer.terms is None:
            return
        sizes = [group.world_size for group in call.offer.terms.groups]
        if sizes != [1 + num_workers]:
            raise RefusalError(
                400,
                f"offer.terms.groups: have {sizes} ranks; this server's group is the sender and"
                f" {num_workers} of its workers, and no other server's",
            )

    def _check_open(self, run: str | None, version: int | None) -> None:
        assert self.world_size
        if shut := self._engine.shut:
            raise RefusalError(409, f"{self._name} serves no rollouts: {shut}; complete a sync")
        if None not in (self._door.run, run) and self._door.run != run:
            raise RefusalError(
                409,
                f"{self._name} holds version {self.version} of another run's weights; sync first,"
                " and give every run servers of its own",
            )
        if version is not None and version != self.version:
            raise RefusalError(
                409,
                f"{self._name} holds version {self.version} of the weights, not {version}: if it"
                " was started again, start the run again, too, from its last checkpoint",
            )

    def _with_image_data(self, requests: tuple[RolloutRequest, ...]) -> list[RolloutRequest]:
        return [
            replace(
                request,
                images=tuple(
                    self._loaded(image, f"requests[{i}].images[{j}]", request.sample_id)
                    for j, image in enumerate(request.images)
                ),
            )
            for i, request in enumerate(requests)
        ]

    def _loaded(self, image: ImageRef, path: str, sample_id: str) -> ImageRef:
        loaded = image if image.data is not None else self._from_file(image, path)
        assert loaded.data is not None
        try:
            # Its header alone: a small file can decode to more memory than there is.
            width, height = open_image(loaded.data).size
        except ValueError as error:
            raise RefusalError(
                400,
                f"{path}: is no image that can be read ({error}); send a PNG, JPEG or WebP file",
            ) from error
        if width * height > self.limits.max_image_pixels:
            raise RefusalError(
                413,
                f"{path}: of sample {sample_id} has {width} x {height} pixels, one image may have"
                f" {self.limits.max_image_pixels}; send a smaller one, or start the server with"
                f" max_image_pixels={width * height}",
            )
        return loaded

    def _from_file(self, image: ImageRef, path: str) -> ImageRef:
        root = self._image_root
        if image.path is None:
            raise RefusalError(
                400,
                f"{path}: has neither data nor path; send data (base64), or a path under the"
                " server's image_root",
            )
        if root is None:
            raise RefusalError(
                403,
                f"{path}.path: this server reads no files; send data (base64), or start it with"
                " image_root=FOLDER",
            )
        try:
            # Resolved first: neither `..` nor a link leads out of the root.
            resolved = (root / image.path).resolve()
            if not resolved.is_relative_to(root):
                raise RefusalError(
                    403,
                    f"{path}.path: is outside the server's image_root; name a file inside, or send"
                    " data (base64)",
                )
            if not resolved.is_file():
                raise RefusalError(
                    400,
                    f"{path}.path: {image.path} is no file under the server's image_root; correct"
                    " it, or send data (base64)",
                )
            if resolved.stat().st_size > self.limits.max_request_bytes:
                raise RefusalError(
                    413,
                    f"{path}.path: {image.path} is larger than max_request_bytes ="
                    f" {self.limits.max_request_bytes}; send a smaller image",
                )
            return replace(image, path=resolved).with_data()
        # no permission, a name that no file can have, other bytes than the digest's
        except (OSError, ValueError) as error:
            raise RefusalError(
                400, f"{path}.path: {error}; correct it, or send data (base64)"
            ) from error
