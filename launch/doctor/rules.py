"""The rules of the doctor: what goes wrong in training, and what to do (docs/how_to/doctor.md).

A rule judges figures that a run computes anyway: lines of `metrics.jsonl` and
`evaluations.jsonl`, and the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan, prod
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from launch.checks.model_shape import read_headers
from shared.config import RunConfig
from shared.errors import ConfigError
from shared.metrics import REWARD_FAMILY, SOURCE_FAMILY, TASK_FAMILY

Line = Mapping[str, Any]

NO_OBJECTS = 0.1
"""Valid objects per ground-truth object at which a model counts as writing none."""
LEAST_RISE = 0.1
"""Least change of a reward or match rate, as a share of the larger value, that counts as a rise."""
BEFORE = 20
"""Maximum number of steps that a judged window is compared with."""
CLEAR = 3.0
"""Least change of a reward part that counts, in standard errors."""
LEAST_OBJECTS = 5
"""Least number of objects in a step, or of a class in a report, whose shares are judged."""
ADAPTER_RATES = (1e-6, 2e-3)
FULL_RATES = ((1e9, 1e-7, 1e-4), (1e8, 1e-7, 5e-4), (0.0, 1e-6, 5e-3))
"""The usual peak learning rates, at most and at least: of adapters, and of all weights of models
with at least so many parameters."""
GAP_FLOORS = {"float32": 1e-4, "bfloat16": 0.02}
"""Mean differences of log-probabilities, in nats, below which growth is not judged."""


class History:
    """A run's figures so far: one list for each figure, with an entry per step that has it."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.steps: list[Line] = []
        self.reports: list[Line] = []
        self.classes: list[Mapping[str, tuple[float, int]]] = []
        """For each held-out report, by class: F1 and number of ground-truth objects."""
        self.num_parameters = _num_parameters(config)
        """None if the checkpoint cannot be read (any more)."""
        self._values: dict[str, list[float]] = {}

    def add(self, line: Line) -> None:
        """Add a line of metrics.jsonl."""
        self.steps.append(line)
        for name, figure in FIGURES.items():
            if (value := figure(line, self.config)) is not None:
                self._values.setdefault(name, []).append(value)

    def of(self, figure: str) -> Sequence[float]:
        return self._values.get(figure, ())

    def last(self, figure: str, window: int) -> float | None:
        """Return the figure's median in its last `window` steps; None before there are so many."""
        values = self.of(figure)
        return median(values[-window:]) if len(values) >= window else None

    def ends(self, figure: str, window: int) -> tuple[float, float]:
        """Return the figure's medians in its first and its last `window` steps.

        Both are NaN, which no comparison accepts, before there are twice as many steps.
        """
        values = self.of(figure)
        if len(values) < 2 * window:
            return nan, nan
        return median(values[:window]), median(values[-window:])

    def learns(self, window: int) -> bool:
        """Return whether the reward, or else the match rate, has risen since the first steps."""
        for figure in ("reward", "match rate"):
            if self.of(figure):
                first, last = self.ends(figure, window)
                return last - first >= LEAST_RISE * max(abs(first), abs(last), 1e-9)
        return False


Judge = Callable[[History, "Rule"], float | None]
"""Returns the value of a rule's figure if it is beyond the threshold, else None."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Something that goes wrong in training, the figure that shows it, and what to do."""

    name: str
    figure: str
    """What is judged, as messages name it; a key of `FIGURES` if a general judge reads it."""
    judge: Judge
    threshold: float
    window: int
    """The figure is judged over so many steps (or held-out reports)."""
    page: str
    """Page of the documentation, below docs/."""
    cause: str
    remedy: str
    explained_by: tuple[str, ...] = ()
    """Rules after whose finding this one is not told, because it has the same cause."""


Figure = Callable[[Line, RunConfig], float | None]


def _share(part: str, whole: str, least: int = 1) -> Figure:
    def figure(line: Line, _config: RunConfig) -> float | None:
        if part not in line or line.get(whole, 0) < least:
            return None
        return float(line[part]) / float(line[whole])

    return figure


def _metric(name: str) -> Figure:
    return lambda line, _config: line.get(name)


