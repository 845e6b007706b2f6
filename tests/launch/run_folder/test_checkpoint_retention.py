"""Which checkpoints are kept: decided without a model (issue: periodic and best-k checkpoints)."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.run_folder.checkpoints import Retention, RetentionChange, RetentionReason
from shared.config.training import CheckpointSection

FOLDER = Path("run/checkpoints")
PERIODIC = RetentionReason.PERIODIC
BEST = RetentionReason.BEST
NOTHING = RetentionChange()


def at(step):
    return FOLDER / f"step_{step:06d}"


def retention(**config):
    return Retention(CheckpointSection.model_validate(config), FOLDER)


def kept(retention):
    return [(entry.step, entry.score, entry.reasons) for entry in retention.kept]


def test_by_default_nothing_is_saved_on_the_way():
    plain = retention()
    assert [plain.after_step(step) for step in range(1, 5)] == [NOTHING] * 4
    assert plain.after_report(4, 0.9) == NOTHING
    assert plain.kept == ()


def test_the_newest_periodic_ones_are_kept_and_an_older_one_goes_when_the_new_one_is_complete():
    periodic = retention(save_steps=10, keep_last=2)
    changes = {step: periodic.after_step(step) for step in range(1, 41)}
    assert {step: change for step, change in changes.items() if change != NOTHING} == {
        10: RetentionChange(at(10)),
        20: RetentionChange(at(20)),
        30: RetentionChange(at(30), (at(10),)),
        40: RetentionChange(at(40), (at(20),)),
    }
    assert kept(periodic) == [(30, None, (PERIODIC,)), (40, None, (PERIODIC,))]


def test_the_best_by_f1_are_kept_whenever_they_were_and_of_equal_ones_the_older():
    best = retention(keep_best=2)
    reports = [(0, 0.1), (20, 0.5), (40, 0.3), (60, 0.2), (80, 0.6), (100, 0.5)]
    assert [best.after_report(*report) for report in reports] == [
        RetentionChange(at(0)),
        RetentionChange(at(20)),
        RetentionChange(at(40), (at(0),)),
        NOTHING,
        RetentionChange(at(80), (at(40),)),
        NOTHING,
    ]
    assert kept(best) == [(20, 0.5, (BEST,)), (80, 0.6, (BEST,))]


def test_a_report_without_a_score_is_never_the_best():
    best = retention(keep_best=1)
    assert best.after_report(0, None) == NOTHING
    assert best.after_report(20, -1.5) == RetentionChange(at(20))
    assert best.after_report(40, None) == NOTHING
    assert kept(best) == [(20, -1.5, (BEST,))]


def test_a_periodic_one_that_is_the_best_is_saved_once_and_outlives_the_newer_ones():
    both = retention(save_steps=10, keep_last=1, keep_best=1)
    assert both.after_step(10) == RetentionChange(at(10))
    assert both.after_report(10, 0.7) == NOTHING, "it is saved already"
    assert kept(both) == [(10, 0.7, (PERIODIC, BEST))]
    assert both.after_step(20) == RetentionChange(at(20))
    assert both.after_report(20, 0.6) == NOTHING
    assert kept(both) == [(10, 0.7, (BEST,)), (20, 0.6, (PERIODIC,))]
    assert both.after_step(30) == RetentionChange(at(30), (at(20),))
    assert both.after_report(30, 0.8) == RetentionChange(None, (at(10),)), "no longer the best"
    assert kept(both) == [(30, 0.8, (PERIODIC, BEST))]


@pytest.mark.parametrize("keep_last", [1, 3])
@pytest.mark.parametrize("keep_best", [0, 2])
def test_what_is_there_is_always_what_a_slow_look_at_the_whole_history_keeps(keep_last, keep_best):
    history = []
    saved = set()
    every = retention(save_steps=3, keep_last=keep_last, keep_best=keep_best)
    for step in range(1, 60):
        changes = [every.after_step(step)]
        if step % 2 == 0:
            f1 = (step * 37 % 23) / 23
            history.append((-f1, step))
            changes.append(every.after_report(step, f1))
        for change in changes:
            if change.save is not None:
                saved.add(change.save)
            assert set(change.delete) <= saved, "only what exists is deleted"
            saved -= set(change.delete)
        newest = [earlier for earlier in range(1, step + 1) if earlier % 3 == 0][-keep_last:]
        best = [earlier for _, earlier in sorted(history)[:keep_best]]
        assert saved == {entry.folder for entry in every.kept} == set(map(at, newest + best))
