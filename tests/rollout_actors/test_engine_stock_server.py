"""A real stock `vllm serve`: rollouts with images, weights from a learner, and what it refuses."""

from __future__ import annotations

import asyncio
import io
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from backend_support import what_was_said
from engine_support import EnginePool, SmallLearner, small_settings
from fake_server import eventually
from PIL import Image
from serve_process import OneServer
from stock_process import StockProcess, stock_process

from rollout_actors.backends.http import HttpClient
from rollout_actors.backends.stock_server import StockClient, StockRoutes
from rollout_actors.engine.settings import EngineSettings
from shared.errors import RolloutError, WeightSyncError
from shared.records import ImageRef
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.phases import sync_weights
from shared.weight_sync.transports import TransportKind

pytestmark = [pytest.mark.engine, pytest.mark.long]

GUARD = RepeatGuardSettings(
    min_new_tokens=40,
    max_consecutive_token_repeats=4,
    ngram_size=4,
    ngram_repeats=3,
    max_object_keys=None,
)
"""Says nothing about responses of 32 tokens."""
VISION_TENSOR = "model.visual.blocks.1.attn.proj.weight"


@pytest.fixture(scope="module")
def settings(demo_checkpoint: Path) -> EngineSettings:
    return small_settings(demo_checkpoint, repeat_guard=GUARD)


@pytest.fixture(scope="module")
def server(
    settings: EngineSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StockProcess]:
    with stock_process(settings, tmp_path_factory.mktemp("stock")) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: StockProcess, settings: EngineSettings) -> StockClient:
    return StockClient("server-0", server.address(), index=0, expected=settings)


@pytest.fixture(scope="module")
def routes(server: StockProcess) -> StockRoutes:
    """To the server, beside the client's."""
    return StockRoutes(HttpClient("server-0", server.address()), run="none")


@pytest.fixture(scope="module")
def pool(client: StockClient) -> Iterator[OneServer]:
    pool = OneServer(client)
    assert pool.start() == 1
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def both(
    pool: OneServer, engine_pool: EnginePool, learner: SmallLearner, demo_checkpoint: Path
) -> SmallLearner:
    """Server and actors serve the same weights, which are this learner's."""
    learner.learn(71)
    sync_weights(learner, pool)
    engine_pool.learn(demo_checkpoint, 71)
    return learner


def test_a_server_that_nobody_sent_weights_serves_its_checkpoint(
    pool: OneServer, learner: SmallLearner
) -> None:
    request = learner.request(0)
    (rollout,) = pool.generate([request])
    assert (rollout.response_token_ids, rollout.weight_version) == (learner.greedy(request)[0], 0)


def test_the_server_counts_the_tokens_that_it_samples(
    routes: StockRoutes, pool: OneServer, learner: SmallLearner
) -> None:
    before = asyncio.run(routes.num_tokens())
    assert before is not None
    (rollout,) = pool.generate([learner.request(0, max_new_tokens=32)])
    num_tokens = len(rollout.response_token_ids) + (rollout.stop_token_id is not None)
    assert eventually(lambda: asyncio.run(routes.num_tokens()) == before + num_tokens)


@pytest.mark.parametrize("kind", ["transparent", "turned", "grey"])
def test_the_server_sees_the_pixels_that_an_actor_sees(
    pool: OneServer, engine_pool: EnginePool, both: SmallLearner, kind: str
) -> None:
    request = both.request(0, max_new_tokens=32)
    request = replace(request, images=(odd_image(request.images[0], kind),))
    assert what_was_said(pool.generate([request])) == what_was_said(engine_pool.generate([request]))


