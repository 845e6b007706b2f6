"""The client shares out, keeps order, waits for nobody forever, and names the actor that is
late."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import ray
from fake_actors import EchoEngine, Sender, create_fake_actor
from fake_server import make_request
from patience import LONG_S, only_the_last_is_late
from ray.exceptions import OwnerDiedError, RayTaskError
from rich.console import Console

from launch.processes.fleet import Fleet, RolloutTimeouts
from launch.processes.rollout_client import RolloutClient
from launch.processes.rounds import RoundSize
from launch.run_folder.console import Wait
from rollout_actors.engine.actor import EngineActor
from rollout_actors.engine.ray_calls import RayCall, wait_for_all
from shared.config.job import TimeoutsSection
from shared.errors import ConfigError, LearnerError, RecordError, RolloutError, WeightSyncError
from shared.protocols import CLOSED_S, PerRank
from shared.records import ImageRef
from shared.rollouts import WeightOffer
from shared.sent_requests import PictureShelf, RequestRef
from shared.weight_sync.phases import SyncPhase

pytestmark = pytest.mark.ray

MakeClient = Callable[..., RolloutClient]


def timeouts(limit_s: float = LONG_S) -> RolloutTimeouts:
    return RolloutTimeouts.for_actors(
        TimeoutsSection(start_s=limit_s, generate_s=limit_s, sync_phase_s=limit_s)
    )


@pytest.fixture
def make_client(fake_actors: list[Any]) -> MakeClient:
    """A client of a good actor-0 and an actor-1 with the given trouble. They are not its own, and
    so it is not closed.
    """

    def make(
        phase: str = "",
        trouble: str = "",
        *,
        limit_s: float = LONG_S,
        size: RoundSize = RoundSize(2),  # noqa: B008
        **options: Any,
    ) -> RolloutClient:
        ray.get(fake_actors[1].become.remote(phase, trouble))
        return RolloutClient(
            Fleet(
                fake_actors,
                ["actor-0", "actor-1"],
                timeouts(limit_s),
                **{"devices": (1, 1), **options},
            ),
            size,
        )

    return make


def own_client(
    *troubles: tuple[str, str], limit_s: float = LONG_S, closed_s: float = 30.0
) -> RolloutClient:
    """A started client of an actor of its own for each of these phases and troubles."""
    names = [f"actor-{index}" for index in range(len(troubles))]
    actors = [
        create_fake_actor(name, *trouble) for name, trouble in zip(names, troubles, strict=True)
    ]
    # so that no limit counts the start of a process
    ray.get([actor.__ray_ready__.remote() for actor in actors])
    client = RolloutClient(
        Fleet(actors, names, replace(timeouts(limit_s), closed_s=closed_s)), RoundSize(2)
    )
    client.start()
    return client


def refs(*sizes: int) -> PerRank:
    """Requests of each learner rank."""
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    shelf = PictureShelf(ray.put)
    return [
        shelf.put_each([f"request-{start + i}" for i in range(size)])
        for start, size in zip(starts, sizes, strict=True)
    ]


def offer(version: int) -> WeightOffer:
    return WeightOffer(version=version, transport="rollmatch_gloo", terms=None, canary=None)


def test_a_round_is_split_into_contiguous_shares_and_comes_back_in_order(
    make_client: MakeClient,
) -> None:
    client = make_client(devices=())
    counts: list[tuple[int, int, str]] = []
    with Wait(Console(file=io.StringIO()), lambda *count: counts.append(count)):
        client.start()
    assert counts == [(1, 2, "actors have started")]
    assert client.devices == (1, 1), "they were asked"
    (shares,) = map(ray.get, client.generate(refs(3)).result())
    assert shares == [
        [("actor-0", "request-0"), ("actor-0", "request-1")],
        [("actor-1", "request-2")],
    ]


def test_calls_are_named_after_the_phase_of_a_sync_and_the_round_of_a_step(
    make_client: MakeClient, fake_actors: list[Any]
) -> None:
    """Not after the round of the run: Ray has a metric for each name."""
    client = make_client()
    client.receive_weights(offer(1)).result()
    rounds = [f"generate round {number}" for number in (1, 2)]
    for _ in range(2):
        for round_ in client.split(refs(6)):
            client.generate(round_).result()
    expected = [*(f"sync {phase}" for phase in SyncPhase), *rounds, *rounds]
    assert ray.get([actor.tasks.remote() for actor in fake_actors]) == [expected, expected]


def test_an_empty_share_sends_nothing(make_client: MakeClient) -> None:
    client = make_client("generate", "fail")
    assert list(map(ray.get, client.generate(refs(1)).result())) == [[[("actor-0", "request-0")]]]
    assert client.generate([[]]).result() == [[]]


def test_a_step_is_cut_into_even_rounds_of_at_most_the_capacity(make_client: MakeClient) -> None:
    assert make_client().split([list(range(9))]) == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]]]


def test_a_round_holds_the_next_chunk_of_every_learner_rank_and_engines_share_out_the_whole_of_it(
    make_client: MakeClient,
) -> None:
    """Decision 15: W x chunk requests in rank order, that range is split over the
    engines; every rank gets its own back.
    """
    client = make_client(size=RoundSize(2, learner_ranks=2))
    assert client.split([[0, 1, 2], [3, 4]]) == [[[0, 1], [3]], [[2], [4]]]
    first, second = map(ray.get, client.generate(refs(2, 1)).result())
    assert first == [[("actor-0", "request-0"), ("actor-0", "request-1")]]
    assert second == [[("actor-1", "request-2")]]
    first, second = map(ray.get, client.generate(refs(1, 2)).result())
    assert first == [[("actor-0", "request-0")]]
    assert second == [[("actor-0", "request-1")], [("actor-1", "request-2")]]


def test_engines_that_cannot_give_every_learner_rank_a_request_are_refused_at_the_start(
    make_client: MakeClient,
) -> None:
    """Scenario: vLLM server mode fails fast when cap is infeasible."""
    message = (
        r"decode_batch_size: decode_batch_size 1 x 2 rollout devices is less than 4 learner"
        r" ranks; raise decode_batch_size"
    )
    with pytest.raises(ConfigError, match=message):
        make_client(devices=(), size=RoundSize(1, learner_ranks=4)).start()


def test_what_one_engine_failed_to_answer_is_asked_of_the_next_where_that_is_wanted(
    make_client: MakeClient,
) -> None:
    client = make_client("generate", "unreachable", asks_next_on_failure=True)
    (shares,) = map(ray.get, client.generate(refs(4)).result())
    assert [name for share in shares for name, _ in share] == ["actor-0"] * 4
    assert [request for share in shares for _, request in share] == [
        f"request-{i}" for i in range(4)
    ]
    with pytest.raises(RolloutError, match="gone"):
        make_client("generate", "unreachable").generate(refs(4)).result()


def test_a_sync_waits_for_the_round_that_is_being_generated(make_client: MakeClient) -> None:
    client = make_client("generate", "slow")
    waiting = client.generate(refs(2))
    client.wait_idle()
    assert waiting.future.done()


def test_a_round_that_failed_is_raised_before_a_sync_begins(make_client: MakeClient) -> None:
    client = make_client("generate", "fail")
    client.generate(refs(2))
    with pytest.raises(RolloutError, match="told to fail"):
        client.wait_idle()


def test_a_sync_raises_the_version_and_reports_the_slowest_actor(make_client: MakeClient) -> None:
    client = make_client()
    report = client.receive_weights(offer(7)).result()
    assert (report.version, report.bytes, report.phase_s, report.canary_max_abs) == (
        7,
        10,
        {"wire": 2.0},
        2e-6,
    )
    assert client.version == 7


LATE = "no answer from actor-1 after timeouts.{}_s = 1 s; check the engine's log"


@pytest.mark.parametrize(
    ("phase", "trouble", "told"),
    [
        ("start", "sleep", LATE.format("start")),
        ("generate", "sleep", LATE.format("generate")),
        ("generate", "surprise", "OSError: nobody thought of this"),
    ],
)
def test_an_actor_that_is_late_or_fails_is_named_with_the_phase_and_what_happened(
    make_client: MakeClient, phase: str, trouble: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_the_last_is_late(monkeypatch)
    client = make_client(phase, trouble, limit_s=1.0 if trouble == "sleep" else LONG_S)
    with pytest.raises(RolloutError, match=f"{phase} on actor-1: {told}") as caught:
        client.start() if phase == "start" else client.generate(refs(2)).result()
    assert (caught.value.actor, caught.value.phase) == ("actor-1", phase)


def test_a_sync_phase_without_an_answer_is_named_by_actor_and_phase(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_wire(call: RayCall, answers: Any) -> list[Any]:
        return wait_for_all(call if call.phase == "wire" else replace(call, limit=None), answers)

    monkeypatch.setattr("launch.processes.rollout_client.wait_for_all", of_wire)
    only_the_last_is_late(monkeypatch)
    client = make_client("wire", "sleep", limit_s=0.5)
    message = (
        r"wire on actor-1: no answer from actor-1 after timeouts.sync_phase_s = 0.5 s; check"
        r" that the learner"
    )
    with pytest.raises(WeightSyncError, match=message) as caught:
        client.receive_weights(offer(1)).result()
    assert (caught.value.actor, caught.value.phase, client.version) == ("actor-1", "wire", 0)


def test_an_actor_that_dies_is_reported_at_once(ray_cluster: None) -> None:
    client = own_client(("", ""), ("generate", "die"), limit_s=600.0)
    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"generate on actor-1: .*ended"):
        client.generate(refs(2)).result()
    assert time.monotonic() - started < 60
    client.close()


def test_an_actors_own_error_arrives_as_it_was_raised(make_client: MakeClient) -> None:
    client = make_client("verify", "fail")
    with pytest.raises(WeightSyncError, match="told to fail") as caught:
        client.receive_weights(offer(1)).result()
    assert (caught.value.actor, caught.value.phase, caught.value.quantity, caught.value.size) == (
        "actor-1",
        "verify",
        "nothing",
        2.5,
    )


def test_of_engines_that_fail_together_the_one_that_broke_the_connection_is_told(
    make_client: MakeClient, fake_actors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own error may come after the others have noticed that it left the group."""
    monkeypatch.setattr("rollout_actors.engine.ray_calls.PEER_ERROR_GRACE_S", LONG_S)
    client = make_client("wire", "fail late")
    ray.get(fake_actors[0].become.remote("wire", "lose peer"))
    with pytest.raises(WeightSyncError, match="wire on actor-1: told to fail"):
        client.receive_weights(offer(1)).result()
    ray.get(fake_actors[1].become.remote())
    with pytest.raises(WeightSyncError, match=r"wire on actor-0: .*closed by peer"):
        client.receive_weights(offer(2)).result()


