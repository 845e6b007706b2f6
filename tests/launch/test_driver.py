"""The page: what happens in which order, and how long a pipelined step takes (spec
channel-b-pipeline; decisions 13 and 41).
"""

from __future__ import annotations

import io
from collections import defaultdict
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock, call

import pytest
from config_support import configuration
from rich.console import Console

from launch.driver import evaluate, train
from launch.pipeline import one_ahead, one_at_a_time
from launch.processes.rounds import Round, RoundSize, SecondTry
from launch.run_folder.console import Wait
from shared.chunking import split_contiguous
from shared.errors import LostRoundError
from shared.metrics import StepReport
from shared.rollouts import SyncReport, WeightOffer
from shared.schedule import RunSchedule
from shared.weight_sync.canary import CanaryProbe
from shared.weight_sync.offer import FullOffer
from shared.weight_sync.phases import SendReport


@dataclass
class World:
    """Virtual time and a log of everything that happened in it."""

    generate_s: float = 1.0
    learn_s: float = 1.0
    now: float = 0.0
    log: list = field(default_factory=list)
    version: int = 0

    def note(self, *event):
        self.log.append(event)

    def events(self, kind):
        return [event[1:] for event in self.log if event[0] == kind]


class Answers:
    """The future of a round."""

    def __init__(self, world, requests):
        self.world = world
        self.requests = requests
        self.end = world.now + world.generate_s
        self.error = None

    def result(self):
        if self.error is not None:
            raise self.error
        self.world.now = max(self.world.now, self.end)
        self.world.note("generated", tuple(self.requests))
        return [self.requests]


class Rollouts:
    """The driver's view of rollout actors: rounds of fixed latency in virtual time. One learner
    rank, so that every list of ranks holds one.
    """

    def __init__(self, world, round_size):
        self.world = world
        self.round_size = round_size
        self.round = None

    @property
    def version(self):
        return self.world.version

    def split(self, requests):
        (requests,) = requests
        size = self.round_size
        return [[requests[start : start + size]] for start in range(0, len(requests), size)]

    def generate(self, round_):
        return Round(self.begin(round_))

    def begin(self, round_):
        (requests,) = round_
        self.world.note("submit", tuple(requests), self.world.version)
        self.round = Answers(self.world, requests)
        return self.round

    def wait_idle(self):
        if self.round is not None:
            self.world.now = max(self.world.now, self.round.end)

    replaces_lost = False

    def join_replacements(self):
        return False

    def pop_replaced(self):
        return []

    def receive_weights(self, offer):
        self.world.version = offer.version
        return done(SyncReport(offer.version, 1, {"wire": 0.0}, 0.0))


class SceneOf(NamedTuple):
    position: int
    text: str


class LearnerOfFixedLatency:
    num_held_out = 40

    def __init__(self, world):
        self.world = world
        self.plans = []
        self.offered = 0

    def next_requests(self, plan):
        self.plans.append(plan)
        self.world.note("begin", plan.step, plan.channel)
        return [[(plan.step, i) for i in range(plan.num_samples)] if plan.channel == "B" else []]

    def accumulate(self, done):
        (done,) = done
        assert {step for step, _ in done} == {self.plans[0].step}
        self.world.now += self.world.learn_s
        self.world.note("learn", tuple(done))

    def finish_step(self):
        plan = self.plans.pop(0)
        self.world.note("update", plan.step)
        return StepReport(plan.step, plan.channel, self.world.version, {}, ())

    def held_out_requests(self, step):
        return [[("val", step, i) for i in range(self.num_held_out)]]

    def score(self, done):
        (done,) = done
        return [SceneOf(request[2], f"scene of {request}") for request in done]

    def offer_weights(self, *, again=False):
        self.offered += not again
        terms = FullOffer(groups=(), timeout_s=5.0, bucket_bytes=1, tensors=())
        probe = CanaryProbe((1,), (), (1,), (), 1e-4)
        return WeightOffer(self.offered, "rollmatch_gloo", terms, probe)

    def send_weights(self, offer):
        self.world.note("sync", offer.version)
        return done(SendReport({"wire": 0.0}))

    def sync_done(self, noise):
        pass


