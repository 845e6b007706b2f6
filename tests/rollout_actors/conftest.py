"""The learner of most tests of a single engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engine_support import SmallLearner


@pytest.fixture(scope="module")
def learner(demo_checkpoint: Path) -> Iterator[SmallLearner]:
    """With one receiver."""
    from engine_support import SmallLearner

    with closing(SmallLearner(demo_checkpoint, num_receivers=1)) as learner:
        yield learner
