"""What becomes of rollouts under way when a run ends: each cleans up, and then the environment is
torn down (spec: trajectories, 5). No Ray here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sandboxes_environment import noted
from scripted_engines import decode_settings, demo_tokenizer

from rollout_actors.environments.training import actor as environment_actor
from rollout_actors.environments.training.actor import EnvironmentActor
from rollout_actors.environments.training.runner import RunnerSettings
from shared.errors import RolloutError
from shared.protocols import CLOSED_S
from shared.sent_requests import SentRequests
from shared.trajectory import EnvironmentRequest, ExampleGroup

pytestmark = pytest.mark.slow

OPENED = [f"opened {position}" for position in range(4)]
SHUT = [f"shut {position}" for position in range(4)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def actor(tokenizer_folder: Path, log: Path, collector: None) -> Callable[..., EnvironmentActor]:
    """Before one engine, which its rollouts never come to ask."""

    def make(**args: Any) -> EnvironmentActor:
        settings = RunnerSettings(
            "sandboxes_environment", str(tokenizer_folder), 512, 8, {"log": str(log), **args}
        )
        return EnvironmentActor("environment-0", settings, [None], ["rollout-actor-0"], None)

    return make


def requests() -> SentRequests:
    decode = decode_settings(demo_tokenizer())
    groups = [ExampleGroup(example, range(2 * example, 2 * example + 2)) for example in range(2)]
    return SentRequests(tuple(EnvironmentRequest(3, (group,), decode, 7) for group in groups), {})


async def with_rollouts_under_way(actor: EnvironmentActor, log: Path) -> asyncio.Task[Any]:
    await actor.start()
    round_ = asyncio.create_task(actor.generate(requests()))
    async with asyncio.timeout(30):
        while len(noted(log)) < len(OPENED):
            await asyncio.sleep(0.01)
    return round_


def test_when_an_actor_is_closed_its_rollouts_clean_up_before_the_teardown(
    actor: Callable[..., EnvironmentActor], log: Path
) -> None:
    async def ended() -> BaseException | None:
        one = actor()
        round_ = await with_rollouts_under_way(one, log)
        await one.close()
        await asyncio.wait([round_], timeout=60)
        return round_.exception()

    error = asyncio.run(ended())
    assert isinstance(error, RolloutError)
    assert (error.actor, error.phase) == ("environment-0", "generate")
    *before, last = noted(log)
    assert (sorted(before[:4]), sorted(before[4:]), last) == (OPENED, SHUT, "torn down")


def test_a_cleanup_that_hangs_is_told_and_does_not_keep_the_environment_from_its_teardown(
    actor: Callable[..., EnvironmentActor],
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert environment_actor.CLEANUP_S <= CLOSED_S / 2, "teardown has to have time too"
    monkeypatch.setattr(environment_actor, "CLEANUP_S", 0.3)

    async def close_s() -> float:
        one = actor(takes_s=4)
        round_ = await with_rollouts_under_way(one, log)
        began_s = time.monotonic()
        await one.close()
        took_s = time.monotonic() - began_s
        # Of this process others want to go on.
        await asyncio.wait([round_])
        assert isinstance(round_.exception(), RolloutError)
        return took_s

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(close_s()) >= 0.3
    assert noted(log)[4] == "torn down"
    assert "still clean up after 0.3 s" in caplog.text


def test_a_round_that_is_cancelled_itself_is_cancelled_and_cleans_up(
    actor: Callable[..., EnvironmentActor], log: Path
) -> None:
    async def ended() -> bool:
        one = actor()
        round_ = await with_rollouts_under_way(one, log)
        round_.cancel()
        await asyncio.wait([round_], timeout=60)
        await one.close()
        return round_.cancelled()

    assert asyncio.run(ended())
    assert sorted(noted(log)[4:-1]) == SHUT


def test_an_actor_that_has_not_started_has_nothing_to_close(
    actor: Callable[..., EnvironmentActor], log: Path
) -> None:
    asyncio.run(actor().close())
    assert not log.exists()