def test_requests_that_are_lost_with_the_learner_are_not_laid_on_an_engine(
    make_client: MakeClient,
) -> None:
    learner = create_fake_actor("learner", "start", "sleep")
    ray.get(learner.__ray_ready__.remote())
    generating = make_client().generate([[RequestRef(learner.start.remote(), 0)]])
    ray.kill(learner)
    message = "^generate on the learner: the requests for actor-0 are lost"
    with pytest.raises(LearnerError, match=message):
        generating.result()


@ray.remote(num_cpus=0)
def unreadable() -> None:
    raise RecordError("cannot read a.png: gone", field="images", remedy="restore the file")


def test_a_picture_that_cannot_be_read_is_told_as_what_it_is(make_client: MakeClient) -> None:
    with pytest.raises(RecordError, match=r"images: .*a\.png: gone; restore the file"):
        make_client().generate([[RequestRef(unreadable.remote(), 0)]]).result()


@pytest.fixture
def echo(ray_cluster: None) -> Iterator[RolloutClient]:
    """An engine's real shell, over what answers with what it is asked."""
    actor = ray.remote(EngineActor).options(num_cpus=0).remote(EchoEngine)
    yield RolloutClient(Fleet([actor], ["actor-0"], timeouts(), devices=(1,)), RoundSize(64))
    ray.kill(actor)


