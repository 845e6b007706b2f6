"""The verdict on time, checked on the real driver with scripted latencies in virtual time: the
recommended change is the best of those tried, or within 5 % of it (docs/how_to/doctor.md).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from config_support import configuration

from launch.doctor.timing import LEAST_GAIN, StepTimes, changes, fitted, read_times, verdict
from launch.driver import train
from launch.pipeline import one_ahead, one_at_a_time
from launch.processes.rounds import Round, RoundSize
from launch.run_folder.steps import StepRecord, step_metrics, step_spans
from launch.run_folder.timeline import TraceWriter
from shared.chunking import rank_share, round_parts
from shared.config import RunConfig
from shared.metrics import StepReport
from shared.rollouts import SyncReport, WeightOffer
from shared.run_files import Span
from shared.schedule import RunSchedule, StepPlan
from shared.weight_sync.canary import CanaryProbe
from shared.weight_sync.offer import FullOffer
from shared.weight_sync.phases import SendReport

STEPS = 10
TOKENS = 100
"""Mean tokens of a rollout with its prompt."""


@dataclass(frozen=True)
class Latencies:
    """A machine: what each part of the work costs, in seconds."""

    engine_s: float = 1.0
    """Start of a share of rollouts."""
    rollout_s: float = 0.1
    """Each rollout of a share."""
    slow: tuple[float, ...] = ()
    """Factors of the first engines; all others are as fast as the law says."""
    token_s: float = 0.001
    """Each token that a learner rank with one thread learns."""
    row_s: float = 0.0
    """Each packed row."""
    update_s: float = 0.3
    draw_s: float = 0.01
    sync_s: float = 0.2
    noise: float = 0.0
    """Standard deviation of a share's seconds, and of a rollout's tokens, as a share of them."""


@dataclass
class World:
    """Virtual time, in which the real driver runs with these latencies."""

    config: RunConfig
    devices: tuple[int, ...]
    costs: Latencies
    now: float = 0.0
    version: int = 0
    times: list[StepTimes] = field(default_factory=list)
    trace: list[Span] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(1)

    def varied(self, value: float) -> float:
        return value * max(0.2, self.random.gauss(1.0, self.costs.noise))

    def run(self) -> World:
        queue = one_ahead if self.config.stage2_ab.channel_b.enable_pipeline else one_at_a_time
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        with mock.patch("launch.pipeline.time", clock):
            args = (_Learner(self), _Rollouts(self), RunSchedule(self.config), queue)
            train(*args, _Telemetry(self), mock.Mock())  # type: ignore[arg-type]
        return self

    @property
    def step_s(self) -> float:
        """Seconds of a step in the steady run, without the first and the last ones."""
        steps = self.times[2:-1]
        return sum(step.step_s for step in steps) / len(steps)


class _Answers:
    def __init__(self, world: World, round_: list[list[int]]) -> None:
        self.world = world
        self.round = round_
        self.shares: dict[int, list[range]] = {}
        self.spans: list[list[Span]] = [[] for _ in round_]
        self.end = world.now
        parts = round_parts(list(map(len, round_)), world.devices)
        numbers: dict[int, int] = {}
        for part in parts:
            numbers[part.engine] = numbers.get(part.engine, 0) + len(part.requests)
        costs = world.costs
        ends = {}
        for engine, number in numbers.items():
            factor = costs.slow[engine] if engine < len(costs.slow) else 1.0
            seconds = factor * (costs.engine_s + costs.rollout_s * number)
            ends[engine] = world.now + world.varied(seconds)
        for part in parts:
            positions = round_[part.rank][part.requests.start : part.requests.stop]
            args = {"first_position": positions[0], "last_position": positions[-1]}
            span = Span(f"actor-{part.engine}", "generate", world.now, ends[part.engine], args)
            self.spans[part.rank].append(span)
        self.end = max(ends.values())

    def result(self) -> Any:
        self.world.now = max(self.world.now, self.end)
        return list(zip(self.round, self.spans, strict=True))


class _Rollouts:
    replaces_lost = False

    def __init__(self, world: World) -> None:
        self.world = world
        self.answers: _Answers | None = None

    @property
    def version(self) -> int:
        return self.world.version

    def split(self, requests: Any) -> Any:
        config = self.world.config
        size = RoundSize(config.rollout_matching.decode_batch_size, config.learner.world_size)
        return size.split(requests, self.world.devices)

    def generate(self, round_: Any) -> Round:
        self.answers = _Answers(self.world, round_)
        return Round(self.answers)  # type: ignore[arg-type]

    def wait_idle(self) -> None:
        if self.answers is not None:
            self.world.now = max(self.world.now, self.answers.end)

    def join_replacements(self) -> bool:
        return False

    def pop_replaced(self) -> list[Any]:
        return []

    def receive_weights(self, offer: WeightOffer) -> Any:
        self.world.version = offer.version
        self.world.now += self.world.costs.sync_s
        return _done(SyncReport(offer.version, 1, {"wire": self.world.costs.sync_s}, 0.0))


def _done(value: Any) -> Any:
    from concurrent.futures import Future

    future: Future[Any] = Future()
    future.set_result(value)
    return future


class _Learner:
    def __init__(self, world: World) -> None:
        self.world = world
        self.plans: list[StepPlan] = []
        self.spans: dict[int, list[list[Span]]] = {}
        self.tokens: dict[int, list[float]] = {}
        self.version = 0

    def _works(self, step: int, rank: int, name: str, seconds: float) -> None:
        now = self.world.now
        self.spans[step][rank].append(Span(f"learner-{rank}", name, now, now + seconds))

    def next_requests(self, plan: StepPlan) -> Any:
        size = self.world.config.learner.world_size
        self.plans.append(plan)
        self.tokens[plan.step] = []
        self.spans[plan.step] = [[] for _ in range(size)]
        for rank in range(size):
            self._works(plan.step, rank, "draw samples", self.world.costs.draw_s)
        self.world.now += self.world.costs.draw_s
        return [list(rank_share(plan.num_samples, size, rank)) for rank in range(size)]

    def accumulate(self, done: Any) -> None:
        step = self.plans[0].step
        costs = self.world.costs
        threads = self.world.config.learner.cpu_threads or 1
        longest = 0.0
        for rank, (positions, spans) in enumerate(done):
            self.spans[step][rank] += spans
            tokens = sum(self.world.varied(TOKENS) for _ in positions)
            self.tokens[step].append(tokens)
            rows = -(-tokens // self.world.config.global_max_length)
            seconds = (costs.token_s * tokens + costs.row_s * rows) / threads
            self._works(step, rank, "learn round", seconds)
            longest = max(longest, seconds)
        self.world.now += longest

    def finish_step(self) -> StepReport:
        plan = self.plans.pop(0)
        seconds = self.world.costs.update_s / (self.world.config.learner.cpu_threads or 1)
        for rank in range(len(self.spans[plan.step])):
            self._works(plan.step, rank, "finish step", seconds)
        self.world.now += seconds
        tokens = self.tokens[plan.step]
        rows = sum(-(-one // self.world.config.global_max_length) for one in tokens)
        metrics = {"packing/num_rows": float(rows), "packing/num_tokens": sum(tokens)}
        spans = tuple(span for of_rank in self.spans[plan.step] for span in of_rank)
        return StepReport(plan.step, plan.channel, self.version, metrics, spans)

    def offer_weights(self, *, again: bool = False) -> WeightOffer:
        self.version += not again
        terms = FullOffer(groups=(), timeout_s=5.0, bucket_bytes=1, tensors=())
        return WeightOffer(self.version, "gloo", terms, CanaryProbe((1,), (), (1,), (), 1e-4))

    def send_weights(self, offer: WeightOffer) -> Any:
        return _done(SendReport({"send_wire": 0.0}))

    def sync_done(self, noise: Any) -> None:
        pass


class _Telemetry:
    def __init__(self, world: World) -> None:
        self.world = world

    def sync(self, report: Any) -> None:
        pass

    def waits_for(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[StepRecord]:
        world = self.world
        started_s = world.now
        record = StepRecord(plan)
        yield record
        assert record.report is not None
        metrics = step_metrics(record, record.report, world.now - started_s, 0.0, "greedy")
        world.times.append(StepTimes.of(record.report.spans, metrics))
        world.lines.append({"step": plan.number, **metrics})
        spans = step_spans(record, record.report, started_s, world.now)
        world.trace += [replace(one, args={**one.args, "step": plan.number}) for one in spans]


@dataclass(frozen=True)
class Case:
    config: RunConfig
    devices: tuple[int, ...]
    costs: Latencies

    def world(self) -> World:
        return World(self.config, self.devices, self.costs).run()


def make(folder: Path, costs: Latencies, *, actors: int = 3, **settings: Any) -> Case:
    values = {
        "data__val": None,
        "training__max_steps": STEPS,
        "stage2_ab__schedule__warmup_steps": 0,
        "rollout_matching__vllm__actors__num_actors": actors,
    }
    config = configuration(folder, folder, folder / "run", **values | settings)
    return Case(config, (1,) * actors, costs)


def drawn(seed: int, folder: Path) -> Case:
    """Draw a machine and sizes; every third machine has a slow engine."""
    rng = random.Random(seed)
    actors = rng.randint(1, 4)
    costs = Latencies(
        engine_s=rng.uniform(0.2, 3.0),
        rollout_s=rng.uniform(0.02, 0.4),
        slow=(rng.uniform(1.5, 2.5),) if seed % 3 == 0 and actors > 1 else (),
        token_s=rng.uniform(0.0005, 0.004),
        row_s=rng.choice([0.0, 0.05, 0.3]),
        update_s=rng.uniform(0.1, 1.5),
        draw_s=rng.uniform(0.0, 0.3),
        sync_s=rng.uniform(0.1, 2.0),
        noise=0.03,
    )
    return make(
        folder,
        costs,
        actors=actors,
        stage2_ab__channel_b__rollouts_per_step=rng.randint(12, 48),
        stage2_ab__channel_b__enable_pipeline=rng.random() < 0.8,
        rollout_matching__decode_batch_size=rng.randint(2, 8),
        learner__world_size=rng.randint(1, 2),
        learner__cpu_threads=rng.choice([None, 1, 2]),
        global_max_length=rng.choice([300, 600, 1200]),
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_recommended_change_is_the_best_of_those_tried_or_nearly(
    seed: int, tmp_path: Path
) -> None:
    case = drawn(seed, tmp_path)
    before = case.world()
    steps = before.times[2:-1]
    tried = changes(fitted(case.config, case.devices, steps), steps)
    assert len(tried) >= 4
    number = case.config.raw_rollouts_per_step
    seconds = {}
    for change in tried:
        now = replace(case, config=change.model.config, devices=change.model.devices)
        if "cpu_threads" in change.text:
            threads = (case.config.learner.cpu_threads or 0) + 1
            now = replace(now, config=_set(now.config, "learner", cpu_threads=threads))
        elif "global_max_length" in change.text:
            length = 2 * case.config.global_max_length
            now = replace(now, config=now.config.model_copy(update={"global_max_length": length}))
        seconds[change.text] = now.world().step_s * number / now.config.raw_rollouts_per_step
    best = tried[0]
    if before.step_s - best.step_s < LEAST_GAIN * before.step_s:
        recommended_s = before.step_s
    else:
        recommended_s = seconds[best.text]
    assert recommended_s <= 1.05 * min(before.step_s, *seconds.values()), (
        best.text,
        {one.text: (one.step_s, seconds[one.text]) for one in tried},
    )


def _set(config: RunConfig, section: str, **values: Any) -> RunConfig:
    changed = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: changed})


BOUNDS = {
    "generation": Latencies(engine_s=5.0),
    "learning": Latencies(token_s=0.01),
    "straggler": Latencies(slow=(6.0,)),
    "sync": Latencies(sync_s=20.0),
    "data": Latencies(draw_s=20.0),
}


@pytest.mark.parametrize("part", BOUNDS)
def test_the_bound_is_the_part_that_was_made_slow(part: str, tmp_path: Path) -> None:
    world = make(tmp_path, BOUNDS[part]).world()
    for step in world.times[1:-1]:
        bounds = step.bounds()
        assert sum(bounds.values()) == pytest.approx(step.step_s)
        assert step.metrics()["time/bounded_by"] == part
        assert bounds["driver"] == pytest.approx(0.0, abs=1e-9)


def test_the_bound_of_what_no_part_explains_is_the_driver() -> None:
    assert StepTimes.of((), {"time/step_s": 2.0}).metrics() == {"time/bounded_by": "driver"}


def test_a_process_is_idle_for_the_share_of_the_step_in_which_it_does_not_work(
    tmp_path: Path,
) -> None:
    """Two rounds of 16; each engine generates 1 + 0.1 x 6 s (the last one 1 + 0.1 x 4) per round,
    the learner draws 0.01, learns 32 x 0.1 and updates 0.3 s."""
    step = make(tmp_path, Latencies()).world().times[3]
    assert step.step_s == pytest.approx(0.01 + 1.6 + 1.6 + 1.6 + 0.3 + 0.2)
    idle = step.metrics()
    assert idle["time/idle/actor-0"] == pytest.approx(1 - 3.2 / step.step_s)
    assert idle["time/idle/actor-2"] == pytest.approx(1 - 2.8 / step.step_s)
    assert idle["time/idle/learner-0"] == pytest.approx(1 - 3.51 / step.step_s)


def test_the_verdict_of_a_run_that_has_ended_is_read_from_its_timeline(tmp_path: Path) -> None:
    case = make(tmp_path, Latencies(engine_s=5.0))
    world = case.world()
    trace = TraceWriter(tmp_path / "timeline.json")
    trace.write(world.trace)
    trace.close()
    read = read_times(tmp_path, world.lines)
    assert [one.bounds() for one in read] == [
        pytest.approx(one.bounds(), abs=1e-4) for one in world.times
    ]
    line = verdict(case.config, case.devices, read)
    assert line.startswith("10 steps of 13.29 s: ")
    assert "bounded by generation 8" in line
    assert "would save of a channel-B step: rollout_matching." in line


def test_without_rollouts_the_verdict_names_the_bound_and_no_change(tmp_path: Path) -> None:
    learned = [Span("learner", "draw samples", 0.0, 0.5), Span("learner", "finish step", 0.5, 2.0)]
    times: Sequence[StepTimes] = [StepTimes.of(learned, {"time/step_s": 2.0})]
    config = make(tmp_path, Latencies()).config
    line = verdict(config, (), times)
    assert line == "1 steps of 2.00 s: bounded by learning 75%, data 25%; idle: learner 0%"
