"""An environment with tools: the model makes a requested change in a small store of numbers."""

from __future__ import annotations

from random import Random
from typing import Any

from rollout_actors.environments.rubric import Rubric, RubricGroup
from rollout_actors.environments.tool import StatefulToolEnv, ToolRubric
from rollout_actors.environments.types import Arguments, Messages, State

SYSTEM_PROMPT = (
    "You keep a store of named numbers. Use the tools to change it as you are told, and then say"
    " that it is done."
)
NAMES = ("apples", "bread", "cheese", "dates", "eggs", "figs")


def load_environment(
    num_examples: int = 200, num_eval_examples: int = 50, max_turns: int = 10, seed: int = 0
) -> StatefulToolEnv:
    """Return the environment. Each dataset row requests one change of a store of numbers."""
    environment = KeyValueStore(
        env_id="key_value_store",
        dataset=tasks(num_examples, Random(f"train {seed}")),
        eval_dataset=tasks(num_eval_examples, Random(f"eval {seed}")),
        system_prompt=SYSTEM_PROMPT,
        max_turns=max_turns,
    )
    environment.rubric = RubricGroup([Rubric([as_wanted]), ToolRubric(environment.tool_names)])
    return environment


def tasks(count: int, random: Random) -> list[dict[str, object]]:
    """Return random dataset rows. `info` has the store at the start, and the wanted store."""
    rows: list[dict[str, object]] = []
    for _ in range(count):
        first, second, third = random.sample(NAMES, 3)
        # All distinct, and none is the sum of two others, so every task changes the store.
        store = dict(zip((first, second, third), random.sample(range(20, 40), 3), strict=True))
        kind = random.choice(("add", "swap", "remove"))
        if kind == "add":
            question = f"Set {first} to the sum of {second} and {third}."
            wanted = {**store, first: store[second] + store[third]}
        elif kind == "swap":
            question = f"Swap the numbers of {first} and {second}."
            wanted = {**store, first: store[second], second: store[first]}
        else:
            question = f"Remove the smaller of {first} and {second}."
            wanted = dict(store)
            del wanted[min((first, second), key=store.__getitem__)]
        rows.append({"question": question, "info": {"store": store, "wanted": wanted}})
    return rows


def get(name: str, store: dict[str, int]) -> int:
    """Look up a number.

    Args:
        name: whose number
    """
    if name not in store:
        raise ValueError(f"there is no {name}, only {', '.join(store)}")
    return store[name]


def put(name: str, number: int, store: dict[str, int]) -> str:
    """Set a number, also one that was not there.

    Args:
        name: whose number
        number: what it becomes
    """
    store[name] = number
    return f"{name} is {number}"


def remove(name: str, store: dict[str, int]) -> str:
    """Take a name out of the store.

    Args:
        name: which one
    """
    if name not in store:
        raise ValueError(f"there is no {name}, only {', '.join(store)}")
    del store[name]
    return f"{name} is gone"


class KeyValueStore(StatefulToolEnv):
    """An environment whose tools get the rollout's own store, which the model does not see."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for tool in (get, put, remove):
            self.add_tool(tool, args_to_skip=["store"])

    async def setup_state(self, state: State) -> State:
        state["store"] = dict(state["info"]["store"])
        return state

    async def update_tool_args(
        self, tool_name: str, tool_args: Arguments, messages: Messages, state: State
    ) -> Arguments:
        return {**tool_args, "store": state["store"]}


def as_wanted(state: State) -> float:
    """Reward function: return 1 if the store has exactly the wanted content, else 0."""
    return float(state["store"] == state["info"]["wanted"])