def _has(line: Line, *counts: str) -> bool:
    """Return whether a line has all these counts of rollouts, and any rollouts."""
    return line.get("rollout/num", 0) > 0 and all(f"rollout/{name}" in line for name in counts)


def _left_open(line: Line, _config: RunConfig) -> float | None:
    """Return the share of answers that opened, and that the model ended before they were closed."""
    if not _has(line, "num_fallback", "num_truncated", "num_length_limited"):
        return None
    open_ = line["rollout/num_truncated"] - line["rollout/num_length_limited"]
    return max(0.0, open_ - line["rollout/num_fallback"]) / float(line["rollout/num"])


def _never_opened(line: Line, _config: RunConfig) -> float | None:
    if not _has(line, "num_fallback", "num_truncated"):
        return None
    # An empty list is a fallback, too, but is closed.
    broken = min(line["rollout/num_fallback"], line["rollout/num_truncated"])
    return float(broken) / float(line["rollout/num"])


def _top_name(line: Line, _config: RunConfig) -> float | None:
    if not _has(line, "num_valid_objects", "top_name_share", "top_name_share_of_truth"):
        return None
    if line["rollout/num_valid_objects"] < LEAST_OBJECTS:
        return None
    return float(line["rollout/top_name_share"] - line["rollout/top_name_share_of_truth"])


def _length(line: Line, config: RunConfig) -> float | None:
    if "rollout/length" not in line:
        return None
    limit = config.rollout_matching.max_new_tokens * line.get("rollout/turns", 1.0)
    return float(line["rollout/length"]) / limit if limit else None


def _gap(line: Line, config: RunConfig) -> float | None:
    """Return the learner's difference from the engines, as a multiple of what is judged."""
    if (mean := line.get("policy/logprob_difference")) is not None:
        return float(mean) / GAP_FLOORS[config.model.dtype]
    largest = line.get("rollout/logprob_max_abs")
    return None if largest is None else float(largest) / (0.5 * config.logprob_tolerance)


def _no_gradient(line: Line, _config: RunConfig) -> float | None:
    # Groups without signal explain a gradient of 0; they have a rule of their own.
    if "optim/grad_norm" not in line or line.get("rollout/no_signal_share") == 1:
        return None
    return float(line["optim/grad_norm"] <= 1e-10)


FIGURES: dict[str, Figure] = {
    "answers that never open": _never_opened,
    "answers left open": _left_open,
    "answers cut by length": _metric("rollout/length_limited_rate"),
    "length / max_new_tokens": _length,
    "valid objects / ground truth": _share(
        "rollout/num_valid_objects", "rollout/num_ground_truth", LEAST_OBJECTS
    ),
    "match rate": _metric("rollout/match_rate"),
    "doubles / valid objects": _share(
        "rollout/num_doubles", "rollout/num_valid_objects", LEAST_OBJECTS
    ),
    "share of the top name, above the truth's": _top_name,
    "reward": _metric("rollout/reward"),
    "groups without signal": _metric("rollout/no_signal_share"),
    "entropy / entropy at the start": _metric("policy/entropy"),
    "difference of log-probabilities / its floor": _gap,
    "tokens with a ratio above ratio_cap": _metric("policy/capped_share"),
    "updates without gradient": _no_gradient,
    "carried segments / segments of a step": _share("packing/num_carried", "packing/num_segments"),
    "distance from coordinates (w1)": _metric("loss/coord_reg.w1"),
    "text loss": _metric("loss/token_ce"),
    "lr_warmup_steps / steps of the run": lambda _line, config: (
        config.training.lr_warmup_steps / config.training.num_steps
    ),
    "frozen language model (1: yes)": lambda _line, config: float(
        config.training.parts.language_model.frozen
    ),
    "tool calls": _metric("rollout/num_tool_calls"),
}
"""The figures that general judges read, as numbers of one step; None if a step has none."""


def above(history: History, rule: Rule) -> float | None:
    """Judge whether the median of the last steps is at least the threshold."""
    last = history.last(rule.figure, rule.window)
    return last if last is not None and last >= rule.threshold else None


