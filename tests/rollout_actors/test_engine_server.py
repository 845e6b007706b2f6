"""A real `rollmatch serve`: rollouts with images, weights from a learner, and an end that
leaves nothing.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
from engine_support import SmallLearner, small_settings
from fake_server import HERE, eventually
from process_family import is_alive, is_engine
from serve_process import OneServer, ServeProcess, serve_process

from rollout_actors.backends.rollmatch_server import ServerClient, serve_arguments
from rollout_actors.server import messages
from rollout_actors.server.token_file import find_token
from shared.errors import RolloutError, Timeout, WeightSyncError
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.phases import SyncPhase, sync_weights

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def server(
    demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeProcess]:
    with serve_process(
        serve_arguments(small_settings(demo_checkpoint), port=0), tmp_path_factory.mktemp("serve")
    ) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: ServeProcess, demo_checkpoint: Path) -> ServerClient:
    settings = small_settings(demo_checkpoint)
    return ServerClient("server-0", server.address(), index=0, expected=settings)


@pytest.fixture(scope="module")
def pool(client: ServerClient) -> Iterator[OneServer]:
    pool = OneServer(client)
    assert pool.start() == 1
    yield pool
    pool.close()


def test_a_server_has_a_token_that_its_users_runs_find(
    server: ServeProcess, pool: OneServer
) -> None:
    assert find_token(server.url)
    assert httpx.get(f"{server.url}/info/", **HERE, timeout=120).status_code == 401
    assert pool.version == 0


def test_server_mode_produces_token_ids_suitable_for_strict_alignment(
    pool: OneServer, learner: SmallLearner
) -> None:
    requests = [learner.request(position) for position in range(2)]
    for request, rollout in zip(requests, pool.generate(requests), strict=True):
        assert (
            rollout.prompt_token_ids
            == learner.logits(request.prompt_token_ids, request.images[0])[0]
        )
        assert all(isinstance(token_id, int) for token_id in rollout.response_token_ids)
        assert learner.stop not in rollout.response_token_ids
        assert rollout.logprobs is not None
        assert len(rollout.logprobs) == len(rollout.response_token_ids)


def test_health_counts_tokens_while_they_are_sampled(
    server: ServeProcess, pool: OneServer, learner: SmallLearner
) -> None:
    def told() -> messages.Health:
        return messages.read(
            messages.Health, httpx.get(f"{server.url}/health/", **HERE, timeout=120).content
        )

    requests = [learner.request(i, temperature=1.0, max_new_tokens=400) for i in range(6)]
    thread = ThreadPoolExecutor(1)

    def is_seen_under_way() -> bool:
        before, seen = told().num_tokens, set()
        working = thread.submit(pool.generate, requests)
        while not working.done():
            seen.add(told().num_tokens - before)
        num_tokens = sum(
            len(rollout.response_token_ids) + (rollout.stop_token_id is not None)
            for rollout in working.result()
        )
        at_end = messages.Health(world_size=1, num_running=0, num_tokens=before + num_tokens)
        assert told() == at_end
        return len(seen - {0, num_tokens}) > 1

    with thread:
        # Seconds of work, through which a machine may sleep that has other work.
        assert eventually(is_seen_under_way)


@pytest.mark.parametrize("phase", ["rendezvous", "wire"])
def test_a_learner_that_does_not_come_blocks_nobody_and_the_next_sync_succeeds(
    pool: OneServer, client: ServerClient, learner: SmallLearner, phase: str
) -> None:
    if phase == "rendezvous":
        learner.sender.close()  # or the group that is open already would be kept
    offer = learner.offer_weights()
    # Only the phase that waits for the learner has a limit that may be reached.
    limits = dict.fromkeys(("rendezvous", "wire"), 120.0) | {phase: 5.0}
    join = Timeout(limits["rendezvous"], "join")
    terms = replace(offer.terms, timeout_s=limits["wire"], join=join)

    async def receive() -> None:
        await client.run_sync_phase(SyncPhase.PAUSE, offer)
        for each in (SyncPhase.RENDEZVOUS, SyncPhase.WIRE):
            await client.run_sync_phase(each, replace(offer, terms=terms))

    with pytest.raises(WeightSyncError, match=f"{phase} on server-0"):
        asyncio.run(receive())
    with pytest.raises(RolloutError, match=r"sync to version \d+ .*not complete"):
        pool.generate([learner.request(0)])
    learner.sender.close()  # a sender whose broadcast failed does so itself
    sync_weights(learner, pool)
    assert pool.generate([learner.request(0)])[0].weight_version == learner.version


def test_an_engine_that_has_died_ends_its_server_with_a_message(
    demo_checkpoint: Path, tmp_path: Path
) -> None:
    guarded = small_settings(demo_checkpoint, repeat_guard=RepeatGuardSettings(8, 4, 4, 3, None))
    with serve_process(serve_arguments(guarded, port=0), tmp_path) as one:
        pool = OneServer(ServerClient("server-0", one.address(), index=0, expected=guarded))
        assert pool.start() == 1
        pool.close()
        _, *children = one.family()
        (core,) = engines_of(children)
        core.kill()
        assert one.process.wait(120) == 1
        assert re.search(r"ended \(EngineCore .*SIGKILL", one.errors.read_text())
        assert eventually(lambda: not any(child.is_running() for child in children))


def test_a_stuck_engine_ends_its_server_with_a_message(
    demo_checkpoint: Path, tmp_path: Path
) -> None:
    settings = small_settings(demo_checkpoint)
    with serve_process([*serve_arguments(settings, port=0), "stall_s=10"], tmp_path) as one:
        pool = OneServer(ServerClient("server-0", one.address(), index=0, expected=settings))
        assert pool.start() == 1
        pool.close()
        _, *children = one.family()
        (core,) = engines_of(children)
        core.suspend()
        assert one.process.wait(180) == 1
        assert re.search("sampled no token .*stall_s = 10 s", one.errors.read_text())
        assert eventually(lambda: not any(child.is_running() for child in children))


def test_a_killed_server_takes_its_engine_with_it(demo_checkpoint: Path, tmp_path: Path) -> None:
    """SIGKILL, as of a system that is out of memory: nobody is left to end the engine. Server and
    engine are started as on a GPU, by no warm server.
    """
    settings = small_settings(demo_checkpoint)
    with serve_process(serve_arguments(settings, port=0), tmp_path, python=[sys.executable]) as one:
        client = ServerClient("server-0", one.address(), index=0, expected=settings)
        assert OneServer(client).start() == 1
        _, *children = one.family()
        assert engines_of(children)
        one.process.kill()
        assert eventually(lambda: not any(map(is_alive, children)))


def test_a_signal_ends_a_server_that_is_loading_and_all_its_processes(
    demo_checkpoint: Path, tmp_path: Path
) -> None:
    with serve_process(serve_arguments(small_settings(demo_checkpoint), port=0), tmp_path) as one:
        assert eventually(lambda: engines_of(one.family()), within_s=240)
        ends_on_a_signal(one, signal.SIGINT)


def test_a_signal_ends_a_server_and_all_its_processes(
    server: ServeProcess, pool: OneServer
) -> None:
    """The module's server: last."""
    ends_on_a_signal(server, signal.SIGTERM)


def engines_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # what a start needs for a moment
            found += [process] if is_engine(" ".join(process.cmdline())) else []
    return found


def ends_on_a_signal(one: ServeProcess, number: signal.Signals) -> None:
    family = one.family()
    one.process.send_signal(number)
    assert one.process.wait(120) == 130
    assert eventually(lambda: not any(map(is_alive, family)))
    assert "Traceback" not in one.errors.read_text(), one.errors.read_text()
