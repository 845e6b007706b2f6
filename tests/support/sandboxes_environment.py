"""An environment whose rollouts open something and never end by themselves: `load_environment("sandboxes_environment", log=FILE)`. All is noted in the log."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rollout_actors.environments import MultiTurnEnv, Rubric, cleanup, teardown
from rollout_actors.environments.types import Messages, State


class Sandboxes(MultiTurnEnv):
    def __init__(self, log: str, takes_s: float, **kwargs: Any) -> None:
        """`takes_s`: of each cleanup."""
        super().__init__(**kwargs)
        self._log, self._takes_s = Path(log), takes_s

    async def setup_state(self, state: State) -> State:
        self._note(f"opened {state['input']['position']}")
        await asyncio.sleep(3600)
        return state

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        return []

    @cleanup
    async def shut(self, state: State) -> None:
        await asyncio.sleep(self._takes_s)
        self._note(f"shut {state['input']['position']}")

    @teardown
    async def down(self) -> None:
        self._note("torn down")

    def _note(self, said: str) -> None:
        with self._log.open("a") as file:
            file.write(f"{said}\n")


def load_environment(log: str, takes_s: float = 0.01) -> Sandboxes:
    rows = [{"question": "q", "example_id": number} for number in range(3)]
    return Sandboxes(log, takes_s, dataset=rows, rubric=Rubric([lambda completion: 1.0]))


def noted(log: Path) -> list[str]:
    """The lines of the log so far."""
    return log.read_text().splitlines() if log.exists() else []