def below(history: History, rule: Rule) -> float | None:
    """Judge whether the median of the last steps is at most the threshold."""
    last = history.last(rule.figure, rule.window)
    return last if last is not None and last <= rule.threshold else None


def _unless_learning(judge: Judge) -> Judge:
    """Judge only while reward and match rate do not rise: a solved task looks like this too."""
    return lambda history, rule: None if history.learns(rule.window) else judge(history, rule)


def _mean_above(history: History, rule: Rule) -> float | None:
    values = history.of(rule.figure)[-rule.window :]
    mean = fmean(values) if len(values) == rule.window else 0.0
    return mean if mean >= rule.threshold else None


def _falls(history: History, rule: Rule) -> float | None:
    """Judge the last steps as a share of the first."""
    first, last = history.ends(rule.figure, rule.window)
    return last / first if last <= rule.threshold * first and first > 0 else None


def _no_match(history: History, rule: Rule) -> float | None:
    valid = history.last("valid objects / ground truth", rule.window)
    return below(history, rule) if valid is not None and valid > NO_OBJECTS else None


def _gap_grows(history: History, rule: Rule) -> float | None:
    first, last = history.ends(rule.figure, rule.window)
    return last if last >= max(1.0, rule.threshold * first) else None


def _cut(history: History, rule: Rule) -> float | None:
    if history.config.algorithm.uses_environment:
        # A reward may not need the end of an answer: then answers were cut from the start.
        first, _ = history.ends(rule.figure, rule.window)
        if not first < rule.threshold or history.learns(rule.window):
            return None
    return above(history, rule)


def _to_the_limit(history: History, rule: Rule) -> float | None:
    first, last = history.ends(rule.figure, rule.window)
    return last if last >= max(rule.threshold, 1.5 * first) else None


def _drop_reason(history: History, rule: Rule) -> float | None:
    """Judge by how much the share of entries dropped for one reason is above that before."""
    counts = ("num_valid_objects", "num_dropped_objects")
    lines = [one for one in history.steps[-4 * BEFORE :] if _has(one, *counts)]
    lines = lines[-BEFORE - rule.window :]
    if len(lines) < 2 * rule.window:
        return None
    prefix = "rollout/num_dropped."
    rises = []
    last = lines[-rule.window :]
    for name in {name for one in last for name in one if name.startswith(prefix)}:
        if median(one.get(name, 0.0) for one in last) < LEAST_OBJECTS:
            continue
        shares = [
            one.get(name, 0.0)
            / max(1, one["rollout/num_valid_objects"] + one["rollout/num_dropped_objects"])
            for one in lines
        ]
        rises.append(median(shares[-rule.window :]) - median(shares[: -rule.window]))
    return _beyond(rises, rule)


def _gradient_jumps(history: History, rule: Rule) -> float | None:
    """Judge the last norm as a multiple of the median before, on the same channel."""
    last = history.steps[-1] if history.steps else {}
    if "optim/grad_norm" not in last:
        return None
    same = [one for one in history.steps[-2 * BEFORE : -1] if one["channel"] == last["channel"]]
    norms = [one["optim/grad_norm"] for one in same if one.get("optim/grad_norm")]
    is_early = len(norms) < BEFORE // 2
    return None if is_early else _beyond([last["optim/grad_norm"] / median(norms)], rule)


def _uncalled(history: History, rule: Rule) -> float | None:
    if any(history.of("tool calls")):
        return None
    offered = sum(line["rollout/num"] for line in history.steps if "rollout/num_tool_calls" in line)
    return _beyond([float(offered)], rule)


def _carry_grows(history: History, rule: Rule) -> float | None:
    values = history.of(rule.figure)[-rule.window :]
    if len(values) < rule.window:
        return None
    before, last = (median(half) for half in np.array_split(values, 2))
    return float(last) if last >= max(rule.threshold, 1.5 * before) else None


