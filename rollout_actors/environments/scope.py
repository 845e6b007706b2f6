"""The rollout that is running: opened around `Environment.rollout`, seen by its calls."""

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
    """One running rollout, read through a context variable.

    The seeds of its calls follow from its path. Example: the rollout of an input has the path "",
    two rollouts that its environment asks a judge for "/0" and "/1", the two of a `generate` call
    in it then "/2.0" and "/2.1". Calls of a reward function have "=".
    """

    environment: Environment | None
    """The one that makes the rollout; None while it is scored."""
    input: Fields
    outermost: Fields
    """Input of the outermost rollout, whose `position` the seeds follow from."""
    path: str = ""
    state: State | None = None
    """The last state that the environment returned, which a failing rollout keeps."""
    clients: list[tuple[Client, EndpointClient]] = field(default_factory=list)
    """Clients that know rollouts, each with the conversation that it opened for this one."""
    num_children: int = 0
    is_closed: bool = False

    def child_path(self) -> str:
        """Return the path of the next rollout that begins in this one."""
        self.num_children += 1
        return f"{self.path}/{self.num_children - 1}"

    def client(self, client: Client) -> EndpointClient:
        """Return the conversation that the calls of this rollout go to, always the same."""
        if not is_rollout_client(client):
            return client
        # Compared by identity, in a list: a client may have no hash.
        for known, conversation in self.clients:
            if known is client:
                return conversation
        # A rollout may ask before it has a state. Then its input is all that is known of it.
        state = State(input=dict(self.input)) if self.state is None else self.state
        conversation = client.conversation(state, of=self.outermost, path=self.path)
        self.clients.append((client, conversation))
        return conversation

    async def close(self) -> None:
        """Count the rollout's splits and call every `@cleanup`, once."""
        if self.is_closed or self.state is None or self.environment is None:
            return
        # Set first: an error in a cleanup must not have it called again.
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
    """Return the innermost rollout of this context; None outside of all."""
    return _SCOPE.get()


def enter_scope(scope: RolloutScope) -> None:
    """Make a scope the current one of this task, which has a context of its own."""
    _SCOPE.set(scope)


def in_scope(rollout: Callable[..., object]) -> Callable[..., Any]:
    """Wrap `Environment.rollout`: open a scope around it, and clean up at its end.

    A rollout that has a scope and no state yet shares it: `generate` opened it, or an override
    that asks `super().rollout`. Any other rollout inside a scope is a child of it.
    """

    @wraps(rollout)
    async def opened(
        self: Environment, input: RolloutInput, *args: object, **kwargs: object
    ) -> object:
        # In a group the member plays the rollout, so its cleanups are the ones to call.
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
    """Return what a call in the current rollout goes to.

    Raises:
        RuntimeError: the client has to know the rollout, and none is under way.
    """
    if not is_rollout_client(client):
        return client
    scope = _SCOPE.get()
    if scope is None:
        raise RuntimeError(
            f"{type(client).__name__} has to know of which rollout a call is, and none is under way"
            " here; call it inside the environment's rollout, or give another client"
        )
    return scope.client(client)


def new_state(input: JsonObject) -> State:
    """Make a state with every field of a rollout. It takes the input without a copy."""
    # Without `State.update`, which copies the input: `init_state` has copied the row already.
    state = State()
    dict.update(state, {"input": input, "id": input.get("id", input["example_id"]), **_fields()})
    return state


def with_defaults(state: State, input: Fields) -> State:
    """Add the fields of a rollout that an environment's own `init_state` or `rollout` left out."""
    if not dict.__contains__(state, "input"):
        state["input"] = {key: value for key, value in input.items() if key not in state}
    for name, value in _fields().items():
        is_missing = name not in state or (name in ("trajectory", "timing") and state[name] is None)
        if is_missing:
            state[name] = value
    return state


def require_state(result: object, method: str, environment: Environment) -> State:
    """Return an environment's result, which is a state unless a `return` was forgotten.

    Raises:
        TypeError: it is something else.
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