class Notes:
    """Telemetry that only remembers."""

    def __init__(self, world):
        self.world = world
        self.steps = []

    def sync(self, report):
        pass

    def waits_for(self, what):
        return nullcontext()

    def evaluation(self, evaluation):
        scenes = tuple(scene.text for scene in evaluation.outcomes)
        self.world.note("evaluate", evaluation.step, evaluation.weight_version, scenes)
        return 0.5

    @contextmanager
    def step(self, plan):
        started = self.world.now
        yield SimpleNamespace()
        self.steps.append(self.world.now - started)


def done(value):
    future = Future()
    future.set_result(value)
    return future


@pytest.fixture
def run(tmp_path):
    """Run the page in a world: 1 step of channel A, then 2 of 32 rollouts, unless changed."""

    def run(world, *, round_size=8, queue=one_ahead, checkpoints=None, **changes):
        steps = {
            "training__max_steps": 3,
            "stage2_ab__schedule__warmup_steps": 1,
            "stage2_ab__channel_b__rollouts_per_step": 32,
        }
        config = configuration(tmp_path, tmp_path, tmp_path / "run", **steps | changes)
        notes = Notes(world)
        learner = LearnerOfFixedLatency(world)
        rollouts = Rollouts(world, round_size)
        train(learner, rollouts, RunSchedule(config), queue, notes, checkpoints or Mock())
        return notes

    return run


@pytest.mark.parametrize(
    ("generate_s", "learn_s"), [(1.0, 1.0), (1.0, 0.3), (0.3, 1.0), (1.0, 0.01)]
)
def test_a_pipelined_step_takes_at_most_its_longer_half_and_the_first_round(
    run, generate_s, learn_s
):
    rounds = 4
    for step_s in run(World(generate_s, learn_s)).steps[1:]:
        assert step_s <= 1.1 * max(rounds * generate_s, rounds * learn_s) + generate_s
    alternating = run(World(generate_s, learn_s), queue=one_at_a_time)
    assert alternating.steps[1] == pytest.approx(rounds * (generate_s + learn_s))


def test_nothing_is_generated_for_the_next_step_before_the_sync(run):
    world = World()
    run(world)
    kinds = [event[0] for event in world.log]
    for index, kind in enumerate(kinds):
        if kind == "update":
            following = kinds[index + 1 :]
            assert following[0] in ("sync", "evaluate")
            assert "submit" not in following[: following.index("sync")]


def submissions(world):
    """Step and weight version of every round of training, in the order of submission."""
    rounds = [(requests[0][0], version) for requests, version in world.events("submit")]
    return [(step, version) for step, version in rounds if step != "val"]


def versions_by_step(world):
    versions = defaultdict(set)
    for step, version in submissions(world):
        versions[step].add(version)
    return versions


def test_every_rollout_of_a_step_is_of_that_steps_weights(run):
    world = World()
    run(world)
    assert versions_by_step(world) == {1: {2}, 2: {3}}


def test_channel_a_asks_for_nothing_and_syncs_only_before_somebody_generates(run):
    world = World()
    run(world, training__max_steps=5, stage2_ab__schedule__warmup_steps=4, data__val=None)
    assert submissions(world)[0][0] == 4
    # At the start, and when the warm-up's last update is followed by a step that generates; the
    # run's last weights go nowhere.
    assert world.events("sync") == [(1,), (2,)]


def test_the_held_out_report_comes_before_and_after_channel_b(run):
    world = World()
    run(world)
    reports = world.events("evaluate")
    assert [(step, version) for step, version, _ in reports] == [(1, 2), (3, 4)]
    assert reports[1][2] == tuple(f"scene of ('val', 3, {i})" for i in range(40))


