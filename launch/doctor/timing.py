"""The verdict on time: what bounded the steps, who was idle, and which change would help most.

It reads the time spans that a run records anyway (`timeline.json`). A change is judged by a model
of a step, fitted to the run's own figures: the seconds of an engine's share are `start + each x
rollouts`, those of a learner's round `each x rollouts`, and the rest is constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from launch.processes.batch_algebra import batch_algebra
from launch.run_folder.timeline import read_timeline
from shared.config import RunConfig
from shared.config.rollout import EngineLocation
from shared.metrics import IDLE_FAMILY
from shared.run_files import Span
from shared.schedule import RunSchedule

WITH_ROOM = " (with a free core or GPU)"
DRAW = ("draw samples", "draw again")
WAITS = ("wait for ranks", "reduce gradients")
VERDICT_STEPS = 20
"""A verdict is printed after so many steps."""
EXPLAINED = 0.75
"""Least share of the variance of learning times that rows and tokens must explain."""
LEAST_GAIN = 0.03
"""Least share of a step that a change must save to be recommended."""


@dataclass(slots=True)
class RoundTimes:
    """One round of a step: when each actor generated its share, and how long it was learned."""

    start_s: float = float("inf")
    ends_s: dict[str, float] = field(default_factory=dict)
    """Unix time when each actor had generated its rollouts."""
    num: dict[str, int] = field(default_factory=dict)
    """Number of rollouts of each actor."""
    learn_s: float = 0.0
    """Seconds that the slowest rank learned the round."""
    learned_at_s: float = 0.0
    """Unix time when all ranks had learned it."""

    @property
    def generate_s(self) -> float:
        return max(self.ends_s.values()) - self.start_s

    @property
    def straggle_s(self) -> float:
        """Seconds between the mean and the last end of the actors' shares."""
        return max(self.ends_s.values()) - fmean(self.ends_s.values())


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of a step by part, in seconds.

    Example: a step of 10 s with `bounds()` {"generation": 6.0, "learning": 3.0, "sync": 0.8, ...}.
    """

    step_s: float
    rounds: tuple[RoundTimes, ...]
    draw_s: float
    finish_s: float
    """Seconds of the learner after the last round: its last rows and the update."""
    reduce_s: float
    """Seconds that the slowest rank waited for others and summed gradients."""
    sync_s: float
    wait_s: float
    """Seconds that the learner waited for rounds."""
    busy_s: Mapping[str, float]
    """Seconds of work of each process, by its name."""
    num_rows: float = 0.0
    num_tokens: float = 0.0

    @classmethod
    def of(cls, spans: Iterable[Span], line: Mapping[str, Any]) -> StepTimes:
        """Read a step's spans, in the order of `StepReport.spans`, and its metrics."""
        rounds: list[RoundTimes] = []
        draw_s = finish_s = 0.0
        index = 0
        intervals: dict[str, list[tuple[float, float]]] = {}
        for span in spans:
            if span.name not in WAITS:
                intervals.setdefault(span.track, []).append((span.start_s, span.end_s))
            if span.name == DRAW[0]:
                index = 0  # the next rank
            if span.name in DRAW:
                draw_s = max(draw_s, span.duration_s)
            elif span.name == "finish step":
                finish_s = max(finish_s, span.duration_s)
            elif "last_position" in span.args or span.name == "learn round":
                while len(rounds) <= index:
                    rounds.append(RoundTimes())
                one = rounds[index]
                if span.name == "learn round":
                    one.learn_s = max(one.learn_s, span.duration_s)
                    one.learned_at_s = max(one.learned_at_s, span.end_s)
                    index += 1
                else:
                    first, last = span.args["first_position"], span.args["last_position"]
                    assert isinstance(first, int), "positions are numbers"
                    assert isinstance(last, int)
                    one.start_s = min(one.start_s, span.start_s)
                    one.ends_s[span.track] = max(one.ends_s.get(span.track, 0.0), span.end_s)
                    one.num[span.track] = one.num.get(span.track, 0) + last - first + 1
        return cls(
            step_s=line["time/step_s"],
            rounds=tuple(one for one in rounds if one.ends_s),
            draw_s=draw_s,
            finish_s=finish_s,
            reduce_s=line.get("time/reduce_s", 0.0),
            sync_s=line.get("time/sync_s", 0.0),
            # The first round is waited for while its samples are drawn.
            wait_s=max(0.0, line.get("time/queue_wait_s", 0.0) - draw_s),
            busy_s={track: _union_s(times) for track, times in intervals.items()},
            num_rows=line.get("packing/num_rows", 0.0),
            num_tokens=line.get("packing/num_tokens", 0.0),
        )

    @property
    def learn_s(self) -> float:
        """Seconds that the slowest rank learned."""
        return sum(one.learn_s for one in self.rounds) + self.finish_s

    def bounds(self) -> dict[str, float]:
        """Return the seconds that each part bounded the step; they add up to `step_s`.

        While a round is learned and the next is generated, the longer of the two is the bound.
        """
        pairs = zip(self.rounds, self.rounds[1:], strict=False)
        hidden_s = sum(
            one.learn_s
            for one, following in pairs
            if following.generate_s > one.learn_s and following.start_s < one.learned_at_s
        )
        learn_s = self.learn_s - hidden_s
        generate_s = self.wait_s + hidden_s
        straggle_s = min(generate_s, sum(one.straggle_s for one in self.rounds))
        parts = {
            "generation": generate_s - straggle_s,
            "straggler": straggle_s,
            "learning": max(0.0, learn_s - self.reduce_s),
            "ranks": min(self.reduce_s, learn_s),
            "sync": self.sync_s,
            "data": self.draw_s,
        }
        return parts | {"driver": max(0.0, self.step_s - sum(parts.values()))}

    def metrics(self) -> dict[str, float | str]:
        """Return the metrics of the verdict: `time/bounded_by` and `time/idle/<process>`."""
        bounds = self.bounds()
        idle = {f"{IDLE_FAMILY}{name}": self.idle_share(name) for name in self.busy_s}
        return {"time/bounded_by": max(bounds, key=bounds.__getitem__), **idle}

    def idle_share(self, process: str) -> float:
        return max(0.0, 1 - self.busy_s.get(process, 0.0) / max(1e-9, self.step_s))


