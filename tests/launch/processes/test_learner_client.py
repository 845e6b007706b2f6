"""The driver's end of the learner on Ray: every wait ends, and says what ended it (decision 14)."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import fake_ranks
import pytest
import ray
from config_support import configuration
from fake_ranks import create_fake_rank
from patience import LONG_S, only_the_last_is_late

from launch.processes.fleet import RolloutTimeouts
from launch.processes.learner_client import LearnerClient, RayRanks
from launch.processes.rollout_client import RankRolloutClient
from launch.processes.rounds import Round, RoundSize
from learner.actor import STOPPING
from learner.model.ranks import RankTopology, ReceiverGroup
from shared.config.job import TimeoutsSection
from shared.errors import ConfigError, LearnerError, RolloutError, WeightSyncError
from shared.rollouts import WeightOffer
from shared.schedule import StepPlan
from shared.sent_requests import REQUESTS_TOGETHER, SentRequests, in_objects
from shared.weight_sync.offer import FullOffer

pytestmark = pytest.mark.ray

CONFIG = configuration(Path("model"), Path("data"), Path("run"))


def test_the_ranks_here_are_told_to_stop_as_the_learners_are():
    assert fake_ranks.STOPPING == STOPPING


@pytest.fixture(scope="module")
def ranks_of_all_tests(ray_cluster):
    actors = [create_fake_rank(rank) for rank in (0, 1)]
    ray.get([actor.__ray_ready__.remote() for actor in actors])
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def ranks(ranks_of_all_tests):
    """Two that do nothing yet, and that no test ends."""
    yield ranks_of_all_tests
    ray.get([actor.let_go.remote() for actor in ranks_of_all_tests])
    ray.get([actor.reset.remote() for actor in ranks_of_all_tests])


@pytest.fixture
def learner(ranks):
    return lambda **timeouts: LearnerClient(RayRanks(ranks[:1]), TimeoutsSection(**timeouts))


@pytest.fixture
def two_ranks(ranks):
    return lambda **timeouts: LearnerClient(RayRanks(ranks), TimeoutsSection(**timeouts))


@pytest.fixture
def mortal(ray_cluster):
    """One whose process may end."""
    actor = create_fake_rank()
    yield LearnerClient(RayRanks([actor]), TimeoutsSection())
    ray.kill(actor)


def test_what_the_learner_raises_arrives_as_it_was_raised_with_its_traceback_behind_it(learner):
    with pytest.raises(ConfigError, match=r"model\.path: no") as caught:
        learner().start(CONFIG, [RankTopology("rollmatch_gloo", (ReceiverGroup(1),))])
    assert type(caught.value) is ConfigError
    assert "in start" in str(caught.value.__cause__)


def test_a_learner_whose_process_ended_is_reported_and_closing_does_not_wait_for_it(mortal):
    with pytest.raises(ConfigError):
        mortal.start(CONFIG, [RankTopology("inproc", ())], make_backend=dict)
    with pytest.raises(LearnerError, match=r"finish_step on the learner: .*ended"):
        mortal.finish_step()
    mortal._closed_s = LONG_S
    started = time.monotonic()
    mortal.close()
    assert time.monotonic() - started < LONG_S


def test_the_version_is_that_of_the_last_sync_that_every_ranks_backend_has_taken(learner):
    limits = RolloutTimeouts.for_actors(TimeoutsSection())
    rollouts = RankRolloutClient(learner(), limits, RoundSize(2), devices_per_rank=1)
    assert rollouts.version == 0
    report = rollouts.receive_weights(WeightOffer(3, "inproc", None, None)).result(timeout=120)
    assert (report.version, rollouts.version) == (3, 3)


def test_a_failed_send_arrives_through_its_future(learner):
    terms = FullOffer((), timeout_s=60.0, bucket_bytes=1, tensors=())
    error = (
        learner().send_weights(WeightOffer(1, "rollmatch_gloo", terms, None)).exception(timeout=120)
    )
    assert type(error) is WeightSyncError
    assert error.phase == "rendezvous"


def test_an_error_on_one_rank_ends_all_of_them_with_that_ranks_message(two_ranks, monkeypatch):
    """Rank 0 waited in vain and says so first; what is raised is what rank 1 found."""
    monkeypatch.setattr("rollout_actors.engine.ray_calls.PEER_ERROR_GRACE_S", LONG_S)
    started = time.monotonic()
    with pytest.raises(RolloutError, match="a prompt differs"):
        two_ranks().accumulate([[], []])
    assert time.monotonic() - started < LONG_S


def test_a_rank_that_does_not_answer_is_named_with_phase_key_and_what_to_check(
    two_ranks, monkeypatch
):
    only_the_last_is_late(monkeypatch)
    late = r"save on the learner: no answer from rank 1 after timeouts\.learn_s = 1 s; "
    message = f"{late}check its stack"
    with pytest.raises(LearnerError, match=message):
        two_ranks(learn_s=1.0).save(Path("checkpoint"), "{}")


def taken(refs):
    objects, places = in_objects(refs)
    return SentRequests.chosen(ray.get(objects, timeout=LONG_S), places).requests


def test_the_first_requests_are_there_while_the_next_are_being_made(two_ranks, ranks):
    num = 2 * REQUESTS_TOGETHER + 1
    others, requests = two_ranks().held_out_requests(num)
    assert taken(others) == ("0/0",)
    assert taken(requests[:REQUESTS_TOGETHER]) == tuple(
        f"1/{index}" for index in range(REQUESTS_TOGETHER)
    )
    assert ray.wait(in_objects(requests[REQUESTS_TOGETHER:])[0], num_returns=1, timeout=0)[0] == []
    ray.get(ranks[1].let_go.remote())
    assert taken(requests) == tuple(f"1/{index}" for index in range(num))


def test_ranks_that_are_told_to_stop_are_free_at_once_and_say_how_many_updates_they_hold(two_ranks):
    remote = two_ranks(learn_s=0.5)
    message = r"score on the learner: no answer from rank 0, rank 1 after .* = 0\.5 s"
    with pytest.raises(LearnerError, match=message):
        remote.score([[], []])
    assert remote.stop(timeout_s=LONG_S) == 5, "the ranks' own waits are longer than that"


def test_a_rank_that_does_not_become_free_is_named_with_the_key(two_ranks):
    remote = two_ranks(learn_s=0.5)
    with pytest.raises(LearnerError):
        remote.next_requests(StepPlan(0, "A", 1, 1, False, False))
    message = (
        r"stop on the learner: no answer from rank 0, rank 1 after timeouts\.interrupt_s = 1 s; .*,"
        r" or raise timeouts\.interrupt_s"
    )
    with pytest.raises(LearnerError, match=message):
        remote.stop(timeout_s=1.0)


class Asked:
    """Two ranks whose tasks are only written down; Ctrl-C comes between their ends of a step."""

    num_ranks = 2

    def __init__(self):
        self.asked = []

    def ask(self, rank, name, task):
        if (rank, name) == (0, "finish_step"):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        self.asked.append((name, rank))

    def ask_at_once(self, rank, task):
        self.asked.append(("at once", rank))

    def wait(self, call, asked):
        return [5 for _ in asked]


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also where the tests were started in the background of a shell, which has it
    ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interruption_between_two_ranks_calls_leaves_no_rank_without_its_call(interruptible):
    """Else one rank would be in the collectives of a step's end, and the other in those of the
    checkpoint that follows.
    """
    ranks = Asked()
    remote = LearnerClient(ranks, TimeoutsSection())
    with pytest.raises(KeyboardInterrupt):
        remote.finish_step()
    assert remote.stop(timeout_s=1.0) == 5
    calls = ("finish_step", "at once", "stop")
    assert ranks.asked == [(call, rank) for call in calls for rank in (0, 1)]


def test_without_timeouts_a_start_has_no_limit_whatever_its_caller_asks_for():
    """A breakpoint may stop in the loading of a model, with `cluster=local`."""
    limits = []

    class Started(Asked):
        num_ranks = 1

        def ask(self, rank, name, task, *arguments):
            pass

        def wait(self, call, asked):
            limits.append(call.limit)
            return [(1, False, None)]

    limit = TimeoutsSection().limit("start_s")
    for timeouts in (None, TimeoutsSection()):
        topologies = [RankTopology("inproc", ())]
        LearnerClient(Started(), timeouts).start(CONFIG, topologies, limit=limit)
    assert limits == [None, limit]


def test_what_the_run_waits_for_is_shown_while_it_waits():
    shown = []

    class Shown:
        @contextmanager
        def waits_for(self, what):
            shown.append(what)
            yield

    learner = LearnerClient(Asked(), TimeoutsSection(), Shown())
    learner.accumulate([[], []])
    learner.sync_done(None)
    learner.save(Path("checkpoint"), "{}")
    learner.stop(timeout_s=1.0)  # no part of a step
    assert Round(Round.answered([[], []]).future, Shown()).result() == [[], []]
    assert shown == ["the learner", "the weight sync", "a checkpoint", "rollouts"]


def test_closing_reaches_a_rank_that_is_busy(learner, ranks):
    closed = learner()
    with pytest.raises(ConfigError):
        closed.start(CONFIG, [RankTopology("inproc", ())], make_backend=dict)
    with ThreadPoolExecutor(1) as threads:
        busy = threads.submit(closed.score, [[]])
        assert ray.get(ranks[0].wait_until_it_scores.remote())
        closed.close()
        assert busy.result(timeout=120) == [], "it was told while it worked"