def _frozen_vision(history: History, rule: Rule) -> float | None:
    """Judge the distance from coordinates, if it stays while the text improves."""
    parts = history.config.training.parts
    if not (parts.vision_tower.frozen or parts.aligner.frozen):
        return None
    first_text, last_text = history.ends("text loss", rule.window)
    first, last = history.ends(rule.figure, rule.window)
    stays = last >= max(rule.threshold, 0.95 * first) and last_text <= 0.8 * first_text
    return last if stays else None


def _held_out_falls(history: History, rule: Rule) -> float | None:
    """Judge by what share the last reports are below the best, if training improves meanwhile."""
    scored = [one for one in history.reports if one["score"] is not None]
    if len(scored) <= rule.window:
        return None
    best = max(scored, key=lambda one: one["score"])
    fall = 1 - max(one["score"] for one in scored[-rule.window :]) / max(1e-9, best["score"])
    if fall < rule.threshold:
        return None
    for name, sign in (("rollout/reward", 1), ("rollout/match_rate", 1), ("loss/total", -1)):
        lines = [line for line in history.steps if name in line]
        before = [sign * line[name] for line in lines if line["step"] <= best["step"]][-BEFORE:]
        after = [sign * line[name] for line in lines if line["step"] > best["step"]][-BEFORE:]
        if before and after:
            return fall if median(after) > median(before) else None
    return None


def _class_falls(history: History, rule: Rule) -> float | None:
    """Judge by how much the F1 of a class has fallen while the score of the report has risen."""
    if len(history.classes) < rule.window:
        return None
    first, last = history.classes[0], history.classes[-1]
    if (history.reports[-1]["score"] or 0.0) < (history.reports[0]["score"] or 0.0):
        return None
    both = [name for name in first if name in last and first[name][1] >= LEAST_OBJECTS]
    return _beyond([first[name][0] - last[name][0] for name in both], rule)


def _source_falls(history: History, rule: Rule) -> float | None:
    """Judge by what share a source's match rate, or a task's reward, is below its first steps."""
    for family, whole in (
        (f"{SOURCE_FAMILY}match_rate/", "rollout/match_rate"),
        (TASK_FAMILY, "rollout/reward"),
    ):
        if not any(name.startswith(family) for line in history.steps[-1:] for name in line):
            continue
        lines = [line for line in history.steps if whole in line]
        if len(lines) < 2 * rule.window:
            continue
        first, last = lines[: rule.window], lines[-rule.window :]
        if median(one[whole] for one in last) < 0.9 * median(one[whole] for one in first):
            continue
        falls = []
        for name in (name for name in lines[-1] if name.startswith(family)):
            before = [one[name] for one in first if name in one]
            after = [one[name] for one in last if name in one]
            if before and after and median(before) > 0:
                falls.append(1 - median(after) / median(before))
        if (found := _beyond(falls, rule)) is not None:
            return found
    return None


def _one_part_pays(history: History, rule: Rule) -> float | None:
    """Judge what the falling parts of a reward lose, as a share of what the risen part gains.

    The weights of the parts are the solution of `reward = sum(weight x part)` over the steps.
    Without an exact solution nothing is judged.
    """
    lines = [one for one in history.steps[-BEFORE:] if "rollout/reward" in one]
    names = [name for name in (lines[-1] if lines else ()) if name.startswith(REWARD_FAMILY)]
    if len(lines) < max(rule.window, 2 * len(names)) or len(names) < 2:
        return None
    if not all(name in line for name in names for line in lines):
        return None
    parts = np.array([[float(line[name]) for name in names] for line in lines])
    reward = np.array([float(line["rollout/reward"]) for line in lines])
    parts -= parts.mean(axis=0)
    reward -= reward.mean()
    parts = parts[:, np.abs(parts).max(axis=0) > 1e-9]
    weights, _, rank, _ = np.linalg.lstsq(parts, reward, rcond=None)
    if rank < parts.shape[1] or np.abs(parts @ weights - reward).max() > 1e-3:
        return None
    paid = parts * weights
    early, late = np.array_split(paid, 2)
    gains = late.mean(axis=0) - early.mean(axis=0)
    noise = np.sqrt(early.var(axis=0) / len(early) + late.var(axis=0) / len(late))
    clear = np.abs(gains) >= CLEAR * noise
    if gains.sum() <= 0 or not (clear & (gains > 0)).any() or not (clear & (gains < 0)).any():
        return None
    return _beyond([float(-gains[clear].min() / gains[clear].max())], rule)