def test_what_came_of_held_out_samples_is_in_their_order_whatever_rank_and_round_they_were_of():
    class Shuffled(LearnerOfFixedLatency):
        def score(self, done):
            return super().score(done)[::-1]

    world = World()
    counts = []
    with Wait(Console(file=io.StringIO()), lambda *count: counts.append(count)):
        evaluation = evaluate(Shuffled(world), Rollouts(world, 7), 3, one_ahead)
    assert counts == [(number, 6, "rounds are scored") for number in range(1, 6)]
    assert [outcome.position for outcome in evaluation.outcomes] == list(range(40))
    assert (evaluation.step, evaluation.weight_version) == (3, 0)


def test_a_report_at_every_eval_steps_has_the_weights_of_the_steps_before_it(run):
    world = World()
    run(
        world,
        training__max_steps=6,
        stage2_ab__schedule__warmup_steps=3,
        training__eval_steps=2,
    )
    # One sync before everything, then one for each update whose weights generate: after steps 1 to
    # 5.
    reports = [(step, version) for step, version, _ in world.events("evaluate")]
    assert reports == [(2, 2), (3, 3), (4, 4), (6, 6)]
    kinds = [event[0] for event in world.log if event[0] in ("update", "evaluate")]
    indices = [index for index, kind in enumerate(kinds) if kind == "evaluate"]
    assert [kinds[:index].count("update") for index in indices] == [2, 3, 4, 6]


STALE = {
    "rollout_matching__max_staleness": 1,
    "stage2_ab__schedule__warmup_steps": 0,
    "training__max_steps": 4,
    "data__val": None,
}


def test_with_staleness_1_the_next_steps_first_round_is_generated_while_this_steps_last_is_learned(
    run,
):
    world = World()
    run(world, round_size=16, **STALE)
    # Two rounds a step: the first of every step but the run's first begins one version early, the
    # second has its own step's weights.
    assert submissions(world) == [(0, 1), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4)]
    events = [event[:2] for event in world.log]
    submitted = events.index(("submit", tuple((1, i) for i in range(16))))
    learned = events.index(("learn", tuple((0, i) for i in range(16, 32))))
    assert submitted < learned < events.index(("update", 0))


@pytest.mark.parametrize(("staleness", "seconds"), [(0, 4 * (2 + 1)), (1, 1 + 4 * 2)])
def test_with_staleness_1_generation_and_learning_wait_for_each_other_only_at_the_start(
    run, staleness, seconds
):
    world = World()
    run(world, round_size=16, **STALE | {"rollout_matching__max_staleness": staleness})
    assert world.now == seconds


def test_with_staleness_1_no_round_is_begun_early_across_a_channel_a_step(run):
    world = World()
    run(world, **STALE | {"stage2_ab__schedule__b_ratio": 0.75, "training__max_steps": 6})
    assert [channel for _, channel in world.events("begin")] == ["A", "B", "B", "B", "A", "B"]
    assert versions_by_step(world) == {1: {2}, 2: {2, 3}, 3: {3, 4}, 5: {5}}


def test_without_the_queue_or_staleness_every_round_has_its_own_steps_weights(run):
    world = World()
    run(world, queue=one_at_a_time, **STALE)
    assert submissions(world) == [(step, step + 1) for step in range(4) for _ in range(4)]


def test_whoever_keeps_checkpoints_hears_of_every_update_every_report_and_the_end_before_the_last_report(
    run,
):
    checkpoints = Mock()
    run(World(), checkpoints=checkpoints)
    heard = [one for one in checkpoints.mock_calls if one[0] != "round_ahead"]
    assert heard == [
        call.after_step(1),
        call.after_report(1, 0.5),
        call.after_step(2),
        call.after_step(3),
        call.at_end(3),
        call.after_report(3, 0.5),
    ]


