"""The context of a running rollout: its model calls find their client and their seeds there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

from rollout_actors.environments.clients.openai import is_rollout_client
from rollout_actors.environments.lifecycle import awaited, finish_cleanup
from rollout_actors.environments.types import (
    Client,
    EndpointClient,
    Fields,
    JsonObject,
    RolloutInput,
    State,
)

if TYPE_CHECKING:
    from rollout_actors.environments.environment import Environment


@dataclass(slots=True)
class RolloutScope:
    """Data about one running rollout of an environment, stored in a context variable.

    The seeds of its model calls derive from its path. Example: the rollout of a dataset row has the
    path "". Two judge rollouts that its environment starts have "/0" and "/1", and two rollouts of
    a `generate` call after them "/2.0" and "/2.1". Calls of a reward function append "=".
    """

    environment: Environment | None
    """The environment that plays the rollout; None during scoring."""
    input: Fields
    outermost: Fields
    """Input of the outermost rollout, which contains this one. Seeds derive from its `position`."""
    path: str = ""
    state: State | None = None
    """The last state that the environment returned. A failing rollout keeps it."""
    clients: list[tuple[Client, EndpointClient]] = field(default_factory=list)
    """Clients that have a conversation for each rollout, each with this rollout's conversation."""
    num_children: int = 0
    is_closed: bool = False

    def child_path(self) -> str:
        """Return a new path for a rollout that is started inside this one."""
        self.num_children += 1
        return f"{self.path}/{self.num_children - 1}"

    def client(self, client: Client) -> EndpointClient:
        """Return the object that sends this rollout's model calls: a conversation, or `client`.

        All calls of a rollout use the same conversation.
        """
        if not is_rollout_client(client):
            return client
        # Compared by identity, in a list, because a client may not be hashable.
        for known, conversation in self.clients:
            if known is client:
                return conversation
        # A rollout may call the model before it has a state. Then only its input is known.
        state = State(input=dict(self.input)) if self.state is None else self.state
        conversation = client.conversation(state, of=self.outermost, path=self.path)
        self.clients.append((client, conversation))
        return conversation

    async def close(self) -> None:
        """End the rollout: call every `@cleanup` method, once.

        Also count the model calls whose prompt did not continue earlier tokens (`num_splits`).
        """
        if self.is_closed or self.state is None or self.environment is None:
            return
        # Set first, so that a cleanup that raises is not called again.
        self.is_closed = True
        splits = [getattr(conversation, "num_splits", None) for _, conversation in self.clients]
        counted = [number for number in splits if number is not None]
        if counted:
            self.state["num_splits"] = sum(counted)
        if self.environment._has_cleanup:
            await finish_cleanup(
                self.environment._cleanup(self.state), self.environment.cleanup_timeout_s
            )


_SCOPE: ContextVar[RolloutScope | None] = ContextVar("rollout_scope", default=None)


def current_scope() -> RolloutScope | None:
    """Return the rollout that is running in this context (the innermost); None: there is none."""
    return _SCOPE.get()


def enter_scope(scope: RolloutScope) -> None:
    """Let the current task work for this rollout from now on. The task needs its own context."""
    _SCOPE.set(scope)


def in_scope(rollout: Callable[..., object]) -> Callable[..., Any]:
    """Wrap `Environment.rollout`: create a `RolloutScope` for it, and clean up at its end.

    If the current scope is of this environment and has no state yet, the rollout uses that scope.
    `generate`, or an override that calls `super().rollout`, has made it for this rollout. Any other
    rollout that begins inside a scope gets a child scope.
    """

    @wraps(rollout)
    async def opened(
        self: Environment, input: RolloutInput, *args: object, **kwargs: object
    ) -> object:
        # In a group a member plays the rollout, so the member's cleanups are called.
        environment = self.member(input.get("task"))
        outer = _SCOPE.get()
        if outer is not None and outer.environment is environment and outer.state is None:
            scope = outer
        elif outer is not None:
            scope = RolloutScope(environment, input, outer.outermost, outer.child_path())
        else:
            scope = RolloutScope(environment, input, input)
        token = _SCOPE.set(scope)
        try:
            result = await awaited(rollout(self, input, *args, **kwargs))
            if isinstance(result, State) and not scope.is_closed:
                scope.state = result
            return result
        finally:
            _SCOPE.reset(token)
            await scope.close()

    return opened


def bind_client(client: Client) -> EndpointClient:
    """Return what sends the running rollout's model calls: its conversation, or `client` itself.

    Raises RuntimeError if the client needs a conversation per rollout, and no rollout is running.
    """
    if not is_rollout_client(client):
        return client
    scope = _SCOPE.get()
    if scope is None:
        raise RuntimeError(
            f"{type(client).__name__} must know which rollout a call belongs to, and no rollout is"
            " running here; call it inside the environment's rollout, or use another client"
        )
    return scope.client(client)


def new_state(input: JsonObject) -> State:
    """Return the state of a new rollout of this input, with all fields. The input is not copied."""
    # Not `State.update`, which copies the input: `init_state` has copied the row already.
    state = State()
    dict.update(state, {"input": input, "id": input.get("id", input["example_id"]), **_fields()})
    return state


def with_defaults(state: State, input: Fields) -> State:
    """Add the fields to a state that a subclass's own `init_state` or `rollout` left out."""
    if not dict.__contains__(state, "input"):
        state["input"] = {key: value for key, value in input.items() if key not in state}
    for name, value in _fields().items():
        # None of them is a field of the input, where the state's own methods would look too.
        if not dict.__contains__(state, name) or (
            name in ("trajectory", "timing") and state[name] is None
        ):
            state[name] = value
    return state


def require_state(result: object, method: str, environment: Environment) -> State:
    """Return the result of an environment's method, which must be a state.

    Raises TypeError if it is something else, for example because a `return` was forgotten.
    """
    if not isinstance(result, State):
        what = "nothing" if result is None else type(result).__name__
        raise TypeError(f"{method} of {environment.name} returned {what}; return the state")
    return result


def _fields() -> JsonObject:
    return {
        "is_completed": False,
        "is_truncated": False,
        "stop_condition": None,
        "oai_tools": [],
        "trajectory": [],
        "completion": None,
        "reward": None,
        "advantage": None,
        "metrics": None,
        "error": None,
        "timing": {
            "generation_ms": 0.0,
            "scoring_ms": 0.0,
            "total_ms": 0.0,
            "start_time": time.time(),
        },
    }