def _beyond(values: Sequence[float], rule: Rule) -> float | None:
    most = max(values, default=float("-inf"))
    return most if most >= rule.threshold else None


def _rate(history: History, rule: Rule) -> float | None:
    """Judge the factor by which a peak learning rate is outside of the usual range."""
    config = history.config
    low, high = ADAPTER_RATES
    if config.model.adapter is None:
        if history.num_parameters is None:
            return None
        low, high = next(rest for least, *rest in FULL_RATES if history.num_parameters >= least)
    training = config.training
    rates = [
        part.learning_rate or training.learning_rate
        for _, part in training.parts.items()
        if not part.frozen
    ]
    return _beyond([factor for rate in rates for factor in (rate / high, low / rate)], rule)


def _num_parameters(config: RunConfig) -> int | None:
    try:
        return sum(map(prod, read_headers(Path(config.model.path)).values()))
    except (OSError, ConfigError):
        return None


JUDGES: dict[str, Judge] = {
    "above": above,
    "below": below,
    "mean above": _mean_above,
    "cut": _cut,
    "matches": _no_match,
    "rise of a reason": _drop_reason,
    "class": _class_falls,
    "source": _source_falls,
    "falls": _unless_learning(_falls),
    "signal": _unless_learning(_mean_above),
    "one part": _one_part_pays,
    "held out": _held_out_falls,
    "to the limit": _to_the_limit,
    "gap": _gap_grows,
    "jump": _gradient_jumps,
    "carry": _carry_grows,
    "vision": _frozen_vision,
    "rate": _rate,
    "tools": _uncalled,
}

