"""What a rollout of an environment is made of (spec: trajectories). They are dictionaries because
environments of users read and extend them by key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, ClassVar, TypedDict

Message = dict[str, Any]
"""As the OpenAI API has it: `role`, `content`, and `tool_calls` or `tool_call_id` where there are
any.
"""
Messages = list[Message] | str
"""A conversation, or where `message_type` is `completion`, plain text."""
SamplingArgs = Mapping[str, Any]
"""Keyword arguments of the OpenAI API: `temperature`, `max_tokens`, `extra_body`, ..."""


class BaseRolloutInput(TypedDict):
    """The fields that every input of a rollout has."""

    prompt: Messages
    example_id: Any
    task: str


class RolloutInput(BaseRolloutInput, total=False):
    """One row of a dataset, as a rollout begins with it."""

    id: Any
    """The row's own, where it has one; `state["id"]`."""
    answer: str
    info: dict[str, Any]
    position: int
    """The rollout's place in its step of training, from which the seeds of its calls follow.
    Without it, `generate` takes its place among the inputs.
    """


class TrajectoryStepTokens(TypedDict):
    """What the engine read and sampled in one call, by token. Masks are 1 where a token may be
    learned.
    """

    prompt_ids: list[int]
    prompt_mask: list[int]
    completion_ids: list[int]
    """With the stop token, where one was sampled."""
    completion_mask: list[int]
    completion_logprobs: list[float]
    """Under the probabilities that the tokens were sampled from."""


class TrajectoryStep(TypedDict):
    """One call of the model."""

    prompt: Messages
    """Exactly as it was sent in this call."""
    completion: Messages
    """Exactly as it came back."""
    response: Any
    tokens: TrajectoryStepTokens | None
    """None where the engine did not return them: nothing can be learned from the step then."""
    reward: float | None
    """None until it is scored; then the step's own, which an environment or a rubric has set, or
    else the rollout's.
    """
    advantage: float | None
    extras: dict[str, Any]


class RolloutTiming(TypedDict):
    """Milliseconds; waiting for a turn at the model or at the rubric, or for a thread of a plain
    reward function, is in none of them.
    """

    generation_ms: float
    scoring_ms: float
    total_ms: float
    """The two together."""
    start_time: float
    """Unix time in seconds."""


class State(dict[str, Any]):
    """All that is known of a rollout.

    The keys of `INPUT_FIELDS` are those of `state["input"]`, if there is one: however the state is
    read, iterated over, copied or written, they look like its own. An environment adds keys of its
    own; those with an underscore in front are the package's.
    """

    INPUT_FIELDS: ClassVar[list[str]] = ["prompt", "answer", "task", "info", "example_id"]
    _OF_INPUT: ClassVar[frozenset[str]] = frozenset(INPUT_FIELDS)
    """The same, to be looked up in: a turn reads some dozens of keys."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._OF_INPUT = frozenset(cls.INPUT_FIELDS)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.update(*args, **kwargs)

    def __missing__(self, key: str) -> Any:
        # Reading is the dictionary's own, which is quick, and comes here for what its table does
        # not have.
        if (held := self._held(key)) is None:
            raise KeyError(key)
        return held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._OF_INPUT and dict.__contains__(self, "input"):
            dict.__getitem__(self, "input")[key] = value
            return
        dict.__setitem__(self, key, value)
        if key == "input" and isinstance(value, dict):
            for name in self._OF_INPUT & value.keys():
                dict.pop(self, name, None)  # the input's counts

    def get(self, key: str, default: Any = None) -> Any:
        if key in self._OF_INPUT and (held := self._held(key)) is not None:
            return held[key]
        return dict.get(self, key, default)

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def __delitem__(self, key: str) -> None:
        if (held := self._held(key)) is None:
            dict.__delitem__(self, key)
        else:
            del held[key]

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or self._held(key) is not None

    def __iter__(self) -> Iterator[str]:
        yield from dict.__iter__(self)
        yield from (
            key
            for key in self.INPUT_FIELDS
            if self._held(key) is not None and not dict.__contains__(self, key)
        )

    def __reversed__(self) -> Iterator[str]:
        return reversed(list(self))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"State({dict(self)!r})"

    def copy(self) -> State:
        """Writing to the copy, also of an input's field, leaves this one as it is."""
        return _state(
            type(self),
            {key: dict(value) if key == "input" else value for key, value in dict.items(self)},
        )

    __copy__ = copy

    def __or__(self, other: Any) -> State:  # type: ignore[override]
        joined = self.copy()
        joined.update(other)
        return joined

    def __ior__(self, other: Any) -> State:  # type: ignore[override]
        self.update(other)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _state, (type(self), dict(dict.items(self)))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """An input among what is given is copied: what is written to its fields here leaves its
        owner's as they are.
        """
        for key, value in dict(*args, **kwargs).items():
            self[key] = dict(value) if key == "input" and isinstance(value, dict) else value

    def popitem(self) -> tuple[str, Any]:
        for key in reversed(self):
            return key, self.pop(key)
        raise KeyError("popitem(): the state is empty")

    # What `dict` does by looking at its own table, done by the methods above.
    setdefault = MutableMapping.setdefault
    clear = MutableMapping.clear
    keys = MutableMapping.keys  # type: ignore[assignment]
    items = MutableMapping.items  # type: ignore[assignment]
    values = MutableMapping.values  # type: ignore[assignment]
    __eq__ = MutableMapping.__eq__
    __ne__ = object.__ne__
    __hash__ = None

    def _held(self, key: object) -> dict[Any, Any] | None:
        """The input, where this is one of its fields."""
        if key not in self._OF_INPUT or not dict.__contains__(self, "input"):
            return None
        held: dict[Any, Any] = dict.__getitem__(self, "input")
        return held if key in held else None


def _state(kind: type[State], own: Mapping[str, Any]) -> State:
    state = kind.__new__(kind)
    dict.update(state, own)
    return state
