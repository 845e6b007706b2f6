"""The scripted backend's latency: the rest is in `test_contract.py`."""

from __future__ import annotations

import time

from fake_server import make_request

from benchmarks.scripted_backend import ScriptedBackend


def test_a_call_takes_its_latency_and_no_requests_take_none():
    assert ScriptedBackend("scripted", lambda request: [9], latency_s=3600.0).generate([]) == []
    backend = ScriptedBackend("scripted", lambda request: [9], latency_s=0.1)
    started = time.perf_counter()
    rollouts = backend.generate([make_request(position) for position in range(600)])
    assert 0.1 <= time.perf_counter() - started < 60, "one after the other they would take a minute"
    assert all(rollout.generate_s >= 0.1 for rollout in rollouts)
