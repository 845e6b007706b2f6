"""Limits of a rollout server's connections: idle time, size of the HTTP headers, open files."""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 10.0
"""Longest wait for the HTTP headers of a call, on a new connection and after an answer."""
MAX_HEAD_BYTES = 1 << 16


class PromptProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits for the time and the size of a call's headers.

    uvicorn would wait for missing headers without limit, and accept headers of any size. The body
    has its own limit (`calls.read_body`).
    """

    _timer: asyncio.TimerHandle | None = None
    _num_head_bytes: int | None = None
    """Bytes of the headers that are arriving; None: none have begun, or they are complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        had_begun = self._num_head_bytes is not None
        super().data_received(data)
        # The part that contains the start of a head may also contain the end of a body.
        if had_begun and self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._num_head_bytes = None
        self._stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # If a call arrived before the answer was complete, the server now works on it.
        if self.cycle.response_complete:
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        # Not `abort`: a slow peer may still be reading its last answer.
        self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def open_many_files() -> None:
    """Raise this process's limit of open files, and so of connections, to the system's maximum."""
    # Each connection is a file, and the usual limit of 1,024 is soon reached.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
