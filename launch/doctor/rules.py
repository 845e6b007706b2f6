"""The rules of the doctor: what goes wrong in training, and what to do (docs/how_to/doctor.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from launch.doctor.figures import LEAST_OBJECTS, History, has_counts
from shared.metrics import REWARD_FAMILY, SOURCE_FAMILY, TASK_FAMILY

NO_OBJECTS = 0.1
"""Valid objects per ground-truth object at which a model counts as writing none."""
BEFORE = 20
"""Maximum number of steps that a judged window is compared with."""
CLEAR = 3.0
"""Least change of a reward part that counts, in standard errors."""
ADAPTER_RATES = (1e-6, 2e-3)
FULL_RATES = ((1e9, 1e-7, 1e-4), (1e8, 1e-7, 5e-4), (0.0, 1e-6, 5e-3))
"""The usual peak learning rates, at most and at least: of adapters, and of all weights of models
with at least so many parameters."""

Judge = Callable[[History, "Rule"], float | None]
"""Returns the value of a rule's figure if it is beyond the threshold, else None."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Something that goes wrong in training, the figure that shows it, and what to do."""

    name: str
    figure: str
    """What is judged, as messages name it; for a general judge a key of `figures.FIGURES`."""
    judge: Judge
    threshold: float
    window: int
    """The figure is judged over so many steps (or held-out reports)."""
    page: str
    """Page of the documentation, below docs/."""
    cause: str
    remedy: str
    explained_by: tuple[str, ...] = ()
    """Rules with the same cause: once one of them is reported, this one is not."""


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
    lines = [one for one in history.steps[-4 * BEFORE :] if has_counts(one, *counts)]
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


