from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shared.config import RunConfig


@pytest.fixture(scope="session")
def rank_config(
    demo_checkpoint: Path, demo_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., RunConfig]:
    """Three steps, A then B and B, of 12 samples and 11 rollouts: shares and rows that are not
    equal.

    One thread, and an epsilon of AdamW's above the gradients' rounding errors, which it would blow
    up to updates of full size.
    """
    from config_support import configuration

    settings = {
        "global_max_length": 512,
        "training__max_steps": 3,
        "training__effective_batch_size": 12,
        "training__packing_window": 4,
        "training__adam_epsilon": 1e-4,
        "stage2_ab__schedule__warmup_steps": 1,
        "stage2_ab__channel_b__rollouts_per_step": 11,
        "learner__cpu_threads": 1,
    }
    return lambda **changes: configuration(
        demo_checkpoint, demo_data, tmp_path_factory.mktemp("run"), **settings | changes
    )
