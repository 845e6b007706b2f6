"""Which checkpoints are kept: decided without a model (issue: periodic and best-k checkpoints)."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.runtime.checkpoints import KeptCheckpoint, Retention, RetentionChange, RetentionReason
from shared.config.training import CheckpointSection

FOLDER = Path("run/checkpoints")
PERIODIC, BEST = RetentionReason.PERIODIC, RetentionReason.BEST


def at(step):
    return FOLDER / f"step_{step:06d}"


def retention(**config):
    return Retention(CheckpointSection.model_validate(config), FOLDER)


def kept(retention):
    return [(entry.step, entry.score, entry.reasons) for entry in retention.kept]


def test_by_default_nothing_is_saved_on_the_way():
    plain = retention()
    assert [plain.after_step(step) for step in range(1, 5)] == [RetentionChange()] * 4
    assert plain.after_report(4, 0.9) == RetentionChange()
    assert plain.kept == ()


def test_the_newest_periodic_ones_are_kept_and_an_older_one_goes_when_the_new_one_is_complete():
    periodic = retention(save_steps=10, keep_last=2)
    changes = {step: periodic.after_step(step) for step in range(1, 41)}
    assert {step: change for step, change in changes.items() if change != RetentionChange()} == {
        10: RetentionChange(at(10)),
        20: RetentionChange(at(20)),
        30: RetentionChange(at(30), (at(10),)),
        40: RetentionChange(at(40), (at(20),)),
    }
    assert kept(periodic) == [(30, None, (PERIODIC,)), (40, None, (PERIODIC,))]


def test_the_best_by_f1_are_kept_whenever_they_were():
    best = retention(keep_best=2)
    told = [(0, 0.1), (20, 0.5), (40, 0.3), (60, 0.2), (80, 0.6)]
    assert [best.after_report(*report) for report in told] == [
        RetentionChange(at(0)),
        RetentionChange(at(20)),
        RetentionChange(at(40), (at(0),)),
        RetentionChange(),
        RetentionChange(at(80), (at(40),)),
    ]
    assert kept(best) == [(20, 0.5, (BEST,)), (80, 0.6, (BEST,))]


def test_of_equal_ones_the_older_stays_and_nothing_is_written():
    best = retention(keep_best=1)
    best.after_report(10, 0.5)
    assert best.after_report(20, 0.5) == RetentionChange()


def test_a_periodic_one_that_is_the_best_is_saved_once_and_outlives_the_newer_ones():
    both = retention(save_steps=10, keep_last=1, keep_best=1)
    assert both.after_step(10) == RetentionChange(at(10))
    assert both.after_report(10, 0.7) == RetentionChange(), "it is there already"
    assert kept(both) == [(10, 0.7, (PERIODIC, BEST))]
    assert both.after_step(20) == RetentionChange(at(20))
    assert both.after_report(20, 0.6) == RetentionChange()
    assert kept(both) == [(10, 0.7, (BEST,)), (20, 0.6, (PERIODIC,))]
    assert both.after_step(30) == RetentionChange(at(30), (at(20),))
    assert both.after_report(30, 0.8) == RetentionChange(None, (at(10),)), (
        "what was the best is not any more"
    )
    assert kept(both) == [(30, 0.8, (PERIODIC, BEST))]


@pytest.mark.parametrize("keep_last", [1, 3])
@pytest.mark.parametrize("keep_best", [0, 2])
def test_what_is_there_is_always_what_a_slow_look_at_the_whole_history_keeps(keep_last, keep_best):
    history, there, every = (
        [],
        set(),
        retention(save_steps=3, keep_last=keep_last, keep_best=keep_best),
    )
    for step in range(1, 60):
        changes = [every.after_step(step)]
        if step % 2 == 0:
            f1 = (step * 37 % 23) / 23
            history.append((step, f1))
            changes.append(every.after_report(step, f1))
        for change in changes:
            there |= set() if change.save is None else {change.save}
            assert set(change.delete) <= there, "only what is there is deleted"
            there -= set(change.delete)
        newest = [s for s in range(1, step + 1) if s % 3 == 0][-keep_last:]
        best = [
            s for s, _ in sorted(history, key=lambda report: (-report[1], report[0]))[:keep_best]
        ]
        assert there == {entry.folder for entry in every.kept} == {at(s) for s in {*newest, *best}}


def test_an_entry_is_what_the_index_says_of_it():
    assert KeptCheckpoint(123, at(123)).folder.name == "step_000123"
