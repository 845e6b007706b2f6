"""The client that asks a run's own engines, tokens in and tokens out:
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
    """The run's engines, in order (`training.actor.RayEngines`, which this may not import)."""

    def __len__(self) -> int: ...

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        """Ask one engine, within a time limit of its own. Cancelling this aborts the request.
        UnreachableError: another engine may be asked the same.
        """
        ...


class EngineClient:
    """Routes the calls of one step's rollouts to the engines.

    All calls of a rollout go to the engine `position % len(engines)`, which still has its earlier
    turns in the prefix cache. While an engine cannot be reached the next one is asked, with the
    same seed. A step is one call of `Environment.generate`: another one with the same client
    samples with the same seeds. The client may be used on several event loops.
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
            max_under_way: most requests that one engine has at a time, from one event loop. The
                others wait here.
            max_images: most images of one prompt; None: any number.
            name: whose error too many images are (the environment actor's).
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
        # A semaphore belongs to the event loop that first waits for it, and callers may run one
        # after another.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, list[asyncio.Semaphore]] = (
            WeakKeyDictionary()
        )
        self._failure: asyncio.Future[None] | None = None

    def conversation(
        self, state: State, *, of: Fields | None = None, path: str = ""
    ) -> Conversation:
        """Return a client for the calls of this rollout. Its seeds follow from the `position` of
        its input; rollouts without one are numbered as they begin.

        Args:
            of: the input of the outermost rollout in which this one is begun; None: its own.
            path: its path there, so that it has seeds of its own.
        """
        number = next(self._num_begun)
        position = (state.get("input", {}) if of is None else of).get("position")
        position = number if position is None else int(position)
        sample_id = str(state.get("example_id", position))
        key = RolloutKey(self._run_seed, self._step, position, sample_id, path)
        calls = self._calls.setdefault(position, {})
        return Conversation(key, self._settings, self.generate, calls)

    def calls(self, position: int) -> tuple[ModelCall, ...]:
        """Return the calls of the rollout of this position, by path and turn."""
        calls = self._calls.get(position, {})
        return tuple(calls[key] for key in sorted(calls))

    @property
    def chat(self) -> NoReturn:
        raise AttributeError(
            "EngineClient has to know of which rollout a call is; call"
            " `self.get_model_response(client, model, messages, ...)` instead"
        )

    completions = chat

    async def generate(self, request: RolloutRequest) -> Rollout | None:
        """Ask the rollout's own engine, and where that cannot be reached, the next ones.

        Returns:
            The rollout; None where its images make the prompt too long for the engine.

        Raises:
            RolloutError: an engine failed, or a prompt shows more images than it may.
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
            # By position: the same engine in every run, whatever order rollouts begin in.
            engine = (request.position + num_unreached) % len(self._engines)
            try:
                rollout = await self._ask(engine, request)
                # Prompts with images, which the engine expands, the learner compares
                # (`learner.segments`).
                if not request.images and rollout.prompt_token_ids != request.prompt_token_ids:
                    raise RolloutError(
                        f"answered another prompt than the one of example {request.sample_id};"
                        " engines must have the tokenizer of model.path",
                        actor=rollout.actor,
                        phase="check",
                    )
                return rollout
            except UnreachableError as error:
                if num_unreached + 1 == len(self._engines):
                    self._failed(error)
                    raise
                _LOGGER.warning(
                    "%s; the next engine is asked for sample %s", error, request.sample_id
                )
            except Exception as error:  # an engine that fails unforeseen has failed too
                is_refusal = isinstance(error, RolloutError) and says_overlong(error.message)
                if request.images and is_refusal:
                    return None
                self._failed(error)
                raise
        raise AssertionError("there is an engine")

    async def _ask(self, engine: int, request: RolloutRequest) -> Rollout:
        loop = asyncio.get_running_loop()
        # One list for each event loop: the bound holds in each of them, not over all.
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
        """Await `work`, which makes rollouts, but end it when an engine fails.

        As a rollout's own error the failure would be data, and a dead engine would teach.

        Raises:
            Exception: what an engine failed with, mostly a RolloutError, once all rollouts have
                cleaned up.
        """
        failure = asyncio.get_running_loop().create_future()
        self._failure = failure
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                # For as long as they clean up; the driver's limit of the round bounds it.
                await asyncio.wait((task,))
        if failure.done():
            if not task.cancelled():
                task.exception()  # looked at, so that asyncio does not complain
            failure.result()
        return task.result()
