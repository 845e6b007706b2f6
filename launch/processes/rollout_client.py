"""The driver's clients for rollouts: of engines in other processes, or of learner ranks."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import ray

from launch.processes.fleet import Fleet, RolloutTimeouts
from launch.processes.learner_client import UNOBSERVED, LearnerClient, RunObserver
from launch.processes.replacements import Replacement
from launch.processes.rounds import Round, Rounds, RoundSize, SecondTry
from rollout_actors.engine.ray_calls import RayCall, wait_for_all
from shared.config.derive import rank_name
from shared.errors import ConfigError, LostRoundError, WeightSyncError
from shared.protocols import PerRank
from shared.rollouts import SyncReport, WeightOffer
from shared.weight_sync.phases import POOL_MARGIN_S, SendingLearner, SyncPhase


class RolloutClient:
    """The driver's client of engines, and of environments that call the engines.

    It begins rounds of rollouts, and weight syncs of the engines.

    The client waits in its own threads, for at most one round or one sync at a time. A wait ends
    when the answers arrive, at its time limit (if it has one), when an actor dies, or at `close`.
    """

    def __init__(
        self,
        engines: Fleet,
        size: RoundSize,
        *,
        learner: SendingLearner | None = None,
        observer: RunObserver = UNOBSERVED,
    ) -> None:
        """`learner` sends its weights to new engines if all engines of a round are lost; the round
        is then repeated.

        None: such a round is not repeated.
        """
        self.engines = engines
        self.version = 0
        """The weight version of every engine; 0 before the first sync."""
        self.environments: Fleet | None = None
        self._size = size
        self._rounds = Rounds(size, engines)
        self._learner = learner
        self._observer = observer
        self._round: Future[PerRank] | None = None
        self._num_begun = 0
        """Number of rounds of the current step that were begun."""
        self._sync_failed = False
        self._threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="rollout-client")

    @property
    def names(self) -> tuple[str, ...]:
        return self.engines.names

    @property
    def devices(self) -> tuple[int, ...]:
        """Number of rollout devices of each engine, in order; empty before the start."""
        return self.engines.devices

    @property
    def replaces_lost(self) -> bool:
        return self.engines.replaces_lost

    def start(self) -> None:
        """Start every engine. Raises the errors of `Fleet.start`, and ConfigError if a round cannot
        have a request of every learner rank.
        """
        self.engines.start()
        try:
            self._size.chunk(self.engines.devices)
        except ValueError as error:
            raise ConfigError(f"rollout_matching.decode_batch_size: {error}") from error

    def generate_through(
        self, environments: Fleet, *, group_size: int, in_one_round: bool = False
    ) -> None:
        """Send all further requests to environment actors.

        Each request is for a group: the rollouts of one example.

        `in_one_round`: there is one environment actor. It gets the requests of a step, from all
        learner ranks, in one call.
        """
        self.environments = environments
        size = replace(self._size, group_size=group_size, in_one_round=in_one_round)
        self._rounds = Rounds(size, self.engines, environments)

    def split(self, requests: PerRank) -> list[PerRank]:
        """Cut a step's rollout requests into as few rounds as the decode batches allow."""
        self._num_begun = 0
        return self._rounds.split(requests)

    def generate(self, round_: PerRank) -> Round:
        """Begin to generate one round of rollouts.

        The returned round's `result` has, for each learner rank, references to lists of rollouts.
        """
        second_try = None
        if self._learner is not None:
            second_try = SecondTry(self, self._learner, self._observer, round_, self.version)
        self._num_begun += 1
        return Round(self.begin(round_), self._observer, second_try)

    def begin(self, round_: PerRank) -> Future[PerRank]:
        """Begin one round of rollouts, which is not repeated if all its actors are lost."""
        self._round = self._threads.submit(self._rounds.collect, round_, self._num_begun)
        return self._round

    def wait_idle(self) -> None:
        """Wait for the round of rollouts that is being generated, if there is one.

        Raises the RolloutError of the round. A LostRoundError is not raised, because a lost round
        may be repeated.
        """
        if self._round is not None:
            with suppress(LostRoundError), self._observer.waits_for("rollouts"):
                self._round.result()

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """Begin a weight sync of the idle engines.

        If the sync fails, they serve no more rollouts until a sync succeeds.
        """
        return self._threads.submit(self._receive, offer)

    def join_replacements(self) -> bool:
        """Replace actors that have ended or are stuck, and wait for the new actors.

        Call it while no round and no weight sync runs. Returns whether there is a new engine, which
        has neither a process group nor the learner's weights. Raises RolloutError if no more actors
        may be replaced.
        """
        environments = self.environments
        self.engines.lose_dead(after_failed_sync=self._sync_failed)
        if environments is not None:
            environments.lose_dead()
        has_new_engine = self.engines.join()
        if environments is not None:
            has_new_environment = environments.join()
            is_known = not (has_new_environment or has_new_engine)
            while not is_known:
                engines = self.engines.actors
                answers = [actor.use_engines.remote(engines) for actor in environments.actors]
                is_known = not environments.lose_silent(answers)
                # If an actor has ended meanwhile, it is replaced, and all are asked again.
                environments.join()
        return has_new_engine

    def replace_named(self, error: WeightSyncError) -> bool:
        """Replace the engine that a weight sync's error names; return whether it names one.

        Raises `error` if no more engines may be replaced.
        """
        if error.actor not in self.engines.names:
            return False
        self.engines.lose(self.engines.names.index(error.actor), error)
        return self.join_replacements()

    def pop_replaced(self) -> list[Replacement]:
        """Return the replacements of lost actors that became ready since the last call."""
        done = self.engines.pop_replaced()
        return done if self.environments is None else done + self.environments.pop_replaced()

    def close(self) -> None:
        """End the engines; pending waits fail. A second call is harmless."""
        self.engines.close()
        self._threads.shutdown(wait=True)

    def _receive(self, offer: WeightOffer) -> SyncReport:
        shared_offer = ray.put(offer)
        self._sync_failed = True  # until it has succeeded
        check = "that the learner and every other engine are alive"
        # Each phase is for all engines: no engine waits for bytes while another still decodes, and
        # an error names the phase in which a process was stopped.
        for phase in SyncPhase:
            limit = self.engines.timeouts.sync_phase
            if phase is SyncPhase.RENDEZVOUS:
                limit = self.engines.timeouts.join or limit
            call = RayCall(phase, limit, check, WeightSyncError, margin_s=POOL_MARGIN_S)
            task = f"sync {phase}"  # shown by Ray's dashboard
            asked = [
                (name, actor.run_sync_phase.options(name=task).remote(phase, shared_offer))
                for name, actor in self.engines.named()
            ]
            reports = wait_for_all(call, asked)
        self._sync_failed = False
        self.version = offer.version
        return SyncReport.of_slowest(reports)