RULES = (
    Rule(
        "answers never open",
        "answers that never open",
        above,
        threshold=0.5,
        window=3,
        page="tutorials/detection.md",
        cause="the model does not write the answer format, so nothing can be matched",
        remedy=(
            "train longer on ground truth first (stage2_ab.schedule.warmup_steps), or begin from a"
            " checkpoint that knows the format; check data.answer_format"
        ),
    ),
    Rule(
        "answers left open",
        "answers left open",
        above,
        threshold=0.3,
        window=3,
        page="tutorials/detection.md",
        cause="the model ends its answers before they are closed",
        remedy=(
            "more steps of channel A (warmup_steps, a lower b_ratio); look at one with"
            " `show-sample`"
        ),
    ),
    Rule(
        "answers cut by length",
        "answers cut by length",
        _cut,
        threshold=0.3,
        window=3,
        page="how_to/troubleshooting.md",
        cause="answers reach max_new_tokens, so their ends are neither seen nor learned",
        remedy=(
            "raise rollout_matching.max_new_tokens, set decoding.stop, or turn on repeat_terminate"
        ),
        explained_by=("answers never open",),
    ),
    Rule(
        "no valid objects",
        "valid objects / ground truth",
        below,
        threshold=0.1,
        window=4,
        page="tutorials/detection.md",
        cause="the model is too weak to learn from its own rollouts yet",
        remedy=(
            "more steps of channel A: a longer warmup_steps, a lower b_ratio, or another checkpoint"
        ),
        explained_by=("answers never open",),
    ),
    Rule(
        "no matches",
        "match rate",
        _no_match,
        threshold=0.05,
        window=4,
        page="tutorials/detection.md",
        cause="objects are valid, but almost none matches the ground truth",
        remedy=(
            "more steps of channel A, or begin with a smaller gate (maskiou_gate,"
            " maskiou_gate_schedule)"
        ),
    ),
    Rule(
        "doubles",
        "doubles / valid objects",
        above,
        threshold=0.2,
        window=4,
        page="explanation/objectives.md",
        cause="the model writes the same object several times",
        remedy="trim_trailing_false_positives, repetition_penalty, or a lower b_ratio",
    ),
    Rule(
        "a drop reason jumps",
        "rise of a reason's share of entries",
        _drop_reason,
        threshold=0.15,
        window=3,
        page="how_to/troubleshooting.md",
        cause="a part of the answer's format is being unlearned",
        remedy=(
            "see which `rollout/num_dropped.*` rises and look at it with `show-sample`; lower"
            " training.learning_rate"
        ),
    ),
    Rule(
        "class collapse",
        "share of the top name, above the truth's",
        above,
        threshold=0.4,
        window=4,
        page="explanation/objectives.md",
        cause="almost all objects get the same name",
        remedy="raise desc_ce_weight, balance data.train, or lower training.learning_rate",
    ),
    Rule(
        "a class falls",
        "fall of a class's held-out F1 while the score rises",
        _class_falls,
        threshold=0.3,
        window=2,
        page="how_to/mix_data.md",
        cause="one class is unlearned",
        remedy="give it more rows: data.train with weights",
    ),
    Rule(
        "a source falls",
        "fall of a source's match rate or a task's reward",
        _source_falls,
        threshold=0.3,
        window=5,
        page="how_to/mix_data.md",
        cause="one source gets worse while the whole does not",
        remedy="change the weights of data.train, or the share of the environment",
    ),
    Rule(
        "entropy collapse",
        "entropy / entropy at the start",
        _unless_learning(_falls),
        threshold=0.1,
        window=4,
        page="tutorials/language_model.md",
        cause="the policy does not explore any more, and the reward does not rise",
        remedy="lower training.learning_rate, add reference_kl, or raise decoding.temperature",
    ),
    Rule(
        "no signal",
        "groups without signal",
        _unless_learning(_mean_above),
        threshold=0.6,
        window=6,
        page="tutorials/language_model.md",
        cause="rewards of a group are all equal, so its rollouts teach nothing",
        remedy=(
            "raise decoding.temperature or rollouts_per_example, use easier rows, refill_rounds or"
            " a larger max_new_tokens, or give the reward in parts"
        ),
    ),
    Rule(
        "one part pays",
        "loss of a reward part / gain of another",
        _one_part_pays,
        threshold=0.25,
        window=10,
        page="tutorials/language_model.md",
        cause="the reward rises through one part while another falls",
        remedy="lower the weight of the part that rises, or limit it",
    ),
    Rule(
        "held-out falls",
        "fall of the held-out score below its best",
        _held_out_falls,
        threshold=0.1,
        window=2,
        page="how_to/evaluate.md",
        cause=(
            "training improves while the held-out score falls: overfitting, or a reward that is"
            " gamed"
        ),
        remedy="use the best checkpoint (checkpoint.keep_best), more data, or another reward",
    ),
    Rule(
        "length runs to the limit",
        "length / max_new_tokens",
        _to_the_limit,
        threshold=0.8,
        window=4,
        page="tutorials/language_model.md",
        cause="answers grow towards max_new_tokens",
        remedy="let length cost reward, or turn on repeat_terminate",
    ),
    Rule(
        "length runs to nothing",
        "length / max_new_tokens",
        _unless_learning(_falls),
        threshold=0.3,
        window=4,
        page="tutorials/language_model.md",
        cause="answers shrink without a gain: the model learns to end at once",
        remedy="check the reward of short answers, and how the end is taught (fp_end_weight)",
    ),
    Rule(
        "learner and engine part",
        "difference of log-probabilities / its floor",
        _gap_grows,
        threshold=4,
        window=3,
        page="how_to/troubleshooting.md",
        cause="learner and engines compute ever more different probabilities",
        remedy="compare processor, dtype and head_dtype; lower staleness or training.learning_rate",
    ),
    Rule(
        "ratios at the cap",
        "tokens with a ratio above ratio_cap",
        above,
        threshold=0.05,
        window=3,
        page="tutorials/language_model.md",
        cause="the policy is far from the one that sampled",
        remedy="lower training.learning_rate, updates_per_batch or max_staleness",
    ),
    Rule(
        "gradient jumps",
        "gradient norm / median before",
        _gradient_jumps,
        threshold=10,
        window=1,
        page="how_to/troubleshooting.md",
        cause="an update is far larger than those before",
        remedy="look at the step's samples; set max_grad_norm, or lower training.learning_rate",
    ),
    Rule(
        "no gradient",
        "updates without gradient",
        _mean_above,
        threshold=0.5,
        window=6,
        page="explanation/objectives.md",
        cause="updates change nothing, although there are rewards or targets",
        remedy=(
            "check the weights of the objective's modules, the advantages, and which parts are"
            " frozen"
        ),
    ),
    Rule(
        "always warming up",
        "lr_warmup_steps / steps of the run",
        above,
        threshold=0.5,
        window=1,
        page="how_to/troubleshooting.md",
        cause="the learning rate is below its peak for most of the run",
        remedy="lower training.lr_warmup_steps, or train longer",
    ),
    Rule(
        "carried segments grow",
        "carried segments / segments of a step",
        _carry_grows,
        threshold=1,
        window=8,
        page="explanation/objectives.md",
        cause="more segments are generated than learned, and they get old",
        remedy="lower per_device_train_batch_size, or raise global_max_length",
    ),
    Rule(
        "frozen language model",
        "frozen language model (1: yes)",
        above,
        threshold=1,
        window=1,
        page="how_to/memory_and_adapters.md",
        cause="the part that writes the answers does not learn",
        remedy="set training.parts.language_model.frozen: false",
    ),
    Rule(
        "frozen vision",
        "distance from coordinates (w1)",
        _frozen_vision,
        threshold=0.05,
        window=10,
        page="how_to/memory_and_adapters.md",
        cause=(
            "the text improves and the coordinates do not, while the vision tower or the aligner"
            " is frozen"
        ),
        remedy="set training.parts.vision_tower.frozen and aligner.frozen: false",
    ),
    Rule(
        "unusual learning rate",
        "learning rate / limit of the usual range",
        _rate,
        threshold=1.001,
        window=1,
        page="how_to/memory_and_adapters.md",
        cause="models of this size, or adapters, usually take another rate",
        remedy="move training.learning_rate (or parts.*.learning_rate) towards the range",
    ),
    Rule(
        "uncalled tools",
        "rollouts with tools and no call",
        _uncalled,
        threshold=8,
        window=1,
        page="reference/environments.md",
        cause="no rollout has called a tool, although tools were offered",
        remedy=(
            "read answers: the chat template must show the tools, and environment.tool_call_parser"
            " must read the calls"
        ),
    ),
)
