"""The learner on Ray: a thin shell in its own process, and the driver's end of it with a timeout on every wait."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from learner.learner import Learner
from learner.place import LearnerPlace
from shared.config import RunConfig
from shared.config.timeouts import TimeoutsSection
from shared.errors import LearnerError
from shared.evaluation import Scene
from shared.reports import StepReport
from shared.rollouts import Rollout, WeightOffer
from shared.schedule import StepPlan
from shared.weight_sync import SendReport

Share = list[Rollout]


class LearnerShell:
    """`Learner` with references instead of payloads."""

    _learner: Learner

    def start(self, config: RunConfig, place: LearnerPlace) -> int:
        """Load model and data; the number of torch's threads. Not in the constructor, whose exceptions Ray turns into a dead actor."""
        # A cluster of the run's own is this machine alone, and its weights never leave it.
        host = "127.0.0.1" if config.cluster.address == "local" else ray.util.get_node_ip_address()
        self._learner = Learner(config, replace(place, host=host))
        return torch.get_num_threads()

    def next_requests(self, plan: StepPlan) -> list[ray.ObjectRef]:
        return [ray.put(request) for request in self._learner.next_requests(plan)]

    def accumulate(self, *shares: Share) -> None:
        self._learner.accumulate(list(itertools.chain(*shares)))

    def finish_step(self) -> StepReport:
        return self._learner.finish_step()

    def offer_weights(self) -> WeightOffer:
        return self._learner.offer_weights()

    def send_weights(self, offer: WeightOffer) -> SendReport:
        return self._learner.send_weights(offer)

    def held_out_requests(self, step: int) -> list[ray.ObjectRef]:
        return [ray.put(request) for request in self._learner.held_out_requests(step)]

    def score(self, *shares: Share) -> list[Scene]:
        return self._learner.score(list(itertools.chain(*shares)))

    def save(self, folder: Path) -> None:
        self._learner.save(folder)


class RemoteLearner:
    """A `LearnerShell` as the driver uses it (`launch.driver.DrivesLearner`)."""

    def __init__(self, actor: Any, timeouts: TimeoutsSection) -> None:
        self._actor = actor
        self._timeouts = timeouts
        self.num_threads = 0
        """Of torch in the learner's process, once it has started."""

    def start(self, config: RunConfig, place: LearnerPlace) -> None:
        """Returns when model and data are loaded. Raises what the learner finds wrong with them."""
        starting = self._actor.start.remote(config, place)
        self.num_threads = self._wait(starting, "start", self._timeouts.start_s, "timeouts.start_s")

    def next_requests(self, plan: StepPlan) -> list[ray.ObjectRef]:
        return self._learn(self._actor.next_requests.remote(plan), "next_requests")

    def accumulate(self, done: Sequence[ray.ObjectRef]) -> None:
        self._learn(self._actor.accumulate.remote(*done), "accumulate")

    def finish_step(self) -> StepReport:
        return self._learn(self._actor.finish_step.remote(), "finish_step")

    def held_out_requests(self, step: int) -> list[ray.ObjectRef]:
        return self._learn(self._actor.held_out_requests.remote(step), "held_out_requests")

    def score(self, done: Sequence[ray.ObjectRef]) -> list[Scene]:
        return self._learn(self._actor.score.remote(*done), "score")

    def offer_weights(self) -> WeightOffer:
        return self._wait(self._actor.offer_weights.remote(), "offer_weights", self._timeouts.sync_phase_s, "timeouts.sync_phase_s")

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]:
        return _without_rays_wrapping(self._actor.send_weights.remote(offer).future(), "send_weights")

    def save(self, folder: Path) -> None:
        self._learn(self._actor.save.remote(folder), "save")

    def _learn(self, ref: Any, phase: str) -> Any:
        return self._wait(ref, phase, self._timeouts.learn_s, "timeouts.learn_s")

    def _wait(self, ref: Any, phase: str, timeout_s: float, key: str) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except GetTimeoutError as error:
            raise LearnerError(
                f"no answer in {timeout_s:g} s ({key}); look at the learner's stack in the Ray dashboard or with `py-spy dump`, or raise {key}", phase=phase
            ) from error
        except RayError as error:
            raise _explained(error, phase) from error


def _explained(error: RayError, phase: str) -> Exception:
    """What the learner raised in place of Ray's exception around it, or what became of its process."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return LearnerError(f"its process ended; look for a lack of memory (dmesg) and at Ray's worker logs: {error}", phase=phase)


def _without_rays_wrapping(source: Future[Any], phase: str) -> Future[Any]:
    target: Future[Any] = Future()

    def deliver(done: Future[Any]) -> None:
        error = done.exception()
        if isinstance(error, RayError):
            explained = _explained(error, phase)
            explained.__cause__ = error
            target.set_exception(explained)
        elif error is not None:
            target.set_exception(error)
        else:
            target.set_result(done.result())

    source.add_done_callback(deliver)
    return target
