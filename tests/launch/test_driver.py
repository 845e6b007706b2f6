"""The page: what happens in which order, and how long a pipelined step takes (spec
channel-b-pipeline; decisions 13 and 41).
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from config_support import mapping

from launch.driver import evaluate, train
from launch.pipeline import one_ahead, one_at_a_time
from launch.runtime.rollout_client import RolloutClient, RolloutTimeouts
from shared.chunking import split_contiguous
from shared.config import load_config
from shared.config.derive import engine_devices
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


class Round:
    def __init__(self, world, requests):
        self.world, self.requests = world, requests
        self.end = world.now + world.generate_s

    def result(self):
        self.world.now = max(self.world.now, self.end)
        self.world.note("generated", tuple(self.requests))
        return [self.requests]


class Rollouts:
    """The driver's view of rollout actors: rounds of fixed latency in virtual time. One learner
    rank, so that every list of ranks holds one.
    """

    def __init__(self, world, round_size):
        self.world, self.round_size, self.round = world, round_size, None

    @property
    def version(self):
        return self.world.version

    def split(self, requests):
        (requests,) = requests
        return [
            [requests[i : i + self.round_size]] for i in range(0, len(requests), self.round_size)
        ]

    def generate(self, round_):
        (requests,) = round_
        self.world.note("submit", tuple(requests), self.world.version)
        self.round = Round(self.world, requests)
        return self.round

    def wait_idle(self):
        if self.round is not None:
            self.world.now = max(self.world.now, self.round.end)

    def receive_weights(self, offer):
        self.world.version = offer.version
        return done(SyncReport(offer.version, 1, {"wire": 0.0}, 0.0))


class SceneOf(NamedTuple):
    position: int
    text: str


class LearnerOfFixedLatency:
    num_held_out = 40

    def __init__(self, world):
        self.world, self.plans, self.offered = world, [], 0

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

    def offer_weights(self):
        self.offered += 1
        terms = FullOffer(groups=(), timeout_s=5.0, bucket_bytes=1, tensors=())
        return WeightOffer(
            self.offered, "rollmatch_gloo", terms, CanaryProbe((1,), (), (1,), (), 1e-4)
        )

    def send_weights(self, offer):
        self.world.note("sync", offer.version)
        return done(SendReport({"wire": 0.0}))

    def sync_done(self, noise):
        pass


class Notes:
    """Telemetry that only remembers."""

    def __init__(self, world):
        self.world, self.steps = world, []

    def sync(self, report):
        pass

    def evaluation(self, evaluation):
        self.world.note(
            "evaluate",
            evaluation.step,
            evaluation.weight_version,
            tuple(scene.text for scene in evaluation.outcomes),
        )
        return 0.5

    @contextmanager
    def step(self, plan):
        started = self.world.now
        yield type("Record", (), {})()
        self.steps.append(self.world.now - started)


class NoCheckpoints:
    """What the driver tells whoever keeps checkpoints."""

    def __init__(self):
        self.told = []

    def after_step(self, num_steps):
        self.told.append(("step", num_steps))

    def after_report(self, num_steps, f1):
        self.told.append(("report", num_steps, f1))

    def at_end(self, num_steps):
        self.told.append(("end", num_steps))


def done(value):
    future = Future()
    future.set_result(value)
    return future


def run(tmp_path, world, *, round_size=8, queue=one_ahead, checkpoints=None, **changes):
    changes = {
        "training__max_steps": 3,
        "stage2_ab__schedule__warmup_steps": 1,
        "stage2_ab__channel_b__rollouts_per_step": 32,
    } | changes
    config = load_config(
        mapping(tmp_path / "model", tmp_path / "data", tmp_path / "run", **changes)
    )
    notes = Notes(world)
    train(
        LearnerOfFixedLatency(world),
        Rollouts(world, round_size),
        RunSchedule(config),
        queue,
        notes,
        checkpoints or NoCheckpoints(),
    )
    return notes


@pytest.mark.parametrize(
    ("generate_s", "learn_s"), [(1.0, 1.0), (1.0, 0.3), (0.3, 1.0), (1.0, 0.01)]
)
def test_a_pipelined_step_takes_at_most_its_longer_half_and_the_first_round(
    tmp_path, generate_s, learn_s
):
    notes = run(tmp_path, World(generate_s, learn_s))
    rounds = 4
    for step_s in notes.steps[1:]:
        assert step_s <= 1.1 * max(rounds * generate_s, rounds * learn_s) + generate_s
    alternating = run(tmp_path, World(generate_s, learn_s), queue=one_at_a_time)
    assert alternating.steps[1] == pytest.approx(rounds * (generate_s + learn_s))


def test_round_k_plus_1_is_generated_while_round_k_is_learned(tmp_path):
    world = World()
    run(tmp_path, world, round_size=16)
    first, second = tuple((1, i) for i in range(16)), tuple((1, i) for i in range(16, 32))
    events = [event[:2] for event in world.log]
    assert (
        events.index(("submit", second))
        < events.index(("learn", first))
        < events.index(("generated", second))
    )


def test_nothing_is_generated_for_the_next_step_before_the_sync(tmp_path):
    world = World()
    run(tmp_path, world)
    for index, event in enumerate(world.log):
        if event[0] == "update":
            following = [later[0] for later in world.log[index + 1 :]]
            assert following[0] in ("sync", "evaluate")
            assert "submit" not in following[: following.index("sync")]


def test_every_rollout_of_a_step_is_of_that_steps_weights(tmp_path):
    world = World()
    run(tmp_path, world)
    versions = {}
    for event in world.log:
        if event[0] == "submit" and event[1][0][0] != "val":
            versions.setdefault(event[1][0][0], set()).add(event[2])
    assert versions == {1: {2}, 2: {3}}


def test_channel_a_asks_for_nothing_and_syncs_only_before_somebody_generates(tmp_path):
    world = World()
    run(tmp_path, world, training__max_steps=5, stage2_ab__schedule__warmup_steps=4, data__val=None)
    assert next(event for event in world.log if event[0] == "submit")[1][0] == (4, 0)
    # At the start, and when the warm-up's last update is followed by a step that generates; the
    # run's last weights go nowhere.
    assert [event for event in world.log if event[0] == "sync"] == [("sync", 1), ("sync", 2)]


def test_the_held_out_report_comes_before_and_after_channel_b(tmp_path):
    world = World()
    run(tmp_path, world)
    reports = [event[1:] for event in world.log if event[0] == "evaluate"]
    assert [(step, version) for step, version, _ in reports] == [(1, 2), (3, 4)]
    assert reports[1][2] == tuple(f"scene of ('val', 3, {i})" for i in range(40))


def test_what_came_of_held_out_samples_is_in_their_order_whatever_rank_and_round_they_were_of(
    tmp_path,
):
    class Shuffled(LearnerOfFixedLatency):
        def score(self, done):
            return super().score(done)[::-1]

    world = World()
    evaluation = evaluate(Shuffled(world), Rollouts(world, 7), 3, one_ahead)
    assert [outcome.position for outcome in evaluation.outcomes] == list(range(40))
    assert (evaluation.step, evaluation.weight_version) == (3, 0)


def test_a_report_at_every_eval_steps_has_the_weights_of_the_steps_before_it(tmp_path):
    world = World()
    run(
        tmp_path,
        world,
        training__max_steps=6,
        stage2_ab__schedule__warmup_steps=3,
        training__eval_steps=2,
    )
    reports = [event[1:3] for event in world.log if event[0] == "evaluate"]
    assert [step for step, _ in reports] == [2, 3, 4, 6]
    updates_before = {
        event[1]: sum(earlier[0] == "update" for earlier in world.log[:i])
        for i, event in enumerate(world.log)
        if event[0] == "evaluate"
    }
    assert updates_before == {2: 2, 3: 3, 4: 4, 6: 6}
    # One sync before everything, then one for each update whose weights generate: after steps 1 to
    # 5.
    assert reports == [(2, 2), (3, 3), (4, 4), (6, 6)]


STALE = {
    "rollout_matching__max_staleness": 1,
    "stage2_ab__schedule__warmup_steps": 0,
    "training__max_steps": 4,
    "data__val": None,
}


def submissions(world):
    """Step and weight version of every round, in the order of submission."""
    return [(event[1][0][0], event[2]) for event in world.log if event[0] == "submit"]


def test_with_staleness_1_the_next_steps_first_round_is_generated_while_this_steps_last_is_learned(
    tmp_path,
):
    world = World()
    run(tmp_path, world, round_size=16, **STALE)
    # Two rounds a step: the first of every step but the run's first begins one version early, the
    # second has its own step's weights.
    assert submissions(world) == [(0, 1), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4)]
    events = [event[:2] for event in world.log]
    last_of_0, first_of_1 = tuple((0, i) for i in range(16, 32)), tuple((1, i) for i in range(16))
    assert (
        events.index(("submit", first_of_1))
        < events.index(("learn", last_of_0))
        < events.index(("update", 0))
    )


def test_with_staleness_1_generation_and_learning_wait_for_each_other_only_at_the_start(tmp_path):
    exact, stale = World(), World()
    run(tmp_path, exact, round_size=16, **STALE | {"rollout_matching__max_staleness": 0})
    run(tmp_path, stale, round_size=16, **STALE)
    assert exact.now == 4 * (2 * 1.0 + 1.0)
    assert stale.now == 1.0 + 4 * 2 * 1.0


def test_with_staleness_1_no_round_is_begun_early_across_a_channel_a_step(tmp_path):
    world = World()
    run(tmp_path, world, **STALE | {"stage2_ab__schedule__b_ratio": 0.75, "training__max_steps": 6})
    channels = [event[2] for event in world.log if event[0] == "begin"]
    assert channels == ["A", "B", "B", "B", "A", "B"]
    versions = dict(submissions(world))
    assert {
        step: {version for s, version in submissions(world) if s == step} for step in versions
    } == {1: {2}, 2: {2, 3}, 3: {3, 4}, 5: {5}}


def test_without_the_queue_or_staleness_every_round_has_its_own_steps_weights(tmp_path):
    world = World()
    run(tmp_path, world, queue=one_at_a_time, **STALE)
    assert submissions(world) == [(step, step + 1) for step in range(4) for _ in range(4)]


def test_whoever_keeps_checkpoints_hears_of_every_update_every_report_and_the_end_before_the_last_report(
    tmp_path,
):
    checkpoints = NoCheckpoints()
    run(tmp_path, World(), checkpoints=checkpoints)
    assert checkpoints.told == [
        ("step", 1),
        ("report", 1, 0.5),
        ("step", 2),
        ("step", 3),
        ("end", 3),
        ("report", 3, 0.5),
    ]


def test_eval_per_device_knobs_do_not_override_rollout_decode_batching(tmp_path):
    actors, decode_batch_size, logs = 3, 2, []
    for per_device_eval_batch_size in (1, 2, 64):
        changes = {
            "rollout_matching__decode_batch_size": decode_batch_size,
            "rollout_matching__vllm__actors": {"num_actors": actors},
            "training__per_device_eval_batch_size": per_device_eval_batch_size,
        }
        config = load_config(
            mapping(tmp_path / "model", tmp_path / "data", tmp_path / "run", **changes)
        )
        pool = RolloutClient(
            [],
            [],
            RolloutTimeouts.for_actors(config.timeouts),
            decode_batch_size=decode_batch_size,
            devices=engine_devices(config),
        )
        world = World()
        rollouts = Rollouts(world, round_size=0)
        rollouts.split = pool.split
        scenes = evaluate(LearnerOfFixedLatency(world), rollouts, 3, one_ahead).outcomes
        assert len(scenes) == 40
        logs.append([event[1] for event in world.log if event[0] == "submit"])
    assert logs[0] == logs[1] == logs[2]
    shares = [len(share) for round_ in logs[0] for share in split_contiguous(len(round_), actors)]
    assert max(shares) == decode_batch_size
    assert len(logs[0]) == 7  # the fewest rounds of at most 6 that hold 40