@pytest.fixture
def sender(ray_cluster: None) -> Iterator[Any]:
    actor = ray.remote(Sender).options(num_cpus=0).remote()
    yield actor
    ray.kill(actor)


def test_an_engine_gets_every_pictures_bytes_from_whoever_sends_them(
    echo: RolloutClient, sender: Any
) -> None:
    requests = [make_request(place, images=(picture(place // 2), picture(7))) for place in range(5)]
    for _ in range(2):
        sent = sender.requests.remote(requests)
        ((answer,),) = echo.generate([[RequestRef(sent, place) for place in range(1, 5)]]).result()
        assert ray.get(answer) == requests[1:]


def test_pictures_that_are_lost_with_the_learner_are_not_laid_on_an_engine() -> None:
    """A node that has no copy of them hears this from Ray."""
    lost = RayTaskError("EngineActor.generate", "", OwnerDiedError("ab", b"", ""))
    call = RayCall("generate", None, "", RolloutError)
    error = call.translate_error("actor-0", lost)
    assert isinstance(error, LearnerError)
    assert "the requests for actor-0 are lost" in str(error)


def picture(number: int) -> ImageRef:
    data = bytes([number]) * 200_000
    return ImageRef(None, data, hashlib.sha256(data).hexdigest())


def test_closing_twice_is_harmless_and_ends_whoever_still_waits(ray_cluster: None) -> None:
    client = own_client(("generate", "sleep"), limit_s=600.0)
    waiting = client.generate(refs(2))
    client.close()
    client.close()
    with pytest.raises(RolloutError, match="its process has ended"):
        waiting.future.result(timeout=LONG_S)


def test_every_actor_may_end_its_engine_in_order_whatever_becomes_of_the_others(
    ray_cluster: None,
) -> None:
    client = own_client(
        ("", ""), ("close", "fail"), ("close", "die"), ("close", "slow"), closed_s=LONG_S
    )
    started = time.monotonic()
    client.close()
    assert 0.3 <= time.monotonic() - started < LONG_S


def test_no_actor_is_waited_for_longer_than_the_limit_when_the_pool_is_closed(
    ray_cluster: None,
) -> None:
    assert timeouts().closed_s == CLOSED_S
    client = own_client(("close", "sleep"), closed_s=0.5)
    started = time.monotonic()
    client.close()
    assert 0.5 <= time.monotonic() - started < LONG_S
