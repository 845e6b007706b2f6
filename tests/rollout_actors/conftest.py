"""The learner of most tests of a single engine, and actors without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from engine_support import SmallLearner


@pytest.fixture(scope="module")
def learner(demo_checkpoint: Path) -> Iterator[SmallLearner]:
    """With one receiver."""
    from engine_support import SmallLearner

    with closing(SmallLearner(demo_checkpoint, num_receivers=1)) as learner:
        yield learner


@pytest.fixture(scope="session")
def _fake_actors(ray_cluster: None) -> Iterator[list[Any]]:
    import ray
    from fake_actors import create_fake_actor

    actors = [create_fake_actor(name) for name in ("actor-0", "actor-1")]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def fake_actors(_fake_actors: list[Any]) -> Iterator[list[Any]]:
    """`FakeActor`s actor-0 and actor-1, which know of no trouble yet. Other tests have them too, so
    no test ends one.
    """
    import ray

    ray.get([actor.become.remote() for actor in _fake_actors])
    yield _fake_actors
    ray.get([actor.become.remote() for actor in _fake_actors])