def test_after_a_load_that_failed_another_run_can_take_the_server_and_so_can_this_one(
    pool: OneServer,
    routes: StockRoutes,
    server: StockProcess,
    settings: EngineSettings,
    learner: SmallLearner,
) -> None:
    request = learner.request(0)
    asyncio.run(routes.collective_rpc("arm", args=("fail", VISION_TENSOR)))
    with pytest.raises(WeightSyncError, match=r"wire on server-0.*told to fail"):
        sync_weights(learner, pool)
    another = OneServer(StockClient("server-0", server.address(), index=0, expected=settings))
    assert another.start() == 1
    with pytest.raises(RolloutError, match=r"serves no rollouts: .*\(rollmatch-unverified\)"):
        another.generate([request])
    for one in (another, pool):
        learner.sender.close()
        sync_weights(learner, one)
        assert one.generate([request])[0].response_token_ids == learner.greedy(request)[0]
    with pytest.raises(RolloutError, match="was sampled by weights labelled"):
        another.generate([request])
    another.close()


def test_a_cancelled_share_ends_in_the_server_too(
    pool: OneServer,
    client: StockClient,
    routes: StockRoutes,
    server: StockProcess,
    learner: SmallLearner,
) -> None:
    num_tokens = 400
    # Half a minute's work, of which a stop of some seconds leaves enough to cancel.
    requests = [
        learner.request(position, temperature=1.0, max_new_tokens=num_tokens)
        for position in range(48)
    ]
    requests = [
        replace(request, decode=replace(request.decode, stop_token_ids=())) for request in requests
    ]

    def generated() -> float:
        with urllib.request.urlopen(f"{server.address().base_url}/metrics", timeout=120) as metrics:
            lines = metrics.read().decode().splitlines()
        counts = [line for line in lines if line.startswith("vllm:generation_tokens_total")]
        return sum(float(line.rpartition(" ")[2]) for line in counts)

    async def cancel_when_it_is_under_way() -> None:
        share = asyncio.create_task(client.generate(requests))
        while await asyncio.to_thread(generated) == before:
            assert not share.done()
        share.cancel()
        await routes.pause_generation(mode="wait", clear_cache=False)
        await routes.resume_generation()

    before = generated()
    asyncio.run(asyncio.wait_for(cancel_when_it_is_under_way(), 240))
    assert 0 < generated() - before < len(requests) * num_tokens


def test_a_server_that_was_started_otherwise_is_refused_with_every_argument_that_differs(
    server: StockProcess, settings: EngineSettings
) -> None:
    wanted = {"max_model_len": 1024, "max_num_seqs": 64, "max_images_per_prompt": 2}
    expected = replace(settings, dtype="bfloat16", transport=TransportKind.NCCL, **wanted)
    client = StockClient("server-0", server.address(), index=0, expected=expected)
    with pytest.raises(RolloutError) as caught:
        asyncio.run(client.start())
    for argument in (
        "--dtype bfloat16",
        "--max-model-len 1024",
        "--max-num-seqs 64",
        "--limit-mm-per-prompt",
        "--weight-transfer-config",
    ):
        # The last sentence is a command of all arguments.
        assert argument in caught.value.message.partition("A suitable command:")[0]


def test_a_signal_ends_the_server_and_leaves_no_process(
    server: StockProcess, pool: OneServer, learner: SmallLearner
) -> None:
    """The module's server: last."""
    family = server.family()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 0
    assert eventually(lambda: not any(member.is_running() for member in family))
    with pytest.raises(RolloutError, match=f"{server.url} failed 2 times"):
        pool.generate([learner.request(0)])


def odd_image(image: ImageRef, kind: str) -> ImageRef:
    """The same image in a form that the server itself would read otherwise."""
    assert image.data is not None
    picture = Image.open(io.BytesIO(image.data))
    buffer = io.BytesIO()
    if kind == "transparent":
        picture.putalpha(64)
        picture.save(buffer, "PNG")
    elif kind == "grey":
        picture.convert("L").save(buffer, "PNG")
    else:
        exif = Image.Exif()
        exif[0x0112] = 6
        picture.save(buffer, "JPEG", exif=exif)
    return replace(image, data=buffer.getvalue())
