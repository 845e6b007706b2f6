"""`gym:NAME`: an environment of `gymnasium`, with texts as observations and answers as actions.

The state is shown by the environment's own rendering as text (`render_mode="ansi"`) if it has one,
else by the observation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_actors.environments.concurrency import in_thread
from rollout_actors.environments.foreign.episodes import (
    Episode,
    EpisodeEnv,
    Shown,
    action_form,
)
from rollout_actors.environments.types import Fields

if TYPE_CHECKING:
    from gymnasium import Env

COLOUR = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0m", re.DOTALL)
CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def load_environment(
    name: str,
    *,
    num_examples: int = 200,
    num_eval_examples: int = 50,
    max_turns: int = 20,
    seed: int = 0,
    options: Fields | None = None,
    actions: Sequence[str] | None = None,
    instructions: str = "",
) -> EpisodeEnv:
    """Load an environment that is registered with the library gymnasium.

    Args:
        name: as `gymnasium.make` takes it, `MODULE:NAME` included.
        seed: seed for drawing the rows' seeds, which are passed to `reset`: all rollouts of a row
            begin in the same state, with the same random numbers.
        options: further arguments of `gymnasium.make`.
        actions: a name for each of a `Discrete` space's actions, in order.
        instructions: first text of the system message, which then describes how to write an action.

    Raises ValueError if gymnasium is not installed or has no such environment, a space cannot be
    written as text, or the number of `actions` is wrong.
    """
    try:
        import gymnasium
    except ImportError as error:
        remedy = "pip install 'rollmatch[gym]'"
        raise ValueError(f"gym:{name} needs gymnasium ({error}); {remedy}") from error
    options = dict(options or {})
    try:
        environment = gymnasium.make(name, **options)
    except gymnasium.error.Error as error:
        remedy = "gymnasium.pprint_registry() lists all names; MODULE:NAME imports your module"
        raise ValueError(f"gym:{name}: {error}; {remedy}") from error
    try:
        if "ansi" in environment.metadata.get("render_modes", ()):
            options["render_mode"] = "ansi"
        else:
            require_text(environment.observation_space, f"gym:{name}")
        action_space = ActionSpace(environment.action_space, actions, f"gym:{name}")
    finally:
        environment.close()

    async def make_episode() -> Episode:
        # One for each episode, because rollouts run at once and an environment plays one game.
        made = await in_thread(gymnasium.make, id=name, disable_env_checker=True, **options)
        return GymEpisode(made, action_space)

    return EpisodeEnv(
        make_episode,
        form=action_space.form,
        instructions=instructions,
        num_examples=num_examples,
        num_eval_examples=num_eval_examples,
        max_turns=max_turns,
        seed=seed,
    )


class GymEpisode(Episode):
    """An episode of a gymnasium environment. It runs in threads, because a step may take long."""

    def __init__(self, environment: Env, action_space: ActionSpace) -> None:
        self._environment = environment
        self._action_space = action_space
        self._renders = environment.render_mode == "ansi"

    async def reset(self, seed: int) -> Shown:
        observation, _ = await in_thread(self._environment.reset, seed=seed)
        return Shown(await self._text(observation))

    async def step(self, action: str) -> Shown:
        read = self._action_space.read(action)
        if read is None:
            return Shown(f"I see no action. {self._action_space.form}")
        observation, reward, terminated, truncated, _ = await in_thread(
            self._environment.step, action=read
        )
        end = "terminated" if terminated else "truncated" if truncated else None
        return Shown(await self._text(observation), float(reward), end)

    async def close(self) -> None:
        await in_thread(self._environment.close)

    async def _text(self, observation: object) -> str:
        if self._renders:
            return without_codes(str(await in_thread(self._environment.render)))
        return as_text(observation)


class ActionSpace:
    """Converts actions that a model writes (a number, a name, or a text) to gymnasium's actions."""

    def __init__(self, space: Any, names: Sequence[str] | None, owner: str) -> None:
        """
        Raises ValueError if the space is neither Discrete nor Text, or the numbers of its actions
        and of names differ.
        """
        kind = type(space).__name__
        if kind not in ("Discrete", "Text"):
            raise ValueError(
                f"{owner}: its actions are {space}, but only the spaces Discrete and Text are"
                " supported; wrap it (gymnasium.ActionWrapper), register the wrapper, and name that"
                " as MODULE:NAME"
            )
        self._space = space
        self._actions: dict[str, int] = {}
        what = "a text"
        if kind == "Discrete":
            numbers = range(int(space.start), int(space.start) + int(space.n))
            what = f"a number from {numbers[0]} to {numbers[-1]}"
            self._actions = {str(number): number for number in numbers}
        if names is not None:
            if len(names) != len(self._actions):
                raise ValueError(
                    f"{owner}: actions has {len(names)} names ({', '.join(names)}), but its actions"
                    f" are {space}; give one name to each"
                )
            what = "one of " + ", ".join(names)
            self._actions |= {
                name.casefold(): number
                for name, number in zip(names, self._actions.values(), strict=True)
            }
        self.form = action_form(what)
        """The description of an action for the model."""

    def read(self, action: str) -> int | str | None:
        """Return gymnasium's action for a model's text; None if the text is not a valid action."""
        if self._actions:
            # Models may write a name in capitals.
            return self._actions.get(action.casefold())
        return action if self._space.contains(action) else None


def require_text(space: Any, owner: str) -> None:
    """Raise ValueError if observations of this gymnasium space cannot be converted to text.

    `owner`: the environment, for the message.
    """
    kind = type(space).__name__
    if kind in ("Tuple", "Dict"):
        for part in space.spaces if kind == "Tuple" else space.spaces.values():
            require_text(part, owner)
    elif kind not in ("Discrete", "Box", "MultiDiscrete", "MultiBinary", "Text") or (
        space.shape is not None and len(space.shape) > 2
    ):
        raise ValueError(
            f"{owner}: has no render mode ansi, and observations of {kind}{space.shape or ''} are"
            " not text; wrap it (gymnasium.ObservationWrapper), register the wrapper, and name that"
            " as MODULE:NAME"
        )


def as_text(observation: object) -> str:
    """Convert a gymnasium observation to text: `(14, 10, 0)`, or a line for each key."""
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {as_text(value)}" for key, value in observation.items())
    if isinstance(observation, tuple):
        return f"({', '.join(as_text(value) for value in observation)})"
    if isinstance(observation, str):
        return observation
    values = np.asarray(observation)
    if values.ndim:
        separator = ",\n " if values.ndim > 1 else ", "
        return f"[{separator.join(as_text(value) for value in values)}]"
    return f"{values.item():.4g}" if np.issubdtype(values.dtype, np.floating) else str(int(values))


def without_codes(rendered: str) -> str:
    """Replace colour codes of a terminal by tags, as colours may be the only mark of a position.

    Example: a red S, `ESC[41mSESC[0m`, becomes `<red>S</red>`.
    """

    def tagged(found: re.Match[str]) -> str:
        codes = [int(code) for code in found[1].split(";") if code]
        names = [COLOURS[code % 10] for code in codes if code // 10 in (3, 4) and code % 10 < 8]
        return f"<{names[0]}>{found[2]}</{names[0]}>" if names else found[2]

    return CONTROL.sub("", COLOUR.sub(tagged, rendered)).strip("\n")
