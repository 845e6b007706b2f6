"""The door of a rollout server: which phase of a sync is in turn, and of which run."""

from __future__ import annotations

import pytest
from fake_server import make_offer

from rollout_actors.server.messages import SyncCall
from rollout_actors.server.service import RefusalError, SyncState
from shared.weight_sync.phases import SyncPhase

PHASES = list(SyncPhase)


def call(phase: SyncPhase, version: int = 1, run: str = "mine") -> SyncCall:
    return SyncCall.of(phase, make_offer(version), run)


def through(door: SyncState, phases: list[SyncPhase], version: int = 1) -> SyncState:
    for phase in phases:
        door = door.enter(phase, call(phase, version)).finish(phase)
    return door


def test_it_is_nobodys_at_the_start_and_that_of_the_run_whose_sync_was_completed_afterwards() -> (
    None
):
    assert (SyncState().run, SyncState().due) == (None, SyncPhase.PAUSE)
    done = through(SyncState(run="another"), PHASES)
    assert (done.run, done.due) == ("mine", SyncPhase.PAUSE)
    assert through(SyncState(run="another"), PHASES[:-1]).run == "another", (
        "whose weights it serves again if this sync never reaches the engine"
    )


@pytest.mark.parametrize("num_done", range(1, len(PHASES)))
def test_between_the_first_phase_and_the_last_the_next_one_is_due(num_done: int) -> None:
    assert through(SyncState(), PHASES[:num_done]).due is PHASES[num_done]


@pytest.mark.parametrize("phase", PHASES)
def test_while_a_phase_runs_and_after_it_failed_only_the_beginning_is_in_turn(
    phase: SyncPhase,
) -> None:
    running = through(SyncState(), PHASES[: PHASES.index(phase)]).enter(phase, call(phase))
    for next_ in PHASES[1:]:
        with pytest.raises(
            RefusalError, match="out of turn, the server waits for pause; begin with pause"
        ):
            running.enter(next_, call(next_))
    assert through(running, PHASES, version=2).offer == make_offer(2)


def test_a_phase_of_another_version_is_out_of_turn() -> None:
    with pytest.raises(
        RefusalError,
        match=(
            "phase rendezvous of version 2 is out of turn, the server waits for rendezvous of"
            " version 1"
        ),
    ):
        through(SyncState(), PHASES[:1]).enter(SyncPhase.RENDEZVOUS, call(SyncPhase.RENDEZVOUS, 2))


def test_what_the_rendezvous_brings_takes_the_place_of_the_offer() -> None:
    door = through(SyncState(), PHASES[:1])
    assert door.enter(SyncPhase.RENDEZVOUS, call(SyncPhase.RENDEZVOUS)).offer == make_offer(1)
    later = through(SyncState(), PHASES[:2])
    assert later.enter(SyncPhase.WIRE, call(SyncPhase.WIRE)).offer is later.offer


@pytest.mark.parametrize("phase", PHASES[1:])
def test_a_sync_is_gone_on_with_by_the_run_that_began_it_and_can_be_begun_by_another(
    phase: SyncPhase,
) -> None:
    door = through(SyncState(), PHASES[: PHASES.index(phase)])
    with pytest.raises(
        RefusalError, match=f"phase {phase} of version 1: another run's sync is under way"
    ):
        door.enter(phase, call(phase, run="another"))
    assert door.enter(SyncPhase.PAUSE, call(SyncPhase.PAUSE, run="another")).syncing == "another"
