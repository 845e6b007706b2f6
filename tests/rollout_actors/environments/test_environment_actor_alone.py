"""How an environment actor starts, asks the run's engines and is torn down, as an object of this
process: only engines are Ray actors here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from scripted_engine_actor import create_scripted_actor
from scripted_engines import decode_settings, demo_tokenizer

from rollout_actors.environments.training.actor import EnvironmentActor
from rollout_actors.environments.training.runner import RunnerSettings
from shared.errors import RolloutError, Timeout
from shared.sent_requests import SentRequests
from shared.trajectory import EnvironmentRequest, ExampleGroup

pytestmark = pytest.mark.slow

MakeActor = Callable[..., EnvironmentActor]


@pytest.fixture
def make_actor(tokenizer_folder: Path, collector: None) -> MakeActor:
    """The first, before engines that it does not come to ask."""

    def make(**changes: Any) -> EnvironmentActor:
        settings = {
            "env_id": "runner_environment",
            "model_path": str(tokenizer_folder),
            "max_model_len": 512,
            "max_under_way": 8,
        }
        return EnvironmentActor(
            "environment-0", RunnerSettings(**settings | changes), [None], ["rollout-actor-0"], None
        )

    return make


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"env_id": "runner_enviroment"},
            "start on environment-0: no environment 'runner_enviroment'",
        ),
        ({"env_args": {"num_row": 3}}, "start on environment-0: .*num_row"),
    ],
)
def test_an_environment_that_cannot_start_is_told_with_its_actor(
    make_actor: MakeActor, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(RolloutError, match=told) as caught:
        asyncio.run(make_actor(**changes).start())
    assert caught.value.phase == "start"


def test_relative_paths_of_an_environment_begin_where_the_command_was_given(
    make_actor: MakeActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path.cwd())  # which is undone at the end
    actor = make_actor(env_args={"mark": "torn down"}, working_dir=str(tmp_path))

    async def start_and_end() -> None:
        await actor.start()
        await actor.close()

    asyncio.run(start_and_end())
    assert (tmp_path / "torn down").exists()


@pytest.mark.parametrize("trouble", ["", "teardown"])
def test_at_the_end_environments_are_torn_down_whatever_one_of_them_raises(
    make_actor: MakeActor, tmp_path: Path, trouble: str
) -> None:
    mark = tmp_path / "torn down"
    actor = make_actor(env_args={"trouble": trouble, "mark": str(mark)})

    async def start_and_end() -> None:
        await actor.start()
        assert not mark.exists()
        try:
            await actor.close()
        except ZeroDivisionError:
            assert trouble == "teardown"

    asyncio.run(start_and_end())
    assert mark.exists()


@pytest.mark.ray
def test_an_engine_that_dies_ends_the_round_with_the_engines_name(
    ray_cluster: None, tokenizer_folder: Path, collector: None
) -> None:
    """No rollout is blamed for it."""
    words = [demo_tokenizer().encode("xo", add_special_tokens=False)]
    engines = [create_scripted_actor(0, words), create_scripted_actor(1, words, dies_at=3)]
    settings = RunnerSettings("runner_environment", str(tokenizer_folder), 512, 8)
    actor = EnvironmentActor(
        "environment-0",
        settings,
        engines,
        ["rollout-actor-0", "rollout-actor-1"],
        Timeout(60.0, "timeouts.generate_s"),
    )
    decode = decode_settings(demo_tokenizer(), max_new_tokens=16)
    groups = [ExampleGroup(example, range(2 * example, 2 * example + 2)) for example in range(2)]
    requests = SentRequests(
        tuple(EnvironmentRequest(3, (group,), decode, 7) for group in groups), {}
    )

    async def round_() -> None:
        await actor.start()
        try:
            await actor.generate(requests)
        finally:
            await actor.close()

    with pytest.raises(
        RolloutError, match="generate on rollout-actor-1: its process has ended"
    ) as caught:
        asyncio.run(round_())
    assert caught.value.actor == "rollout-actor-1"
    for engine in engines:
        ray.kill(engine)