def _union_s(times: list[tuple[float, float]]) -> float:
    """Return the seconds that at least one of the intervals covers."""
    total = 0.0
    end = float("-inf")
    for start_s, end_s in sorted(times):
        total += max(0.0, end_s - max(start_s, end))
        end = max(end, end_s)
    return total


@dataclass(frozen=True, slots=True)
class Law:
    """The seconds of a number of rollouts: `start_s + each_s x number`."""

    start_s: float
    each_s: float

    def __call__(self, number: int) -> float:
        return self.start_s + self.each_s * number if number else 0.0

    @classmethod
    def fitted(cls, points: Sequence[tuple[int, float]]) -> tuple[Law, ...]:
        """Fit the law to pairs of a number and seconds.

        If all numbers are the same, start and slope cannot be told apart: returns both extremes.
        """
        numbers, seconds = (np.array(values, dtype=float) for values in zip(*points, strict=True))
        mean = float(seconds.mean())
        if np.ptp(numbers) == 0:
            return cls(mean, 0.0), cls(0.0, mean / float(numbers.mean()))
        each_s, start_s = np.polyfit(numbers, seconds, 1)
        if each_s < 0:
            return (cls(mean, 0.0),)
        if start_s < 0:
            return (cls(0.0, mean / float(numbers.mean())),)
        return (cls(float(start_s), float(each_s)),)


@dataclass(frozen=True, slots=True)
class StepModel:
    """A model of channel-B steps, to try changes."""

    config: RunConfig
    devices: tuple[int, ...]
    """Number of devices of each engine."""
    engine: Law
    factors: tuple[float, ...]
    """How much slower each engine is than the law."""
    learn_s: float
    """Seconds that a rank learns a rollout."""
    draw_s: float
    finish_s: float
    rest_s: float
    """Sync and driver."""

    def rounds(self) -> list[tuple[float, float]]:
        """Return the seconds of generating and of learning each round.

        Raises ValueError if the sizes do not fit.
        """
        algebra = batch_algebra(self.config, self.devices)
        return [
            (
                max(f * self.engine(n) for f, n in zip(self.factors, shares, strict=True)),
                self.learn_s * max(map(len, ranks)),
            )
            for shares, ranks in zip(algebra.shares, algebra.rounds, strict=True)
        ]

    def step_s(self) -> float:
        """Return the seconds of a step in a steady run."""
        rounds = self.rounds()
        if not self.config.stage2_ab.channel_b.enable_pipeline:
            return sum(map(sum, rounds)) + self.draw_s + self.finish_s + self.rest_s
        crosses = self.config.rollout_matching.max_staleness > 0
        now_s = 0.0 if crosses else self.draw_s
        ready_s = now_s + rounds[0][0]
        begins = [0.0]
        for _ in range(3):  # with staleness, the first step has no round ahead of it
            for index, (_, learn_s) in enumerate(rounds):
                is_last = index + 1 == len(rounds)
                if is_last and crosses:
                    now_s += self.draw_s  # the next step's requests are the next in the queue
                now_s = max(now_s, ready_s)
                if not is_last:
                    ready_s = now_s + rounds[index + 1][0]
                elif crosses:
                    ready_s = now_s + rounds[0][0]
                now_s += learn_s
            now_s += self.finish_s
            if crosses:
                now_s = max(now_s, ready_s)  # a sync waits until no engine generates
            now_s += self.rest_s
            if not crosses:
                now_s += self.draw_s
                ready_s = now_s + rounds[0][0]
            begins.append(now_s)
        return begins[-1] - begins[-2]


