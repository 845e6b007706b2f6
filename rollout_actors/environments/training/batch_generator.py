"""Batches of rollouts, generated ahead of their use, in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future
from typing import Any

from rollout_actors.environments.datasets import GenerateOutputs, Inputs
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.types import Client


class AsyncBatchGenerator:
    """Generates batches of an environment's rollouts in a thread, while the caller does other work.

    `submit(number, inputs)` starts a batch, and `result(number)` waits for it. Batches are
    generated one after another, in the order of their submission. At most `max_ahead` batches may
    be submitted and not fetched, in addition to the one that the caller waits for. A further
    `submit` is refused until `result` has returned a batch. The client must not be used on another
    event loop.
    """

    def __init__(
        self,
        environment: Environment,
        client: Client,
        model: str,
        *,
        max_ahead: int = 1,
        **generate_kwargs: Any,
    ) -> None:
        """Start the thread. `generate_kwargs`: further arguments of `Environment.generate`.

        `max_ahead`: how many batches may be submitted in addition to the one that the caller waits
        for.
        """
        if max_ahead < 0:
            raise ValueError(f"max_ahead: must be 0 or more, got {max_ahead}")
        self._environment = environment
        self._client = client
        self._model = model
        self._generate_kwargs = {"use_tqdm": False, **generate_kwargs}
        self.max_ahead = max_ahead
        self._batches: dict[int, Future[GenerateOutputs]] = {}
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._turn = asyncio.Lock()
        self._closing = asyncio.Event()
        # A daemon, so that the process ends even if `close` is not called.
        self._thread = threading.Thread(target=self._run, name="batch-generator", daemon=True)
        self._thread.start()

    def submit(self, number: int, inputs: Inputs) -> None:
        """Start a batch of rollouts, or queue it after the batch that is being generated.

        `inputs` are as in `Environment.generate`, and `number` is the batch's name for `result`.

        Raises:
            ValueError: the number is in use.
            RuntimeError: too many batches are submitted, or the generator is closed.
        """
        if self._is_closed:
            raise RuntimeError(f"batch {number}: the generator is closed")
        if number in self._batches:
            raise ValueError(f"batch {number} is submitted already; fetch its result first")
        if len(self._batches) > self.max_ahead:
            raise RuntimeError(
                f"batch {number}: {len(self._batches)} are submitted and max_ahead is"
                f" {self.max_ahead}; fetch the result of {min(self._batches)} first"
            )
        self._batches[number] = asyncio.run_coroutine_threadsafe(
            self._generated(inputs), self._loop
        )

    def result(self, number: int, timeout_s: float | None = None) -> GenerateOutputs:
        """Wait for a submitted batch and return it. A batch can be returned only once.

        Errors of its generation are raised.

        Raises:
            ValueError: no batch with this number is submitted.
            TimeoutError: it is not finished after `timeout_s` (None: no limit). Its generation
                continues, and `result` may be called again.
            RuntimeError: the generator was closed meanwhile.
        """
        if number not in self._batches:
            known = ", ".join(map(str, self._batches)) or "none"
            raise ValueError(f"batch {number} is not submitted; there are {known}")
        batch = self._batches[number]
        try:
            return batch.result(timeout_s)
        except CancelledError:
            text = f"batch {number} was not generated: the generator is closed"
            raise RuntimeError(text) from None
        except TimeoutError as error:
            if batch.done():  # the batch itself raised it
                raise
            raise TimeoutError(
                f"batch {number} is not finished after {timeout_s} s; check that the endpoint"
                " answers"
            ) from error
        finally:
            if batch.done() and not batch.cancelled():
                del self._batches[number]

    def close(self, timeout_s: float = 30.0) -> None:
        """Cancel all batches, clean up their rollouts, and end the thread.

        Raises TimeoutError if this takes longer than `timeout_s`.
        """
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the batch generator did not end within {timeout_s} s; look for a cleanup or a"
                " reward function that hangs"
            )

    def __enter__(self) -> AsyncBatchGenerator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _generated(self, inputs: Inputs) -> GenerateOutputs:
        async with self._turn:
            return await self._environment.a_generate(
                inputs, self._client, self._model, **self._generate_kwargs
            )

    def _run(self) -> None:
        """Run the event loop until `close`. The runner cancels the remaining tasks and waits."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._closing.wait())
