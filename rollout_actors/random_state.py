"""A process's random state, kept from whoever draws from it or seeds it as a guest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Afterwards the generators of python, numpy and torch (of every device) are where they were, whatever happened."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        for device, state in enumerate(of_devices):
            torch.cuda.set_rng_state(state, device)
