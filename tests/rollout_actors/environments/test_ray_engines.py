"""Engines that are Ray actors, without engines: answers, failures and waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from fake_actors import create_fake_actor

from rollout_actors.environments.ray_engines import RayEngines
from shared.errors import Limit, RolloutError, UnreachableError

pytestmark = pytest.mark.ray

LIMIT = Limit(0.5, "timeouts.generate_s")
LONG = Limit(60.0, "timeouts.generate_s")


def asked(trouble: str, limit: Limit = LONG) -> Any:
    """Of the second of two engines. What takes the place of a request comes back with the engine's name."""
    actors = [create_fake_actor("actor-0"), create_fake_actor("actor-1", "generate", trouble)]
    engines = RayEngines(actors, ["actor-0", "actor-1"], limit)
    assert len(engines) == 2
    request: Any = "request"
    try:
        return asyncio.run(engines.generate(1, request))
    finally:
        for actor in actors:
            ray.kill(actor)


def test_the_engine_of_that_number_answers(ray_cluster: None) -> None:
    assert asked("") == ("actor-1", "request")


@pytest.mark.parametrize(
    ("trouble", "limit", "told"),
    [
        ("fail", LONG, "generate on actor-1: told to fail"),
        ("unreachable", LONG, "generate on actor-1: gone"),
        ("die", LONG, r"(?s)generate on actor-1: its process has ended .*; check its log and the machine's memory"),
        ("sleep", LIMIT, r"no answer from actor-1 after timeouts.generate_s = 0.5 s; check the engine's log, and whether max_new_tokens"),
    ],
)
def test_an_engine_that_fails_dies_or_is_late_is_named_with_what_to_check(ray_cluster: None, trouble: str, limit: Limit, told: str) -> None:
    with pytest.raises(RolloutError, match=told) as caught:
        asked(trouble, limit)
    assert isinstance(caught.value, UnreachableError) is (trouble == "unreachable"), "only then is another engine asked"


def test_a_cancelled_call_ends_at_once_and_the_engines_are_asked_on_the_next_event_loop(ray_cluster: None) -> None:
    actors = [create_fake_actor("actor-0"), create_fake_actor("actor-1", "generate", "sleep")]
    engines = RayEngines(actors, ["actor-0", "actor-1"], LONG)
    request: Any = "request"

    async def cancelled() -> None:
        asking = asyncio.create_task(engines.generate(1, request))
        await asyncio.sleep(0.2)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asking, 10)

    try:
        for _ in range(2):
            asyncio.run(cancelled())
            answer: Any = asyncio.run(engines.generate(0, request))
            assert answer == ("actor-0", "request")
    finally:
        for actor in actors:
            ray.kill(actor)
