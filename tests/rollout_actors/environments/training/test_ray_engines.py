"""Engines that are Ray actors, without engines: answers, failures and waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from fake_actors import create_fake_actor

from rollout_actors.environments.training.actor import RayEngines
from shared.errors import RolloutError, Timeout, UnreachableError

pytestmark = pytest.mark.ray

LIMIT = Timeout(0.5, "timeouts.generate_s")
LONG = Timeout(60.0, "timeouts.generate_s")


def asked(actors: list[Any], limit: Timeout = LONG) -> Any:
    """Of the second of two engines. What takes the place of a request comes back with the engine's
    name.
    """
    engines = RayEngines(actors, ["actor-0", "actor-1"], limit)
    assert len(engines) == 2
    request: Any = "request"
    return asyncio.run(engines.generate(1, request))


def test_the_engine_of_that_number_answers(fake_actors: list[Any]) -> None:
    assert asked(fake_actors) == ("actor-1", "request")


@pytest.mark.parametrize(
    ("trouble", "limit", "told"),
    [
        ("fail", LONG, "generate on actor-1: told to fail"),
        ("unreachable", LONG, "generate on actor-1: gone"),
        (
            "sleep",
            LIMIT,
            (
                r"no answer from actor-1 after timeouts.generate_s = 0.5 s; check the engine's log,"
                r" and whether max_new_tokens"
            ),
        ),
    ],
)
def test_an_engine_that_fails_or_is_late_is_named_with_what_to_check(
    fake_actors: list[Any], trouble: str, limit: Timeout, told: str
) -> None:
    ray.get(fake_actors[1].become.remote("generate", trouble))
    with pytest.raises(RolloutError, match=told) as caught:
        asked(fake_actors, limit)
    assert isinstance(caught.value, UnreachableError) is (trouble == "unreachable"), (
        "only then is another engine asked"
    )


def test_an_engine_that_dies_is_named_with_what_to_check(fake_actors: list[Any]) -> None:
    dies = create_fake_actor("actor-1", "generate", "die")
    with pytest.raises(
        RolloutError,
        match=(
            r"(?s)generate on actor-1: its process has ended .*; check its log and the machine's"
            r" memory"
        ),
    ) as caught:
        asked([fake_actors[0], dies])
    assert not isinstance(caught.value, UnreachableError), "no other engine is asked"


def test_a_cancelled_call_ends_at_once_and_the_engines_are_asked_on_the_next_event_loop(
    fake_actors: list[Any],
) -> None:
    ray.get(fake_actors[1].become.remote("generate", "sleep"))
    engines = RayEngines(fake_actors, ["actor-0", "actor-1"], LONG)
    request: Any = "request"

    async def cancelled() -> None:
        asking = asyncio.create_task(engines.generate(1, request))
        await asyncio.sleep(0.2)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asking, 10)

    for _ in range(2):
        asyncio.run(cancelled())
        answer: Any = asyncio.run(engines.generate(0, request))
        assert answer == ("actor-0", "request")
