"""How an environment actor starts, and what becomes of its rollouts when the run ends, as an object
of this process (spec: trajectories, 5): only engines are Ray actors here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import serving
from fake_teacher import FakeTeacher
from sandboxes_environment import noted
from scripted_engines import decode_settings, demo_tokenizer

from rollout_actors.environments.training import rounds
from rollout_actors.environments.training.actor import EnvironmentActor
from rollout_actors.environments.training.runner import RunnerSettings
from rollout_actors.environments.training.teacher import TeacherSettings
from shared.config.algorithm import TeacherSection
from shared.errors import RolloutError
from shared.protocols import CLOSED_S
from shared.sent_requests import SentRequests
from shared.trajectory import EnvironmentRequest, ExampleGroup

pytestmark = pytest.mark.slow

MakeActor = Callable[..., EnvironmentActor]
OPENED = [f"opened {position}" for position in range(4)]
SHUT = [f"shut {position}" for position in range(4)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def make_actor(tokenizer_folder: Path, collector: None) -> MakeActor:
    """Make an actor before one engine, which its rollouts never come to ask."""

    def make(env_id: str = "runner_environment", **changes: Any) -> EnvironmentActor:
        settings = RunnerSettings(env_id, str(tokenizer_folder), 512, 8, **changes)
        return EnvironmentActor("environment-0", settings, [None], ["rollout-actor-0"], None)

    return make


def requests() -> SentRequests:
    decode = decode_settings(demo_tokenizer(), max_new_tokens=16)
    groups = [ExampleGroup(example, range(2 * example, 2 * example + 2)) for example in range(2)]
    return SentRequests(tuple(EnvironmentRequest(3, (group,), decode, 7) for group in groups), {})


def test_an_environment_that_cannot_start_is_told_with_its_actor(make_actor: MakeActor) -> None:
    problem = "start on environment-0: no environment 'runner_enviroment'"
    with pytest.raises(RolloutError, match=problem) as caught:
        asyncio.run(make_actor("runner_enviroment").start())
    assert caught.value.phase == "start"


def test_a_teacher_that_does_not_suit_ends_the_start(make_actor: MakeActor) -> None:
    with serving(FakeTeacher(demo_tokenizer(), max_model_len=512).app()) as url:
        section = TeacherSection(base_url=url, model="teacher")
        actor = make_actor(teacher=TeacherSettings.from_section(section))
        with pytest.raises(RolloutError, match=r"start on teacher: .* accepts 512 tokens"):
            asyncio.run(actor.start())


# Its rollouts


def sandboxes(make_actor: MakeActor, log: Path, **args: Any) -> EnvironmentActor:
    return make_actor("sandboxes_environment", env_args={"log": str(log), **args})


async def with_rollouts_under_way(actor: EnvironmentActor, log: Path) -> asyncio.Task[Any]:
    await actor.start()
    round_ = asyncio.create_task(actor.generate(requests()))
    async with asyncio.timeout(60):
        while len(noted(log)) < len(OPENED):
            await asyncio.sleep(0.01)
    return round_


def test_a_round_that_is_cancelled_itself_is_cancelled_and_cleans_up(
    make_actor: MakeActor, log: Path
) -> None:
    async def ended() -> bool:
        one = sandboxes(make_actor, log)
        round_ = await with_rollouts_under_way(one, log)
        round_.cancel()
        await asyncio.wait([round_], timeout=240)
        await one.close()
        return round_.cancelled()

    assert asyncio.run(ended())
    assert sorted(noted(log)[4:-1]) == SHUT


def test_a_cleanup_that_hangs_is_told_and_does_not_keep_the_environment_from_its_teardown(
    make_actor: MakeActor,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert rounds.CLEANUP_S <= CLOSED_S / 2, "teardown has to have time too"
    monkeypatch.setattr(rounds, "CLEANUP_S", 0.3)

    async def close_s() -> float:
        may_end = log.with_name("may end")
        one = sandboxes(make_actor, log, waits_for=str(may_end))
        round_ = await with_rollouts_under_way(one, log)
        began_s = time.monotonic()
        await one.close()
        took_s = time.monotonic() - began_s
        may_end.touch()
        # Of this process others want to go on.
        await asyncio.wait([round_])
        assert isinstance(round_.exception(), RolloutError)
        return took_s

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(close_s()) >= 0.3
    assert noted(log)[4] == "torn down"
    assert "still cleaning up after 0.3 s" in caplog.text
