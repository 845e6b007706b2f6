"""Environments of gymnasium, played by scripted models (issue 21, point 12)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from environment_support import assistant, generated, user
from scripted_client import ScriptedClient

from rollout_actors.environments.loading import load_environment

LAKE = {"options": {"is_slippery": False}, "max_turns": 8}
FORM = "Write your action, a number from 0 to 3, as <action>ACTION</action>."
TO_THE_GOAL = "112212"


def played(name, said, number=0, **arguments):
    """The state of one rollout of a row, and what the model was asked."""
    environment = load_environment(name, num_examples=2, **arguments)
    client = ScriptedClient(said)
    (state,) = generated(environment, [environment.get_dataset()[number]], client).state
    return state, client.calls


def test_a_rendering_is_shown_the_answers_are_steps_and_the_rewards_are_summed():
    said = [f"I go <action>{action}</action>" for action in TO_THE_GOAL]
    state, calls = played("gym:FrozenLake-v1", said, **LAKE)
    start = "<red>S</red>FFF\nFHFH\nFFFH\nHFFG"
    assert calls[0].prompt == [{"role": "system", "content": FORM}, user(start)]
    assert calls[1].prompt[2:] == [
        assistant(said[0]),
        user("  (Down)\nSFFF\n<red>F</red>HFH\nFFFH\nHFFG"),
    ]
    assert len(calls) == 6
    assert state["error"] is None
    assert state["stop_condition"] == "episode_terminated"
    assert (state["reward"], state["metrics"]["num_steps"]) == (1.0, 6.0)
    assert state["metrics"]["valid_actions"] == 1.0


def test_an_action_is_a_number_or_a_name_in_its_tag_or_alone_and_anything_else_is_told():
    names = ["left", "down", "right", "up"]
    said = ["down?", "<action>DOWN</action>", "<think>0?</think> down", "2", "7"]
    state, calls = played("gym:FrozenLake-v1", said, **LAKE | {"actions": names, "max_turns": 5})
    form = "Write your action, one of left, down, right, up, as <action>ACTION</action>."
    assert calls[0].prompt[0]["content"] == form
    assert calls[1].text == f"I see no action. {form}"
    assert calls[4].text == "  (Right)\nSFFF\nFHFH\nF<red>F</red>FH\nHFFG"
    assert state["stop_condition"] == "max_turns_reached"
    assert state["metrics"] == {"episode_reward": 0.0, "num_steps": 3.0, "valid_actions": 0.6}


def test_the_action_of_the_last_turn_is_a_step_too():
    state, _ = played("gym:FrozenLake-v1", list(TO_THE_GOAL), **LAKE | {"max_turns": 6})
    assert state["reward"] == 1.0


def test_without_a_rendering_the_observation_is_shown_as_text():
    state, calls = played("gym:Blackjack-v1", ["1"] * 20)
    assert len([int(part) for part in calls[0].text.strip("()").split(", ")]) == 3
    assert state["reward"] == -1.0, "who always takes a card loses"
    _, calls = played("gym:CartPole-v1", ["0"], max_turns=1)
    assert len([float(part) for part in calls[0].text.strip("[]").split(", ")]) == 4


def test_a_row_is_a_seed_that_begins_every_rollout_alike_and_an_episode_may_be_cut():
    options = {"max_episode_steps": 3}

    def asked(number, seed=0):
        state, calls = played("gym:Taxi-v4", ["0"] * 3, number, options=options, seed=seed)
        assert state["stop_condition"] == "episode_truncated"
        return [call.text for call in calls]

    assert asked(0) == asked(0)
    assert len({tuple(asked(number, seed)) for number in (0, 1) for seed in (0, 1)}) == 4
    environment = load_environment("gym:Taxi-v4", num_examples=9, num_eval_examples=9)
    rows = [*environment.get_dataset(), *environment.get_eval_dataset()]
    assert len({row["info"]["seed"] for row in rows}) == 18


OWN = """
import gymnasium
from gymnasium.spaces import Box, Dict, Discrete, Sequence, Text

class Own(gymnasium.Env):
    action_space = Text(min_length=1, max_length=3)
    observation_space = Dict({"word": Text(5), "table": Box(0.0, 1.0, (2, 2))})
    closed = []

    def __init__(self, **spaces):
        for name, space in spaces.items():
            setattr(self, name, space)

    def reset(self, *, seed=None, options=None):
        return {"word": "abc", "table": [[0.123456, 1.0], [0.0, 0.5]]}, {}

    def step(self, action):
        return {"word": action, "table": [[0.0] * 2] * 2}, len(action), action == "end", False, {}

    def close(self):
        self.closed.append(self)

gymnasium.register("Own-v0", Own)
gymnasium.register("Seen-v0", Own, kwargs={"observation_space": Box(0, 255, (8, 8, 3))})
gymnasium.register("Lists-v0", Own, kwargs={"observation_space": Dict({"a": Sequence(Discrete(2))})})
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Module `own_gym` in the working directory registers three environments."""
    (tmp_path / "own_gym.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    import gymnasium

    before = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)
    sys.modules.pop("own_gym", None)


def test_an_environment_of_ones_own_is_imported_its_actions_may_be_texts_and_it_is_closed(own):
    said = ["<action>ab</action>", "far too long", "end"]
    state, calls = played("gym:own_gym:Own-v0", said, instructions="Spell.")
    assert calls[0].prompt[0]["content"] == (
        "Spell.\n\nWrite your action, a text, as <action>ACTION</action>."
    )
    assert calls[0].text == "word: abc\ntable: [[0.1235, 1],\n [0, 0.5]]"
    assert calls[2].text.startswith("I see no action.")
    assert (state["reward"], state["metrics"]["num_steps"]) == (5.0, 2.0)
    closed = sys.modules["own_gym"].Own.closed
    assert len({id(one) for one in closed}) == 2, "the one that was looked at, and the rollout's"


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("Frozen-v1", {}, "gym:Frozen-v1: .*; gymnasium.pprint_registry"),
        ("Pendulum-v1", {}, r"gym:Pendulum-v1: its actions are Box\(.*ActionWrapper"),
        (
            "FrozenLake-v1",
            {"actions": ["left", "right"]},
            r"actions has 2 names \(left, right\), but its actions are Discrete\(4\)",
        ),
        ("own_gym:Seen-v0", {}, r"observations of Box\(8, 8, 3\) are not text.*ObservationWrapper"),
        ("own_gym:Lists-v0", {}, "observations of Sequence are not text"),
    ],
)
def test_what_cannot_be_written_as_text_is_refused_by_name(own, name, arguments, problem):
    with pytest.raises(ValueError, match=problem):
        load_environment(f"gym:{name}", **arguments)


def test_without_gymnasium_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ValueError, match=r"gym:Any-v0 needs gymnasium .*'rollmatch\[gym\]'"):
        load_environment("gym:Any-v0")