_TABLE = """
answers never open | answers that never open | above | 0.5 | 3 | tutorials/detection.md | the model
    does not write the answer format, so nothing can be matched | train longer on ground truth first
    (stage2_ab.schedule.warmup_steps), or begin from a checkpoint that knows the format; check
    data.answer_format
answers left open | answers left open | above | 0.3 | 3 | tutorials/detection.md | the model ends
    its answers before they are closed | more steps of channel A (warmup_steps, a lower b_ratio);
    look at one with `show-sample`
answers cut by length | answers cut by length | cut | 0.3 | 3 | how_to/troubleshooting.md | answers
    reach max_new_tokens, so their ends are neither seen nor learned | raise
    rollout_matching.max_new_tokens, set decoding.stop, or turn on repeat_terminate | answers never
    open
no valid objects | valid objects / ground truth | below | 0.1 | 4 | tutorials/detection.md | the
    model is too weak to learn from its own rollouts yet | more steps of channel A: a longer
    warmup_steps, a lower b_ratio, or another checkpoint | answers never open
no matches | match rate | matches | 0.05 | 4 | tutorials/detection.md | objects are valid, but
    almost none matches the ground truth | more steps of channel A, or begin with a smaller gate
    (maskiou_gate, maskiou_gate_schedule)
doubles | doubles / valid objects | above | 0.2 | 4 | explanation/objectives.md | the model writes
    the same object several times | trim_trailing_false_positives, repetition_penalty, or a lower
    b_ratio
a drop reason jumps | rise of a reason's share of entries | rise of a reason | 0.15 | 3 |
    how_to/troubleshooting.md | a part of the answer's format is being unlearned | see which
    `rollout/num_dropped.*` rises and look at it with `show-sample`; lower training.learning_rate
class collapse | share of the top name, above the truth's | above | 0.4 | 4 |
    explanation/objectives.md | almost all objects get the same name | raise desc_ce_weight, balance
    data.train, or lower training.learning_rate
a class falls | fall of a class's held-out F1 while the score rises | class | 0.3 | 2 |
    how_to/mix_data.md | one class is unlearned | give it more rows: data.train with weights
a source falls | fall of a source's match rate or a task's reward | source | 0.3 | 5 |
    how_to/mix_data.md | one source gets worse while the whole does not | change the weights of
    data.train, or the share of the environment
entropy collapse | entropy / entropy at the start | falls | 0.1 | 4 | tutorials/language_model.md |
    the policy does not explore any more, and the reward does not rise | lower
    training.learning_rate, add reference_kl, or raise decoding.temperature
no signal | groups without signal | signal | 0.6 | 6 | tutorials/language_model.md | rewards of a
    group are all equal, so its rollouts teach nothing | raise decoding.temperature or
    rollouts_per_example, use easier rows, refill_rounds or a larger max_new_tokens, or give the
    reward in parts
one part pays | loss of a reward part / gain of another | one part | 0.25 | 10 |
    tutorials/language_model.md | the reward rises through one part while another falls | lower the
    weight of the part that rises, or limit it
held-out falls | fall of the held-out score below its best | held out | 0.1 | 2 | how_to/evaluate.md
    | training improves while the held-out score falls: overfitting, or a reward that is gamed | use
    the best checkpoint (checkpoint.keep_best), more data, or another reward
length runs to the limit | length / max_new_tokens | to the limit | 0.8 | 4 |
    tutorials/language_model.md | answers grow towards max_new_tokens | let length cost reward, or
    turn on repeat_terminate
length runs to nothing | length / max_new_tokens | falls | 0.3 | 4 | tutorials/language_model.md |
    answers shrink without a gain: the model learns to end at once | check the reward of short
    answers, and how the end is taught (fp_end_weight)
learner and engine part | difference of log-probabilities / its floor | gap | 4 | 3 |
    how_to/troubleshooting.md | learner and engines compute ever more different probabilities |
    compare processor, dtype and head_dtype; lower staleness or training.learning_rate
ratios at the cap | tokens with a ratio above ratio_cap | above | 0.05 | 3 |
    tutorials/language_model.md | the policy is far from the one that sampled | lower
    training.learning_rate, updates_per_batch or max_staleness
gradient jumps | gradient norm / median before | jump | 10 | 1 | how_to/troubleshooting.md | an
    update is far larger than those before | look at the step's samples; set max_grad_norm, or lower
    training.learning_rate
no gradient | updates without gradient | mean above | 0.5 | 6 | explanation/objectives.md | updates
    change nothing, although there are rewards or targets | check the weights of the objective's
    modules, the advantages, and which parts are frozen
always warming up | lr_warmup_steps / steps of the run | above | 0.5 | 1 |
    how_to/troubleshooting.md | the learning rate is below its peak for most of the run | lower
    training.lr_warmup_steps, or train longer
carried segments grow | carried segments / segments of a step | carry | 1 | 8 |
    explanation/objectives.md | more segments are generated than learned, and they get old | lower
    per_device_train_batch_size, or raise global_max_length
frozen language model | frozen language model (1: yes) | above | 1 | 1 |
    how_to/memory_and_adapters.md | the part that writes the answers does not learn | set
    training.parts.language_model.frozen: false
frozen vision | distance from coordinates (w1) | vision | 0.05 | 10 | how_to/memory_and_adapters.md
    | the text improves and the coordinates do not, while the vision tower or the aligner is frozen
    | set training.parts.vision_tower.frozen and aligner.frozen: false
unusual learning rate | learning rate / limit of the usual range | rate | 1.001 | 1 |
    how_to/memory_and_adapters.md | models of this size, or adapters, usually take another rate |
    move training.learning_rate (or parts.*.learning_rate) towards the range
uncalled tools | rollouts with tools and no call | tools | 8 | 1 | reference/environments.md | no
    rollout has called a tool, although tools were offered | read answers: the chat template must
    show the tools, and environment.tool_call_parser must read the calls
"""
"""One rule per line: name, figure, judge, threshold, window, page, cause, remedy, explained by."""


def _read(table: str) -> Iterator[Rule]:
    for line in table.strip().replace("\n    ", " ").splitlines():
        name, figure, judge, threshold, window, page, cause, remedy, *rest = line.split(" | ")
        limits = float(threshold), int(window)
        yield Rule(name, figure, JUDGES[judge], *limits, page, cause, remedy, tuple(rest))


RULES: tuple[Rule, ...] = tuple(_read(_TABLE))
