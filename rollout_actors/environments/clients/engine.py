"""The client that sends model calls to a run's own engines, tokens in and tokens out:
`Environment.generate(..., client=EngineClient(...))`.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import count
from typing import NoReturn, Protocol, TypeVar
from weakref import WeakKeyDictionary

from rollout_actors.environments.clients.conversation import (
    Conversation,
    ConversationSettings,
    RolloutKey,
)
from rollout_actors.environments.clients.openai import says_overlong
from rollout_actors.environments.concurrency import Work, waiting
from rollout_actors.environments.types import Fields, State
from shared.errors import RolloutError, UnreachableError
from shared.records import ImageRef
from shared.rollouts import Rollout, RolloutRequest
from shared.trajectory import ModelCall

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


class Engines(Protocol):
    """The engines that a run's environments call: rollout actors, or the engine in this process."""

    def __len__(self) -> int: ...

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        """Generate one rollout by the engine with this index. Cancelling aborts the request.

        Raises UnreachableError if the engine is lost, and another engine may get the request.
        """
        ...


class EngineClient:
    """The client that sends the model calls of one training step's rollouts to the run's engines.

    All calls of a rollout go to the engine `position % len(engines)`, which has its earlier turns
    in the prefix cache. If an engine cannot be reached, the next one gets the request, with the
    same seed. Seeds derive from the positions of rollouts in the step, so a second rollout with the
    same position and client has the same seeds. The client may be used on several event loops.
    """

    def __init__(
        self,
        engines: Engines,
        settings: ConversationSettings,
        run_seed: int,
        step: int,
        *,
        max_under_way: int = 64,
        max_images: int | None = None,
        name: str = "",
    ) -> None:
        """
        Args:
            max_under_way: limit of concurrent requests to one engine, from one event loop. Further
                requests wait in this process.
            max_images: limit of images in one prompt; None: no limit.
            name: name of the environment actor, for the error about too many images.
        """
        assert max_under_way >= 1, max_under_way
        assert len(engines), "a run has engines"
        self._engines = engines
        self._settings = settings
        self._run_seed = run_seed
        self._step = step
        self._max_under_way = max_under_way
        self._max_images = max_images
        self._name = name
        self.sent_images: dict[str, ImageRef] = {}
        """All images that were in a prompt, by their hashes (`sha256`)."""
        self._num_begun = count()
        self._calls: dict[int, dict[tuple[str, int], ModelCall]] = {}
        # A semaphore belongs to the event loop that first waits for it, and several event loops may
        # be used one after the other.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, list[asyncio.Semaphore]] = (
            WeakKeyDictionary()
        )
        self._failure: asyncio.Future[None] | None = None

    def conversation(
        self, state: State, *, of: Fields | None = None, path: str = ""
    ) -> Conversation:
        """Return a client for the model calls of this rollout only.

        The seeds of the calls derive from the `position` of the rollout's input. Rollouts without a
        position are numbered in the order of their start.

        Args:
            of: the input of the outermost rollout, if this rollout was started inside it; None:
                this rollout is the outermost.
            path: this rollout's path inside the outermost one, so that it has its own seeds.
        """
        number = next(self._num_begun)
        position = (state.get("input", {}) if of is None else of).get("position")
        position = number if position is None else int(position)
        sample_id = str(state.get("example_id", position))
        key = RolloutKey(self._run_seed, self._step, position, sample_id, path)
        calls = self._calls.setdefault(position, {})
        return Conversation(key, self._settings, self.generate, calls)

    def calls(self, position: int) -> tuple[ModelCall, ...]:
        """Return the model calls of the rollout at this position of the step, in order."""
        calls = self._calls.get(position, {})
        return tuple(calls[key] for key in sorted(calls))

    @property
    def chat(self) -> NoReturn:
        raise AttributeError(
            "EngineClient must know which rollout a call belongs to; call"
            " `self.get_model_response(client, model, messages, ...)` instead"
        )

    completions = chat

    async def generate(self, request: RolloutRequest) -> Rollout | None:
        """Send a request to the engine of its position; if that is unreachable, to the next engine.

        Returns the engine's answer; None if its images make the prompt too long for the engine.

        Raises RolloutError if an engine failed, or the prompt has too many images.
        """
        number = len(request.images)
        if self._max_images is not None and number > self._max_images:
            message = (
                f"example {request.sample_id} shows {number} image{'s' * (number > 1)} in a prompt,"
                f" and environment.max_images_per_prompt is {self._max_images}; set it to {number}"
                " or more"
            )
            raise self._failed(RolloutError(message, actor=self._name, phase="environment"))
        self.sent_images.update((image.sha256, image) for image in request.images)
        for num_unreached in range(len(self._engines)):
            # By position, so that every run uses the same engine, whatever order rollouts begin in.
            engine = (request.position + num_unreached) % len(self._engines)
            try:
                rollout = await self._ask(engine, request)
                # The engine expands prompts with images; the learner compares those
                # (`learner.segments`).
                if not request.images and rollout.prompt_token_ids != request.prompt_token_ids:
                    raise RolloutError(
                        "the engine answered another prompt than that of example"
                        f" {request.sample_id}; engines must have the tokenizer of model.path",
                        actor=rollout.actor,
                        phase="check",
                    )
                return rollout
            except UnreachableError as error:
                if num_unreached + 1 == len(self._engines):
                    self._failed(error)
                    raise
                _LOGGER.warning(
                    "%s; the next engine gets the request for sample %s", error, request.sample_id
                )
            except Exception as error:  # an unexpected error is a failure of the engine too
                is_refusal = isinstance(error, RolloutError) and says_overlong(error.message)
                if request.images and is_refusal:
                    return None
                self._failed(error)
                raise
        raise AssertionError("a run has engines")

    async def _ask(self, engine: int, request: RolloutRequest) -> Rollout:
        loop = asyncio.get_running_loop()
        # One list for each event loop: the limit holds in each of them, not over all.
        if loop not in self._slots:
            self._slots[loop] = [
                asyncio.Semaphore(self._max_under_way) for _ in range(len(self._engines))
            ]
        slot = self._slots[loop][engine]
        with waiting():
            await slot.acquire()
        try:
            return await self._engines.generate(engine, request)
        finally:
            slot.release()

    def _failed(self, error: Exception) -> Exception:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)
        return error

    async def unless_an_engine_fails(self, work: Work[T]) -> T:
        """Await `work`, which plays rollouts with this client, but cancel it if an engine fails.

        Otherwise the failure would count as the rollout's own error, and the run would train on it.

        Raises the engine's error, mostly a RolloutError, after all rollouts have cleaned up.
        """
        failure = asyncio.get_running_loop().create_future()
        self._failure = failure
        task = asyncio.ensure_future(work)
        for future in (failure, task):
            # If this call is itself cancelled, nothing else retrieves it, and asyncio warns.
            future.add_done_callback(lambda one: one.cancelled() or one.exception())
        try:
            await asyncio.wait((task, failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                # Until they have cleaned up; the driver's limit of the round bounds it.
                await asyncio.wait((task,))
        if failure.done():
            failure.result()
        return task.result()
