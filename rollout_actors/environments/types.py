"""The parts of a rollout (spec: trajectories).

They are dictionaries because environments of users read and extend them by key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, ClassVar, Literal, Protocol, TypedDict

from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

# Values are `Any` and not pydantic's `JsonValue`, because who reads `call["function"]["name"]`
# knows the form: with `JsonValue` each such read would need a cast.
JsonObject = dict[str, Any]
"""A JSON object of the OpenAI API or of another program, such as the schema of a tool."""
Fields = Mapping[str, Any]
"""Values by name that are only read: a row of a dataset, a state, arguments of an environment."""
Arguments = dict[str, Any]
"""Arguments of a call by name, as Python values."""
Message = JsonObject
"""A message of the OpenAI API: `role`, `content`, and `tool_calls` or `tool_call_id` if any."""
Messages = list[Message] | str
"""A conversation, or plain text if `message_type` is `completion`."""
MessageType = Literal["chat", "completion"]
"""Whether prompts are messages or plain text."""
ModelResponse = ChatCompletion | Completion
"""What a call of the model returns, by the message type."""
Info = JsonObject
"""What a row says besides its prompt and answer."""
GivenMessage = Fields | BaseModel
"""A message or a tool call as a caller may have it: a mapping, or an object of `openai`."""
SamplingArgs = Fields
"""Keyword arguments of the OpenAI API: `temperature`, `max_tokens`, `extra_body`, ..."""


class BaseRolloutInput(TypedDict):
    """The fields that every input of a rollout has."""

    prompt: Messages
    example_id: Any
    task: str


class RolloutInput(BaseRolloutInput, total=False):
    """One row of a dataset, as a rollout begins with it."""

    id: Any
    """The row's own, if it has one; `state["id"]`."""
    answer: str
    info: Info
    position: int
    """Index of the rollout in its training step, which the seeds of its calls follow from.

    `generate` fills in the index among its inputs.
    """


class TrajectoryStepTokens(TypedDict):
    """The tokens that the engine read and sampled in one call; masks are 1 where one is learned.

    Example: the prompt [5, 6] and the answer [7, 2] have the masks [0, 0] and [1, 1], and
    `completion_logprobs` such as [-0.1, -0.5].
    """

    prompt_ids: list[int]
    prompt_mask: list[int]
    completion_ids: list[int]
    """With the stop token, if one was sampled."""
    completion_mask: list[int]
    completion_logprobs: list[float]
    """Natural logarithms of the probabilities that the tokens were sampled with."""


class TrajectoryStep(TypedDict):
    """One call of the model."""

    prompt: Messages
    """Messages exactly as they were sent in this call."""
    completion: Messages
    """Messages exactly as they came back."""
    # Of any type: an environment that writes its own steps may note what it likes here.
    response: Any
    tokens: TrajectoryStepTokens | None
    """None if the engine did not return them: nothing can be learned from the step then."""
    reward: float | None
    """None until it is scored; then the step's own, set by somebody, or else the rollout's."""
    advantage: float | None
    extras: JsonObject


class RolloutTiming(TypedDict):
    """Milliseconds, without waits for a turn at the model or the rubric, or for a thread."""

    generation_ms: float
    scoring_ms: float
    total_ms: float
    """The two together."""
    start_time: float
    """Unix time in seconds."""


class State(dict[str, Any]):
    """The record of a rollout: input fields, trajectory, reward, and whatever an environment adds.

    The keys of `INPUT_FIELDS` are those of `state["input"]`, if there is one: reading, writing,
    iterating, copying and pickling treat them as the state's own. Keys with an underscore in front
    are the package's. Example: after `state = State(input={"answer": "4"})`, `state["answer"]` is
    "4", and `state["answer"] = "5"` writes `state["input"]["answer"]`.
    """

    INPUT_FIELDS: ClassVar[list[str]] = ["prompt", "answer", "task", "info", "example_id"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.update(*args, **kwargs)

    # Reading is the dictionary's own, which is quick, and comes here for the rest.
    def __missing__(self, key: str) -> Any:
        held = self._input_with(key)
        if held is None:
            raise KeyError(key)
        return held[key]

    def get(self, key: str, default: Any = None) -> Any:
        if key in self.INPUT_FIELDS and (held := self._input_with(key)) is not None:
            return held[key]
        return dict.get(self, key, default)

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or self._input_with(key) is not None

    def __setitem__(self, key: str, value: object) -> None:
        # A field of the input is kept in one place: no reader sees an older copy of it.
        if key in self.INPUT_FIELDS and dict.__contains__(self, "input"):
            dict.__getitem__(self, "input")[key] = value
            return
        dict.__setitem__(self, key, value)
        if key == "input" and isinstance(value, dict):
            for name in self.INPUT_FIELDS:
                if name in value:
                    dict.pop(self, name, None)  # the input's counts

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
        """Write several keys. An input is copied: writing to its fields here leaves the owner's."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = dict(value) if key == "input" and isinstance(value, dict) else value

    def copy(self) -> State:
        """Copy the state with its input; writing to the copy leaves this one as it is."""
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

    # `dict` does these by looking at its own table; these ones ask the methods above.
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
        # Unpickling does not call the constructor, since a subclass may have one of its own.
        return _state, (type(self), dict(dict.items(self)))

    def _input_with(self, key: object) -> JsonObject | None:
        """Return the input if it has this field."""
        if key not in self.INPUT_FIELDS or not dict.__contains__(self, "input"):
            return None
        held: JsonObject = dict.__getitem__(self, "input")
        return held if key in held else None


def _state(kind: type[State], items: Fields) -> State:
    state = kind.__new__(kind)
    # Not the state's own `update`, which would copy the input and write through to it.
    dict.update(state, items)
    return state


class EndpointClient(Protocol):
    """`openai.AsyncOpenAI`, or what takes its two calls: `chat.completions.create` for messages,
    `completions.create` for plain text.
    """

    @property
    def chat(self) -> Any: ...
    @property
    def completions(self) -> Any: ...


class ConversationClient(Protocol):
    """A client that has to know which calls belong to one rollout (`EngineClient`)."""

    def conversation(
        self, state: State, *, of: Fields | None = None, path: str = ""
    ) -> EndpointClient: ...


Client = EndpointClient | ConversationClient
"""What rollouts ask."""
