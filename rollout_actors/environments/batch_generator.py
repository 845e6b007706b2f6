"""Batches of rollouts, generated ahead of the one who uses them: in a thread of its own, on an
event loop of its own.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future
from typing import Any

from rollout_actors.environments.datasets import GenerateOutputs
from rollout_actors.environments.environment import Environment


class AsyncBatchGenerator:
    """`submit(number, inputs)` begins a batch, `result(number)` waits for it. Batches are generated
    one after another, in the order of their submission.

    The bound: as many batches as `max_ahead` are submitted and not yet fetched, beside the one that
    is generated for the caller to wait for. One more is refused; `result` makes room. The client is
    used on the generator's own event loop alone: give it one that no other loop uses.
    """

    def __init__(
        self,
        environment: Environment,
        client: Any,
        model: str,
        *,
        max_ahead: int = 1,
        **generate_kwargs: Any,
    ) -> None:
        """`generate_kwargs` are those of `Environment.generate`. The thread starts at once."""
        if max_ahead < 0:
            raise ValueError(f"max_ahead: must be 0 or more, got {max_ahead}")
        self._environment, self._client, self._model, self._generate_kwargs = (
            environment,
            client,
            model,
            {"use_tqdm": False, **generate_kwargs},
        )
        self.max_ahead = max_ahead
        self._batches: dict[int, Future[GenerateOutputs]] = {}
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._turn, self._closing = asyncio.Lock(), asyncio.Event()
        # A daemon: a process that forgets to close it ends all the same.
        self._thread = threading.Thread(target=self._run, name="batch-generator", daemon=True)
        self._thread.start()

    def submit(self, number: int, inputs: Any) -> None:
        """Begin a batch, or queue it behind the one that is generated. ValueError for a number that
        is in use, RuntimeError where there is no room.
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
        """Of a submitted batch, once; raises what its generation raised.

        Raises:
            ValueError: no such batch is submitted.
            TimeoutError: it is not there after `timeout_s` (None: wait for ever); it is generated
            all the same, and can be asked for again.
            RuntimeError: the generator was closed meanwhile.
        """
        if number not in self._batches:
            raise ValueError(
                f"batch {number} is not submitted; there are"
                f" {', '.join(map(str, self._batches)) or 'none'}"
            )
        batch = self._batches[number]
        try:
            outputs = batch.result(timeout_s)
        except CancelledError:
            raise RuntimeError(
                f"batch {number} was not generated: the generator is closed"
            ) from None
        except TimeoutError as error:
            if batch.done():  # the batch's own
                del self._batches[number]
                raise
            raise TimeoutError(
                f"batch {number} is not there after {timeout_s} s; look whether the endpoint"
                " answers"
            ) from error
        except Exception:
            del self._batches[number]
            raise
        del self._batches[number]
        return outputs

    def close(self, timeout_s: float = 30.0) -> None:
        """Cancel what is under way, whose rollouts clean up, and end the thread. TimeoutError where
        that takes longer.
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

    async def _generated(self, inputs: Any) -> GenerateOutputs:
        async with self._turn:
            return await self._environment.a_generate(
                inputs, self._client, self._model, **self._generate_kwargs
            )

    def _run(self) -> None:
        # Cancels what is left, and waits for it.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._closing.wait())
