"""The page: what happens in which order, and how long a pipelined step takes (spec channel-b-pipeline; DESIGN 2 and 5, decision 13)."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from config_support import mapping

from launch.driver import evaluate, train
from launch.pipeline import one_ahead, one_at_a_time
from rollout_actors.pool import ActorPool, PoolTimeouts
from shared.canary import CanaryProbe
from shared.chunking import split_contiguous
from shared.config import load_config
from shared.config.derive import batch_algebra
from shared.reports import StepReport
from shared.rollouts import SyncReport, WeightOffer
from shared.schedule import RunSchedule
from shared.weight_sync import SendReport, Terms


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
        return self.requests


class Rollouts:
    """The driver's view of rollout actors: rounds of fixed latency in virtual time."""

    def __init__(self, world, round_size):
        self.world, self.round_size = world, round_size

    @property
    def version(self):
        return self.world.version

    def split(self, requests):
        return [requests[i : i + self.round_size] for i in range(0, len(requests), self.round_size)]

    def generate(self, requests):
        self.world.note("submit", tuple(requests), self.world.version)
        return Round(self.world, requests)

    def receive_weights(self, offer):
        self.world.version = offer.version
        return done(SyncReport(offer.version, 1, {"wire": 0.0}, 0.0))


class LearnerOfFixedLatency:
    num_held_out = 40

    def __init__(self, world):
        self.world, self.plan, self.offered = world, None, 0

    def next_requests(self, plan):
        self.plan = plan
        self.world.note("begin", plan.step, plan.channel)
        return [(plan.step, i) for i in range(plan.num_samples)] if plan.channel == "B" else []

    def accumulate(self, done):
        self.world.now += self.world.learn_s
        self.world.note("learn", tuple(done))

    def finish_step(self):
        self.world.note("update", self.plan.step)
        return StepReport(self.plan.step, self.plan.channel, self.world.version, {}, ())

    def held_out_requests(self, step):
        return [("val", step, i) for i in range(self.num_held_out)]

    def score(self, done):
        return [f"scene of {request}" for request in done]

    def offer_weights(self):
        self.offered += 1
        terms = Terms(host="", port=0, world_size=2, timeout_s=5.0, bucket_bytes=1, tensors=(), checksums=())
        return WeightOffer(self.offered, "rollmatch_gloo", {"terms": terms}, CanaryProbe((1,), (), (1,), (), 1e-4))

    def send_weights(self, offer):
        self.world.note("sync", offer.version)
        return done(SendReport(1, {"wire": 0.0}))


class Notes:
    """Telemetry that only remembers."""

    def __init__(self, world):
        self.world, self.steps = world, []

    def sync(self, report):
        pass

    def evaluation(self, evaluation):
        self.world.note("evaluate", evaluation.step, evaluation.weight_version, evaluation.scenes)

    @contextmanager
    def step(self, plan):
        started = self.world.now
        yield type("Record", (), {})()
        self.steps.append(self.world.now - started)


def done(value):
    future = Future()
    future.set_result(value)
    return future


def run(tmp_path, world, *, round_size=8, queue=one_ahead, **changes):
    changes = {"training__max_steps": 3, "stage2_ab__schedule__warmup_steps": 1, "stage2_ab__channel_b__rollouts_per_step": 32} | changes
    config = load_config(mapping(tmp_path / "model", tmp_path / "data", tmp_path / "run", **changes))
    notes = Notes(world)
    train(LearnerOfFixedLatency(world), Rollouts(world, round_size), RunSchedule(config), queue, notes)
    return notes


@pytest.mark.parametrize(("generate_s", "learn_s"), [(1.0, 1.0), (1.0, 0.3), (0.3, 1.0), (1.0, 0.01)])
def test_a_pipelined_step_takes_at_most_its_longer_half_and_the_first_round(tmp_path, generate_s, learn_s):
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
    assert events.index(("submit", second)) < events.index(("learn", first)) < events.index(("generated", second))


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
    # At the start, and when the warm-up's last update is followed by a step that generates; the run's last weights go nowhere.
    assert [event for event in world.log if event[0] == "sync"] == [("sync", 1), ("sync", 2)]


def test_the_held_out_report_comes_before_and_after_channel_b(tmp_path):
    world = World()
    run(tmp_path, world)
    reports = [event[1:] for event in world.log if event[0] == "evaluate"]
    assert [(step, version) for step, version, _ in reports] == [(1, 2), (3, 4)]
    assert reports[1][2] == tuple(f"scene of ('val', 3, {i})" for i in range(40))


def test_a_report_at_every_eval_steps_has_the_weights_of_the_steps_before_it(tmp_path):
    world = World()
    run(tmp_path, world, training__max_steps=6, stage2_ab__schedule__warmup_steps=3, training__eval_steps=2)
    reports = [event[1:3] for event in world.log if event[0] == "evaluate"]
    assert [step for step, _ in reports] == [2, 3, 4, 6]
    updates_before = {event[1]: sum(earlier[0] == "update" for earlier in world.log[:i]) for i, event in enumerate(world.log) if event[0] == "evaluate"}
    assert updates_before == {2: 2, 3: 3, 4: 4, 6: 6}
    # One sync before everything, then one for each update whose weights generate: after steps 1 to 5.
    assert reports == [(2, 2), (3, 3), (4, 4), (6, 6)]


def test_eval_per_device_knobs_do_not_override_rollout_decode_batching(tmp_path):
    actors, decode_batch_size, logs = 3, 2, []
    for per_device_eval_batch_size in (1, 2, 64):
        changes = {
            "rollout_matching__decode_batch_size": decode_batch_size,
            "rollout_matching__vllm__actors": {"num_actors": actors},
            "training__per_device_eval_batch_size": per_device_eval_batch_size,
        }
        config = load_config(mapping(tmp_path / "model", tmp_path / "data", tmp_path / "run", **changes))
        pool = ActorPool([], [], PoolTimeouts(1.0, 1.0, 1.0), round_capacity=batch_algebra(config).round_capacity)
        world = World()
        rollouts = Rollouts(world, round_size=0)
        rollouts.split = pool.split
        scenes = evaluate(LearnerOfFixedLatency(world), rollouts, 3, one_ahead).scenes
        assert len(scenes) == 40
        logs.append([event[1] for event in world.log if event[0] == "submit"])
    assert logs[0] == logs[1] == logs[2]
    shares = [len(share) for round_ in logs[0] for share in split_contiguous(len(round_), actors)]
    assert max(shares) == decode_batch_size
    assert len(logs[0]) == 7  # the fewest rounds of at most 6 that hold 40