def fitted(
    config: RunConfig, devices: Sequence[int], steps: Sequence[StepTimes]
) -> tuple[StepModel, ...]:
    """Fit the model to steps of channel B. Returns two extremes if the figures do not decide.

    Raises ValueError if the steps have no rounds, or the sizes do not fit.
    """
    if not steps or not all(one.rounds for one in steps):
        raise ValueError("no rounds of rollouts were recorded")
    algebra = batch_algebra(config, devices)
    # In the order of the engines: the first positions of a round are the first engine's.
    names = list(dict.fromkeys(name for step in steps for one in step.rounds for name in one.num))
    by_engine = len(names) == len(devices)
    points: list[tuple[int, int, float]] = []
    for step in steps:
        for index, one in enumerate(step.rounds):
            if by_engine:
                points += [
                    (names.index(name), one.num[name], end_s - one.start_s)
                    for name, end_s in one.ends_s.items()
                ]
            elif index < len(algebra.rounds):  # environments hide which engine answered
                points.append((0, max(algebra.shares[index]), one.generate_s))
    factors = [1.0] * len(devices)
    laws = Law.fitted([(number, seconds) for _, number, seconds in points])
    if by_engine and len(devices) > 1:
        for _ in range(3):
            ratios: dict[int, list[float]] = {}
            for engine, number, seconds in points:
                ratios.setdefault(engine, []).append(seconds / max(1e-9, laws[0](number)))
            slow = [median(ratios.get(engine, [1.0])) for engine in range(len(devices))]
            factors = [one / median(slow) for one in slow]
            laws = Law.fitted([(n, s / factors[engine]) for engine, n, s in points])
    learned = sum(max(map(len, ranks)) for ranks in algebra.rounds)
    learn_s = fmean(sum(one.learn_s for one in step.rounds) for step in steps) / learned
    draw_s = fmean(step.draw_s for step in steps)
    finish_s = fmean(step.finish_s for step in steps)
    rest_s = fmean(step.sync_s for step in steps)
    if not config.rollout_matching.max_staleness:
        # With staleness, the rest of a step is also a wait for the next step's first round.
        rest_s += fmean(step.bounds()["driver"] for step in steps)
    rest = (tuple(factors), learn_s, draw_s, finish_s, rest_s)
    return tuple(StepModel(config, tuple(devices), law, *rest) for law in laws)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the configuration, and the step that the model expects of it."""

    text: str
    """The keys with their new values."""
    model: StepModel
    step_s: float
    """Seconds of a step, for as many rollouts as now."""


def changes(models: Sequence[StepModel], steps: Sequence[StepTimes]) -> list[Change]:
    """Try the changes that the run's kind of engines permits, best first.

    With two models a change counts with the one that expects less of it.
    """
    found = []
    for text, change in _candidates(models[0], steps):
        try:
            tried = [change(model) for model in models]
            seconds = [_expected_s(*pair, steps) for pair in zip(models, tried, strict=True)]
        except ValueError:  # too few rollouts for the ranks
            continue
        found.append(Change(text, tried[0], max(seconds)))
    return sorted(found, key=lambda one: one.step_s)


def _expected_s(model: StepModel, changed: StepModel, steps: Sequence[StepTimes]) -> float:
    """Return the seconds of a step after the change, for as many rollouts as now.

    What a measured step takes longer than the model, because lengths vary, is added.
    """
    scale = model.config.raw_rollouts_per_step / changed.config.raw_rollouts_per_step
    offset_s = fmean(step.step_s for step in steps) - model.step_s()
    return scale * (changed.step_s() + offset_s)


def _with(section: Any, key: str, value: object) -> Any:
    """Return the section of the configuration with another value at a dotted key."""
    name, _, rest = key.partition(".")
    inner = _with(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})


def _with_engine(model: StepModel, config: RunConfig) -> StepModel:
    """Return the model with one more engine, like the last one and as fast as the median."""
    devices = (*model.devices, model.devices[-1])
    return replace(model, config=config, devices=devices, factors=(*model.factors, 1.0))


Try = Callable[[StepModel], StepModel]


def _candidates(model: StepModel, steps: Sequence[StepTimes]) -> Iterator[tuple[str, Try]]:
    """Yield each change: its text, and a function that makes it in a model."""
    config = model.config
    section = config.rollout_matching
    location = section.backend.location

    def setting(key: str, value: object, condition: str = "") -> tuple[str, Try]:
        text = f"{key}={str(value).lower()}{condition}"
        return text, lambda one: replace(one, config=_with(one.config, key, value))

    def learning(text: str, part: float) -> tuple[str, Try]:
        """Let the learner need this part of its seconds."""
        return text, lambda one: replace(
            one, learn_s=one.learn_s * part, finish_s=one.finish_s * part
        )

    all_b = config.num_b_steps == config.training.num_steps
    number = len(model.devices) + 1
    if location is EngineLocation.ACTORS:
        key = "rollout_matching.vllm.actors.num_actors"
        text = f"{key}={number}{WITH_ROOM}"
        yield text, lambda one: _with_engine(one, _with(one.config, key, number))
    elif location is EngineLocation.SERVERS:
        yield f"{number} servers", lambda one: _with_engine(one, one.config)
    if location is not EngineLocation.RANKS:
        yield setting("learner.world_size", config.learner.world_size + 1, WITH_ROOM)
        if not config.stage2_ab.channel_b.enable_pipeline:
            yield setting("stage2_ab.channel_b.enable_pipeline", True)
        elif not section.max_staleness and not RunSchedule(config).refill_rounds and all_b:
            yield setting("rollout_matching.max_staleness", 1)
    size = section.decode_batch_size
    yield setting("rollout_matching.decode_batch_size", 2 * size)
    if size > 1:
        yield setting("rollout_matching.decode_batch_size", size // 2)
    if (threads := config.learner.cpu_threads) is not None:
        text = f"learner.cpu_threads={threads + 1} (with a free core)"
        yield learning(text, threads / (threads + 1))
    if (row_s := _row_s(steps)) is not None:
        saved_s = row_s * fmean(step.num_rows for step in steps) / 2
        text = f"global_max_length={2 * config.global_max_length} (if memory allows)"
        yield learning(text, max(0.0, 1 - saved_s / fmean(step.learn_s for step in steps)))


def _row_s(steps: Sequence[StepTimes]) -> float | None:
    """Return the seconds that a packed row costs besides its tokens; None if unknown."""
    rows = np.array([[step.num_rows, step.num_tokens] for step in steps])
    if len(steps) < 6 or np.linalg.matrix_rank(rows) < 2:
        return None
    learn_s = np.array([step.learn_s for step in steps])
    (row_s, token_s), rest, _, _ = np.linalg.lstsq(rows, learn_s, rcond=None)
    explains = rest.sum() <= (1 - EXPLAINED) * len(steps) * learn_s.var()
    return float(row_s) if explains and row_s > 0 and token_s > 0 else None


def verdict(config: RunConfig, devices: Sequence[int], steps: Sequence[StepTimes]) -> str:
    """Return one line about these steps: the bound, idle processes, and the best changes.

    `devices`: number of devices of each engine.
    """
    step_s = fmean(step.step_s for step in steps)
    bounds = [step.bounds() for step in steps]
    parts = {name: fmean(one[name] for one in bounds) for name in bounds[0]}
    order = sorted(parts, key=parts.__getitem__, reverse=True)
    shares = [f"{name} {parts[name] / step_s:.0%}" for name in order if parts[name] >= step_s / 100]
    names = sorted({name for step in steps for name in step.busy_s})
    idle = [f"{name} {fmean(step.idle_share(name) for step in steps):.0%}" for name in names]
    text = f"{len(steps)} steps of {step_s:.2f} s: bounded by {', '.join(shares)}; idle:"
    text += f" {', '.join(idle)}"
    with_rounds = [step for step in steps if step.rounds]
    if not devices or not with_rounds:
        return text
    try:
        tried = changes(fitted(config, devices, with_rounds), with_rounds)
    except ValueError:
        return text
    b_step_s = fmean(step.step_s for step in with_rounds)
    helping = [one for one in tried if b_step_s - one.step_s >= LEAST_GAIN * b_step_s]
    best = [f"{one.text} {(b_step_s - one.step_s) / b_step_s:.0%}" for one in helping[:3]]
    return f"{text}; would save of a channel-B step: {', '.join(best) or 'nothing that was tried'}"


def read_times(folder: Path, lines: Sequence[Mapping[str, Any]]) -> list[StepTimes]:
    """Read the times of a run's steps from its timeline; an empty list without a timeline.

    `lines`: the run's metrics. Raises OSError, and RecordError for a damaged line.
    """
    tracks: dict[int, str] = {}
    spans: dict[int, list[Span]] = {}
    for event in read_timeline(folder / "timeline.json"):
        if event["name"] == "thread_name":
            tracks[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X" and "step" in event["args"]:
            start_s = event["ts"] / 1e6
            end_s = start_s + event["dur"] / 1e6
            span = Span(tracks[event["tid"]], event["name"], start_s, end_s, event["args"])
            spans.setdefault(event["args"]["step"], []).append(span)
    return [StepTimes.of(spans[line["step"]], line) for line in lines if line["step"] in spans]
