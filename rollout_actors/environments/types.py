"""The parts of an environment's rollout: input, state, and the trajectory of model calls.

They are dictionaries because users' environments read and extend them by key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, ClassVar, Literal, Protocol, TypedDict

from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

# Values are `Any` and not pydantic's `JsonValue`, because code with `call["function"]["name"]`
# knows the structure: with `JsonValue` each such access would need a cast.
JsonObject = dict[str, Any]
"""A JSON object of the OpenAI API or of another program, such as the schema of a tool."""
Fields = Mapping[str, Any]
"""Read-only values by name: a row of a dataset, a state, arguments of an environment."""
Arguments = dict[str, Any]
"""Keyword arguments of a function, a tool or a model call, as Python values."""
Message = JsonObject
"""A message of the OpenAI API: `role`, `content`, and `tool_calls` or `tool_call_id` if any."""
Messages = list[Message] | str
"""A list of messages, or a plain text if the environment's `message_type` is `completion`."""
MessageType = Literal["chat", "completion"]
"""Whether the prompts of an environment are messages (`chat`) or plain text (`completion`)."""
ModelResponse = ChatCompletion | Completion
"""The response of a model call; the message type determines its class."""
Info = JsonObject
"""Data of a dataset row in addition to prompt and answer, for the environment and its rubric."""
GivenMessage = Fields | BaseModel
"""A message or a tool call that a caller passes: a mapping, or an object of `openai`."""
SamplingArgs = Fields
"""Keyword arguments of the OpenAI API: `temperature`, `max_tokens`, `extra_body`, ..."""


class BaseRolloutInput(TypedDict):
    """The fields that the input of every rollout has."""

    prompt: Messages
    example_id: Any
    task: str


class RolloutInput(BaseRolloutInput, total=False):
    """One row of a dataset, as the input of a rollout."""

    id: Any
    """The dataset row's own id, if it has one; also in `state["id"]`."""
    answer: str
    info: Info
    position: int
    """Index of the rollout in its training step, from which the seeds of its model calls derive.

    If it is missing, `Environment.generate` uses the index of the input among its inputs.
    """


class TrajectoryStepTokens(TypedDict):
    """Tokens that the engine read and sampled in one model call.

    Masks are 1 for tokens that are trained.

    Example: the prompt [5, 6] and the answer [7, 2] have the masks [0, 0] and [1, 1], and
    `completion_logprobs` such as [-0.1, -0.5].
    """

    prompt_ids: list[int]
    prompt_mask: list[int]
    """1 for a token that is trained, else 0; the same in `completion_mask`."""
    completion_ids: list[int]
    """The sampled tokens, including the stop token if one was sampled."""
    completion_mask: list[int]
    completion_logprobs: list[float]
    """Natural logarithms of the probabilities of the sampled tokens."""


class TrajectoryStep(TypedDict):
    """One model call of a rollout: what was sent, what came back, and how it is rewarded."""

    prompt: Messages
    """The messages exactly as they were sent in this call."""
    completion: Messages
    """The model's messages, exactly as they were returned in this call."""
    # Of any type, because an environment that writes its own steps may store anything here.
    response: Any
    tokens: TrajectoryStepTokens | None
    """The tokens of this call; None if the engine did not return them: the call is not trained."""
    reward: float | None
    """Reward of this call if a rubric or an environment set one, else the rollout's reward; None
    until the rollout is scored."""
    advantage: float | None
    extras: JsonObject


class RolloutTiming(TypedDict):
    """Times of a rollout, without waits in a queue for the model, the rubric or a thread."""

    generation_ms: float
    scoring_ms: float
    total_ms: float
    """The sum of `generation_ms` and `scoring_ms`."""
    start_time: float
    """Unix time in seconds at the start of the rollout."""


