"""The door of a rollout server: which phase of a sync is in turn, and of which run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from rollout_actors.server import messages
from shared.rollouts import WeightOffer
from shared.weight_sync import SyncPhase

PHASES = tuple(SyncPhase)
FOLLOWING = dict(pairwise((*PHASES, PHASES[0])))


class RefusalError(Exception):
    """The caller's to mend: an HTTP status and what to do."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Door:
    """Which phase of a sync is in turn, and of which run. Every phase goes through `during` and, if it ends well, `after`::

    phase           in turn                     while it runs, or after it failed    when it has ended
    pause           always, with an offer       due: pause                           due: rendezvous
    rendezvous ...  where it is due, for the    due: pause                           due: the following phase; behind canary: pause
                    version of the offer

    From pause to the end of canary the engine itself serves no rollouts.
    """

    run: str | None = None
    """Whose weights the engine serves, while it serves any; None: nobody in particular's."""
    syncing: str | None = None
    """Whose sync is under way, or was the last one; None: nobody in particular's."""
    offer: WeightOffer | None = None
    """Of the sync under way, or of the last one; None: there was none."""
    due: SyncPhase = SyncPhase.PAUSE
    """What comes next. PAUSE may always come."""

    def during(self, phase: SyncPhase, call: messages.SyncCall) -> Door:
        """Raises RefusalError where it is not the phase's turn."""
        brought = call.weight_offer()
        if phase is SyncPhase.PAUSE:
            if brought is None:
                raise RefusalError(400, f"offer: is null; phase {phase} begins a sync, send its offer")
            return replace(self, syncing=call.run, offer=brought, due=SyncPhase.PAUSE)
        if None not in (self.syncing, call.run) and self.syncing != call.run and self.due is not SyncPhase.PAUSE:
            raise RefusalError(409, f"phase {phase} of version {call.version}: another run's sync is under way; give every run servers of its own")
        if self.offer is None or (phase, call.version) != (self.due, self.offer.version):
            begins = self.offer is None or self.due is SyncPhase.PAUSE
            raise RefusalError(
                409,
                f"phase {phase} of version {call.version} is out of turn, the server waits for "
                f"{SyncPhase.PAUSE if begins or self.offer is None else f'{self.due} of version {self.offer.version}'}; begin with {SyncPhase.PAUSE} "
                f"and keep the order {', '.join(PHASES)}",
            )
        return replace(self, offer=brought or self.offer, due=SyncPhase.PAUSE)

    def after(self, phase: SyncPhase) -> Door:
        return replace(self, due=FOLLOWING[phase], run=self.syncing if phase is PHASES[-1] else self.run)