def test_eval_per_device_knobs_do_not_override_rollout_decode_batching(tmp_path):
    logs = []
    for per_device_eval_batch_size in (1, 2, 64):
        changes = {
            "rollout_matching__decode_batch_size": 2,
            "rollout_matching__vllm__actors": {"num_actors": 3},
            "training__per_device_eval_batch_size": per_device_eval_batch_size,
        }
        config = configuration(tmp_path, tmp_path, tmp_path / "run", **changes)
        devices = config.engine_devices
        world = World()
        rollouts = Rollouts(world, round_size=0)
        rollouts.split = partial(RoundSize(2).split, devices=devices)
        assert len(evaluate(LearnerOfFixedLatency(world), rollouts, 3, one_ahead).outcomes) == 40
        logs.append([requests for requests, _ in world.events("submit")])
    assert logs[0] == logs[1] == logs[2]
    shares = [len(share) for round_ in logs[0] for share in split_contiguous(len(round_), 3)]
    assert max(shares) == 2
    assert len(logs[0]) == 7  # the fewest rounds of at most 6 that hold 40


class LosingRollouts(Rollouts):
    """Engines that are all lost in the submissions of these numbers, from 0."""

    replaces_lost = True

    def __init__(self, world, round_size, learner, notes, lost):
        super().__init__(world, round_size)
        self._learner, self._notes = learner, notes
        self._lost = lost
        self._num_submitted = 0

    def generate(self, round_):
        again = SecondTry(self, self._learner, self._notes, round_, self.version)
        return Round(self.begin(round_), self._notes, again)

    def begin(self, round_):
        answers = super().begin(round_)
        if self._num_submitted in self._lost:
            answers.error = LostRoundError("nobody is left", actor="actor-0", phase="generate")
        self._num_submitted += 1
        return answers


def losing_run(tmp_path, lost, **changes):
    """Three steps of channel B with two rounds each, and no reports."""
    steps = {
        "training__max_steps": 3,
        "stage2_ab__schedule__warmup_steps": 0,
        "stage2_ab__channel_b__rollouts_per_step": 32,
        "data__val": None,
    }
    world = World()
    config = configuration(tmp_path, tmp_path, tmp_path / "run", **steps | changes)
    checkpoints = Mock()
    learner, notes = LearnerOfFixedLatency(world), Notes(world)
    rollouts = LosingRollouts(world, 16, learner, notes, lost)
    train(learner, rollouts, RunSchedule(config), one_ahead, notes, checkpoints)
    return world, checkpoints


def test_a_round_that_was_lost_is_asked_again_behind_a_sync_of_the_same_weights(tmp_path):
    undisturbed, _ = losing_run(tmp_path, [])
    world, _ = losing_run(tmp_path, [1, 4])
    assert world.events("learn") == undisturbed.events("learn")
    assert [version for (version,) in undisturbed.events("sync")] == [1, 2, 3]
    assert [version for (version,) in world.events("sync")] == [1, 1, 2, 2, 3]
    # Round 1 of step 0 is asked again, before anything later is.
    assert submissions(world)[:4] == [(0, 1), (0, 1), (0, 1), (1, 2)]


def test_a_round_that_is_lost_again_ends_the_run(tmp_path):
    with pytest.raises(LostRoundError, match="nobody is left"):
        losing_run(tmp_path, [1, 2])


def test_a_round_of_weights_that_the_learner_no_longer_has_ends_the_run(tmp_path):
    with pytest.raises(LostRoundError):
        losing_run(tmp_path, [2], rollout_matching__max_staleness=1)


def test_checkpoints_are_given_the_next_round_itself(tmp_path):
    _, checkpoints = losing_run(tmp_path, [], rollout_matching__max_staleness=1)
    ahead = [one.args[1] for one in checkpoints.mock_calls if one[0] == "round_ahead"]
    assert [type(future) for future in ahead] == [Answers, Answers, type(None)]


def test_a_held_out_report_whose_round_was_lost_is_the_same(tmp_path):
    reports = []
    for lost in ([], [0], [5]):
        world, _ = losing_run(tmp_path, lost, data__val=str(tmp_path), training__max_steps=1)
        reports.append(world.events("evaluate"))
    assert reports[0] and reports[0] == reports[1] == reports[2]