class State(dict[str, Any]):
    """The record of a rollout: input fields, trajectory, reward, and fields of the environment.

    The keys in `INPUT_FIELDS` are stored in `state["input"]`, if there is one. Reading, writing,
    iterating, copying and pickling treat them as keys of the state. Keys that begin with an
    underscore are internal. Example: after `state = State(input={"answer": "4"})`,
    `state["answer"]` is "4", and `state["answer"] = "5"` writes `state["input"]["answer"]`.
    """

    INPUT_FIELDS: ClassVar[list[str]] = ["prompt", "answer", "task", "info", "example_id"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.update(*args, **kwargs)

    # Lookups use the dictionary's own fast code, and call this only for missing keys.
    def __missing__(self, key: str) -> Any:
        held = self._input_with(key)
        if held is None:
            raise KeyError(key)
        return held[key]

    def get(self, key: str, default: Any = None) -> Any:
        if key in _INPUT_FIELDS and (held := self._input_with(key)) is not None:
            return held[key]
        return dict.get(self, key, default)

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or self._input_with(key) is not None

    def __setitem__(self, key: str, value: object) -> None:
        # A field of the input is stored in one place, so that no reader sees an older copy of it.
        if key in self.INPUT_FIELDS and dict.__contains__(self, "input"):
            dict.__getitem__(self, "input")[key] = value
            return
        dict.__setitem__(self, key, value)
        if key == "input" and isinstance(value, dict):
            for name in self.INPUT_FIELDS:
                if name in value:
                    dict.pop(self, name, None)  # the input's value is used instead

    def __delitem__(self, key: str) -> None:
        held = self._input_with(key)
        if held is None:
            dict.__delitem__(self, key)
        else:
            del held[key]

    def __iter__(self) -> Iterator[str]:
        yield from dict.__iter__(self)
        for key in self.INPUT_FIELDS:
            if self._input_with(key) is not None and not dict.__contains__(self, key):
                yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"State({dict(self)!r})"

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Write several keys. A given `input` is copied, so that later writes do not change it."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = dict(value) if key == "input" and isinstance(value, dict) else value

    def copy(self) -> State:
        """Return a copy of the state and its input. Writes to the copy do not change this state."""
        items = dict(dict.items(self))
        if "input" in items:
            items["input"] = dict(items["input"])
        return _state(type(self), items)

    __copy__ = copy

    def __or__(self, other: Fields) -> State:  # type: ignore[override]
        joined = self.copy()
        joined.update(other)
        return joined

    def __ior__(self, other: Fields) -> State:  # type: ignore[override]
        self.update(other)
        return self

    def pop(self, key: str, *default: Any) -> Any:
        if default and key not in self:
            return default[0]
        value = self[key]
        del self[key]
        return value

    # `dict` implements these on its own table; these implementations use the methods above.
    setdefault = MutableMapping.setdefault
    clear = MutableMapping.clear
    popitem = MutableMapping.popitem
    keys = MutableMapping.keys  # type: ignore[assignment]
    items = MutableMapping.items  # type: ignore[assignment]
    values = MutableMapping.values  # type: ignore[assignment]
    __eq__ = MutableMapping.__eq__
    __ne__ = object.__ne__
    __hash__ = None

    def __reduce__(self) -> tuple[object, ...]:
        # Unpickling does not call the constructor, because a subclass may define its own.
        return _state, (type(self), dict(dict.items(self)))

    def _input_with(self, key: object) -> JsonObject | None:
        """Return the input if it has this field; None if it does not, or if there is no input."""
        if key not in _INPUT_FIELDS or not dict.__contains__(self, "input"):
            return None
        held: JsonObject = dict.__getitem__(self, "input")
        return held if key in held else None


_INPUT_FIELDS = frozenset(State.INPUT_FIELDS)  # for every lookup by `get`; the list has an order


def _state(kind: type[State], items: Fields) -> State:
    state = kind.__new__(kind)
    # Not the state's own `update`, which would copy the input and write fields into it.
    dict.update(state, items)
    return state


class EndpointClient(Protocol):
    """A client for model calls: `openai.AsyncOpenAI`, or an object with the same two methods.

    They are `chat.completions.create` for messages and `completions.create` for plain text.
    """

    @property
    def chat(self) -> Any: ...
    @property
    def completions(self) -> Any: ...


class ConversationClient(Protocol):
    """A client that has a separate conversation for each rollout (`EngineClient`)."""

    def conversation(
        self, state: State, *, of: Fields | None = None, path: str = ""
    ) -> EndpointClient: ...


Client = EndpointClient | ConversationClient
"""The client to which the rollouts of an environment send their model calls."""
