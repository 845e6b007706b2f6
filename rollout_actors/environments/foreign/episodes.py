"""Episodes of other libraries' environments (`gymnasium`, OpenEnv) as rollouts.

Each answer of the model is an action, and each user message shows the environment's state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from rollout_actors.environments.answers.parsers import XMLParser, text_of
from rollout_actors.environments.chat.messages import concat_messages
from rollout_actors.environments.lifecycle import cleanup, stop
from rollout_actors.environments.multi_turn import MultiTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.types import Message, Messages, ModelResponse, State

_PARSER = XMLParser(fields=["action"], answer_field="action")


@dataclass(frozen=True, slots=True)
class Shown:
    """What an episode shows to the model after a step: its state as text, and the step's reward.

    Example: `Shown("You see a door.", reward=0.5)` after a step that did not end the episode.
    """

    text: str
    reward: float | None = None
    """Reward of the last step; None: there was no step, or the answer had no action."""
    end: str | None = None
    """`terminated` or `truncated`, if the episode is over."""


class Episode(ABC):
    """Interface to one episode of another library's environment.

    Errors of its methods fail the rollout.
    """

    @abstractmethod
    async def reset(self, seed: int) -> Shown:
        """Begin the episode with this seed, and return its first state."""

    @abstractmethod
    async def step(self, action: str) -> Shown:
        """Take a step with the action that the model wrote, and return the new state."""

    @abstractmethod
    async def close(self) -> None:
        """Release the resources of the episode."""


class EpisodeEnv(MultiTurnEnv):
    """An environment whose rollouts are episodes of another library's environment.

    Each dataset row has a seed, with which its episodes begin. The reward of a rollout is the sum
    of the rewards of the episode's steps.
    """

    def __init__(
        self,
        make_episode: Callable[[], Awaitable[Episode]],
        *,
        form: str,
        instructions: str,
        num_examples: int,
        num_eval_examples: int,
        max_turns: int,
        seed: int,
    ) -> None:
        """
        Args:
            form: text for the model that says how an action is written.
            instructions: first text of the system message, which ends with `form`.
            max_turns: maximum number of answers in a rollout, also those without an action.
            seed: seed for drawing the rows' seeds.
        """
        super().__init__(
            dataset=_rows(num_examples, Random(f"train {seed}")),
            eval_dataset=_rows(num_eval_examples, Random(f"eval {seed}")),
            system_prompt=f"{instructions}\n\n{form}".strip(),
            rubric=Rubric([episode_reward, num_steps, valid_actions], [1.0, 0.0, 0.0]),
            max_turns=max_turns,
        )
        self._make_episode = make_episode

    async def setup_state(self, state: State) -> State:
        """Begin the rollout's episode, and show its first state after the dataset row's prompt."""
        # Stored at once, so that an episode whose reset fails is closed too.
        state["episode"] = await self._make_episode()
        shown = await state["episode"].reset(state["info"]["seed"])
        state["shown"] = [shown]
        """The first state, then the state after each answer."""
        state["prompt"] = concat_messages([state["prompt"], [_message(shown)]])
        return state

    async def add_model_response(
        self, state: State, prompt_messages: Messages, response: ModelResponse
    ) -> None:
        await super().add_model_response(state, prompt_messages, response)
        # Here, because the last turn's answer is a step too, but gets no environment response.
        for step in state["trajectory"][len(state["shown"]) - 1 :]:
            action = action_in(text_of(step["completion"][-1]))
            state["shown"].append(await state["episode"].step(action))

    async def env_response(self, messages: Messages, state: State, **kwargs: object) -> Messages:  # noqa: ARG002
        return [_message(state["shown"][-1])]

    @stop
    async def episode_terminated(self, state: State) -> bool:
        return bool(state["shown"][-1].end == "terminated")

    @stop
    async def episode_truncated(self, state: State) -> bool:
        return bool(state["shown"][-1].end == "truncated")

    @cleanup
    async def close_episode(self, state: State) -> None:
        if "episode" in state:
            await state["episode"].close()


def action_in(answer: str) -> str:
    """Return the action in an answer: the last `<action>`, or else all text after the thought."""
    tagged: str | None = _PARSER.parse(answer, last=True).action
    return answer.rpartition("</think>")[2].strip() if tagged is None else tagged


def action_form(what: str) -> str:
    """Return a text that tells a model how to write an action.

    `what` says what an action is, for example `a number from 0 to 3`.
    """
    return f"Write your action, {what}, as <action>ACTION</action>."


def episode_reward(state: State) -> float:
    """Reward function: return the sum of the rewards of an episode's steps."""
    return float(sum(_rewards(state)))


def num_steps(state: State) -> float:
    return float(len(_rewards(state)))


def valid_actions(state: State) -> float:
    """Metric: return the share of the model's answers that had a valid action."""
    return len(_rewards(state)) / max(1, len(state["shown"]) - 1)


def _rewards(state: State) -> list[float]:
    return [shown.reward for shown in state["shown"][1:] if shown.reward is not None]


def _message(shown: Shown) -> Message:
    return {"role": "user", "content": shown.text}


def _rows(count: int, random: Random) -> list[dict[str, object]]:
    # Without a question, because the first state is shown when the episode begins.
    return [{"prompt": [], "info": {"seed": random.randrange(2**31)}} for _ in range(count)]