class RankRolloutClient:
    """The driver's client of learner ranks that generate their own rollouts.

    Their backend is `hf`, or vLLM with `vllm.mode: colocate`.
    """

    replaces_lost = False

    def __init__(
        self,
        learner: LearnerClient,
        timeouts: RolloutTimeouts,
        size: RoundSize,
        *,
        devices_per_rank: int,
        observer: RunObserver = UNOBSERVED,
    ) -> None:
        num_ranks = size.learner_ranks
        self.names = tuple(rank_name(rank, num_ranks) for rank in range(num_ranks))
        self.devices = (devices_per_rank,) * num_ranks
        self.version = 0
        """The weight version of every rank's backend; 0 before the first sync."""
        self._learner = learner
        self._timeouts = timeouts
        self._size = size
        self._observer = observer
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-client")

    def split(self, requests: PerRank) -> list[PerRank]:
        return self._size.split(requests, self.devices)

    def generate(self, round_: PerRank) -> Round:
        """Begin a round of rollouts.

        The returned round's `result` raises the error of a rank, or a LearnerError if a rank is
        late.
        """
        limit = self._timeouts.generate
        assert limit is not None, "only calls of servers may have no limit"
        return Round(self._learner.generate(round_, limit), self._observer)

    def wait_idle(self) -> None:
        """Return at once.

        There is nothing to wait for: a rank begins its next task only after its part of the round.
        """

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        # Called here and not in the thread: all ranks must get this call before rank 0 sends.
        receiving = self._learner.receive_weights(offer)

        def serve() -> SyncReport:
            report = receiving.result()
            self.version = offer.version
            return report

        return self._threads.submit(serve)

    def join_replacements(self) -> bool:
        return False

    def replace_named(self, error: WeightSyncError) -> bool:  # noqa: ARG002
        return False

    def pop_replaced(self) -> list[Replacement]:
        return []
