"""Steps, reports, full disks, interruptions, kills and resumptions in any order: what is on the
disk is what the index says, and both are what a slow look at the whole history keeps.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

from config_support import configuration
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from saving_learner import SavingLearner

from launch.run_folder.checkpoints import Checkpoints
from launch.run_folder.resume import ResumePoint
from launch.run_folder.saved_checkpoints import full_checkpoints, read_state
from shared.config.training import CheckpointSection
from shared.errors import (
    LearnerError,
    LostLearnerError,
    RolloutError,
    StorageError,
    WeightSyncError,
)
from shared.run_files import Patience

SECTIONS = st.builds(
    CheckpointSection,
    save_steps=st.sampled_from([None, 1, 2, 3]),
    save_minutes=st.none(),
    keep_last=st.sampled_from([1, 2]),
    keep_best=st.sampled_from([0, 1, 2]),
    save_final=st.booleans(),
    background=st.booleans(),
    save_on_interrupt=st.booleans(),
)
SCORES = st.sampled_from([None, -0.5, 0.1, 0.5, 0.9])
ENDS = st.sampled_from(
    [
        KeyboardInterrupt(),
        RolloutError("gone", actor="server-0", phase="generate"),
        WeightSyncError("late", actor="rollout-actor-0", phase="wire"),
        StorageError("metrics.jsonl", "no space", can_pass=True),
        LearnerError("a nan", phase="update"),
        LostLearnerError("its process has ended", phase="update"),
    ]
)
Entry = tuple[str, int, float | None, tuple[str, ...]]
"""Folder, step, score and reasons."""


class RunInAnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.run = Path(tempfile.mkdtemp()) / "run"
        self.run.mkdir()
        self.learner = SavingLearner()
        self.telemetry = Mock(sync_fallback=None)
        self.checkpoints: Checkpoints | None = None
        self.step = 0
        """Updates that the driver has heard of."""
        self.ended = False
        """Whether all steps were taken."""
        self.killed = False
        self.abandoned: list[object] = []
        # The history since the start, or since what a resumption has found.
        self.periodic: dict[int, bool] = {}
        """Complete checkpoints of steps, and whether they are periodic."""
        self.due: set[int] = set()
        """Steps after which a periodic checkpoint was due."""
        self.scores: dict[int, float | None] = {}
        self.final: int | None = None
        self.early: tuple[int, str] | None = None
        self.num_noted = 0

    def teardown(self) -> None:
        shutil.rmtree(self.run.parent)

    @initialize(section=SECTIONS)
    def begin(self, section: CheckpointSection) -> None:
        folder = self.run.parent
        config = configuration(folder / "model", folder / "data", self.run)
        self.section = section
        self.config = config.model_copy(update={"checkpoint": section})
        self._start(None)

    def _start(self, point: ResumePoint | None) -> None:
        self.telemetry.patience = Patience()
        self.killed = self.ended = False
        self.checkpoints = Checkpoints(self.config, self.learner, self.telemetry, point)
        self.context = self.checkpoints.saved_at_an_early_end()
        self.context.__enter__()

    @property
    def alive(self) -> bool:
        return self.checkpoints is not None

    # What happens

    @precondition(lambda self: self.alive and not self.ended)
    @rule()
    def take_a_step(self) -> None:
        self.learner.finished += 1
        self.step += 1
        step = self.step
        is_due = self.section.save_steps is not None and step % self.section.save_steps == 0
        self.periodic.pop(step, None)
        if is_due:
            self.due.add(step)
        if self._act(lambda checkpoints: checkpoints.after_step(step)):
            assert self._is_saved(step) == is_due

    @precondition(lambda self: self.alive)
    @rule(score=SCORES)
    def report(self, score: float | None) -> None:
        step = self.step
        if self.scores.get(step) is not None:
            score = self.scores[step]  # the same weights have the same score
        was_saved = self._is_saved(step)
        # One that is being written has the score of its own step.
        begun = self._begun_step()
        rivals = {*self.periodic, *([] if begun is None else [begun])} - {step}
        self.scores[step] = score
        if self._act(lambda checkpoints: checkpoints.after_report(step, score)):
            best = self._best({*rivals, step})
            assert self._is_saved(step) == (was_saved or step in best)

    @precondition(lambda self: self.alive and not self.ended and self.step)
    @rule()
    def come_to_the_end(self) -> None:
        step = self.step
        if self._act(lambda checkpoints: checkpoints.at_end(step)):
            self.ended = True
            assert not self.section.save_final or self.final == step

    @precondition(lambda self: self.alive)
    @rule(error=ENDS, is_unheard=st.booleans())
    def end_early(self, error: Exception, is_unheard: bool) -> None:
        if is_unheard and not self.ended:
            self.learner.finished += 1  # the driver has not heard of this update yet
        self._end(error)

    @precondition(lambda self: self.alive)
    @rule()
    def exit(self) -> None:
        assert self.checkpoints is not None
        begun = self._begun_step()
        disk_is_full = self.learner.refusals > 0
        early_reason = None
        try:
            self.context.__exit__(None, None, None)
            assert begun is None or begun in self._complete_steps()
        except StorageError:
            assert disk_is_full
            early_reason = "failed"
        except KeyboardInterrupt:  # while the last update was saved: the command ends at once
            assert disk_is_full
            early_reason = "failed"
            self.killed = True
        self.checkpoints = None
        self._note(early_reason)
        self._end_the_learner()

    @precondition(lambda self: self.alive)
    @rule(is_named=st.booleans())
    def be_killed(self, is_named: bool) -> None:
        """`is_named`: what is being written gets its name before."""
        if is_named and self.learner.begun is not None and not self.learner.refusals:
            self.learner.finish_save(wait=True)
            self.num_noted = len(self.learner.saves)
        self.abandoned.append(self.context)
        self.checkpoints = None
        self.killed = True

    @rule(is_written=st.booleans())
    def write_fast_or_slowly(self, is_written: bool) -> None:
        self.learner.is_written = is_written

    @precondition(lambda self: self.alive)
    @rule(number=st.sampled_from([1, 2, 3]))
    def fill_the_disk(self, number: int) -> None:
        self.learner.refusals = number

    @precondition(lambda self: self.alive)
    @rule(how=st.sampled_from(["writes", "fails"]))
    def interrupt_the_next_save(self, how: str) -> None:
        self.learner.interrupted = how

    @precondition(lambda self: not self.alive)
    @rule(choice=st.sampled_from([0, 0, 0, 1, 2]))
    def resume(self, choice: int) -> None:
        """From the newest checkpoint, or from an older one."""
        states = dict(full_checkpoints(self.run))
        self.learner.begun = self.learner.interrupted = None
        self.learner.refusals = 0
        newest_first = sorted(states, key=lambda one: (-states[one].step, one.name))
        if not newest_first:
            self.step = self.learner.finished = 0
            self._remember([])
            for partial in self.run.glob("**/*.partial"):
                shutil.rmtree(partial)
            self._start(None)
            return
        point = newest_first[min(choice, len(newest_first) - 1)]
        state = states[point]
        self.step = self.learner.finished = state.step
        listed = [one for one in self._entries() if one[1] <= state.step]
        if str(point.relative_to(self.run)) not in {folder for folder, *_ in listed}:
            reason = {"checkpoint": "final"}.get(point.name, "interrupted")
            if point.parent.name == "checkpoints":
                reason = "periodic"
            listed.append((str(point.relative_to(self.run)), state.step, None, (reason,)))
        self._remember(listed)
        self._start(ResumePoint(point, state))
        assert sorted(self._entries()) == sorted(listed)
        assert not list(self.run.glob("**/*.partial"))

    # What must hold

    @invariant()
    def the_index_says_what_is_on_the_disk(self) -> None:
        entries = self._entries()
        for folder, step, _, _ in entries:
            state = read_state(self.run / folder)
            assert state is not None and state.step == step
        if not self.killed:
            assert sorted(self._folders()) == sorted(folder for folder, *_ in entries)

    @invariant()
    def what_is_kept_is_what_a_slow_look_at_the_history_keeps(self) -> None:
        if self.killed:
            return
        # What is being written changes nothing until it is complete.
        assert self._entries() == self._expected()
        if self.learner.begun is None:
            assert not list(self.run.glob("**/*.partial"))

    def _expected(self) -> list[Entry]:
        periodic = [step for step in sorted(self.periodic) if self.periodic[step]]
        newest = periodic[-self.section.keep_last :]
        best = self._best(set(self.periodic))
        entries: list[Entry] = []
        for step in sorted({*newest, *best}):
            reasons = [("periodic", step in newest), ("best", step in best)]
            why = tuple(reason for reason, holds in reasons if holds)
            entries.append((f"checkpoints/step_{step:06d}", step, self.scores.get(step), why))
        lasting: list[Entry] = []
        if self.final is not None:
            lasting.append(("checkpoint", self.final, None, ("final",)))
        if self.early is not None:
            step, reason = self.early
            lasting.append((f"checkpoint_interrupted_{step:06d}", step, None, (reason,)))
        return entries + sorted(lasting, key=lambda one: one[1])

    def _best(self, steps: set[int]) -> set[int]:
        rated = {step: score for step in steps if (score := self.scores.get(step)) is not None}
        return set(sorted(rated, key=lambda step: (-rated[step], step))[: self.section.keep_best])

    # How it is looked at

    def _act(self, what: Callable[[Checkpoints], None]) -> bool:
        """Do it; return whether the run continues."""
        assert self.checkpoints is not None
        try:
            what(self.checkpoints)
        except (StorageError, KeyboardInterrupt) as error:
            self._end(error, given_up=isinstance(error, StorageError))
            return False
        self._note(None)
        return True

    def _end(self, error: BaseException, *, given_up: bool = False) -> None:
        """`given_up`: the disk refused what was being written, or asked for."""
        disk_is_full = self.learner.refusals > 0
        self.learner.interrupted = None  # a second interruption ends the command at once
        begun = self._begun_step()
        trusted = isinstance(
            error, KeyboardInterrupt | RolloutError | WeightSyncError | StorageError
        )
        num_saves, num_stops = len(self.learner.saves), len(self.learner.stops)
        self.telemetry.saved.reset_mock()
        was_there = self.learner.finished in self._complete_steps()
        assert not self.context.__exit__(type(error), error, error.__traceback__)
        self.checkpoints = None
        self._note("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        saved = [name for name, _ in self.learner.saves[num_saves:]]
        limit_s = self.config.timeouts.interrupt_s
        for _, left_s in self.learner.saves[num_saves:]:
            assert left_s is not None and left_s <= limit_s
        assert trusted or len(self.learner.stops) == num_stops
        logged = [call.args[0].name for call in self.telemetry.saved.call_args_list]
        assert len(logged) == len(set(logged))
        assert disk_is_full or set(saved) <= set(logged)
        wanted = trusted and self.section.save_on_interrupt and self.learner.finished > 0
        name = f"checkpoint_interrupted_{self.learner.finished:06d}"
        if not disk_is_full:
            assert not wanted or self.learner.finished in self._complete_steps()
            if not isinstance(error, LostLearnerError):
                assert given_up or begun is None or f"step_{begun:06d}" in saved
        assert name not in saved or (wanted and not was_there)
        if isinstance(error, LostLearnerError):
            assert not saved
        self._end_the_learner()

    def _end_the_learner(self) -> None:
        """The learner's process ends with the run, and the disk has space again."""
        if self.learner.begun is not None:
            folder, _ = self.learner.begun
            shutil.rmtree(folder.with_name(f"{folder.name}.partial"), ignore_errors=True)
        self.learner.begun = self.learner.interrupted = None
        self.learner.refusals = 0

    def _note(self, early_reason: str | None) -> None:
        """Add what has become complete to the history."""
        for name, _ in self.learner.saves[self.num_noted :]:
            number = int(name.rpartition("_")[2]) if "_" in name else self.learner.finished
            self.early = None
            if name.startswith("step_"):
                self.periodic[number] = number in self.due
            elif name == "checkpoint":
                self.final = number
            else:
                assert early_reason is not None
                self.early = (number, early_reason)
        self.num_noted = len(self.learner.saves)

    def _remember(self, entries: list[Entry]) -> None:
        """Begin the history with the checkpoints that a resumption finds."""
        self.periodic = {}
        self.due = set()
        self.scores = {}
        self.final = self.early = None
        self.num_noted = len(self.learner.saves)
        for folder, step, score, reasons in entries:
            if folder.startswith("checkpoints/"):
                self.periodic[step] = "periodic" in reasons
                self.scores[step] = score
            elif folder == "checkpoint":
                self.final = step
            else:
                self.early = (step, reasons[0])

    def _begun_step(self) -> int | None:
        if self.learner.begun is None:
            return None
        folder, _ = self.learner.begun
        return int(folder.name.removeprefix("step_"))

    def _is_saved(self, step: int) -> bool:
        """Whether there is a periodic or best checkpoint of this step, or one is being written."""
        return step == self._begun_step() or f"checkpoints/step_{step:06d}" in self._folders()

    def _complete_steps(self) -> set[int]:
        return {state.step for _, state in full_checkpoints(self.run)}

    def _folders(self) -> list[str]:
        found = [*self.run.glob("checkpoint*"), *self.run.glob("checkpoints/*")]
        return [
            str(folder.relative_to(self.run))
            for folder in found
            if folder.is_dir() and not folder.suffix and folder.name != "checkpoints"
        ]

    def _entries(self) -> list[Entry]:
        index = self.run / "checkpoints.json"
        entries = json.loads(index.read_text()) if index.exists() else []
        return [
            (one["folder"], one["step"], one["score"], tuple(one["reasons"])) for one in entries
        ]


def test_whatever_happens_in_whatever_order_the_index_the_disk_and_the_history_agree():
    options = settings(max_examples=120, stateful_step_count=25, deadline=None, derandomize=True)
    run_state_machine_as_test(RunInAnyOrder, settings=options)
