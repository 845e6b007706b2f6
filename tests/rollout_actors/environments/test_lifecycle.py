"""`@stop`, `@cleanup` and `@teardown` (spec: trajectories, 5)."""

import asyncio
import re
import signal
import textwrap
import threading
from typing import Any

import pytest
from counted_time import counted
from environment_support import (
    Talk,
    assistant,
    cancelled_when,
    generated,
    rolled_out,
    rows,
    user,
)
from forked_programs import ran
from scripted_client import ScriptedClient

from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.lifecycle import Event, cleanup, handlers, stop, teardown

IMPORTS = """
import asyncio, os, signal, threading, time
from environment_support import Talk, rows
from rollout_actors.environments.lifecycle import cleanup, teardown
from scripted_client import ScriptedClient, chat_response
"""
ROW = {"prompt": [user("hi")], "example_id": 0, "task": "talk"}


def says_a(call):
    return "a"


class Ordered:
    @stop
    def b(self, state): ...

    @stop
    async def a(self, state): ...

    @stop(priority=5)
    def z(self, state): ...

    @stop(priority=-1)
    def early_name(self, state): ...

    @cleanup
    def put_away(self, state): ...

    @teardown(priority=1)
    def close(self): ...

    @property
    def dear(self):
        raise AssertionError("not to be computed")


class Sub(Ordered):
    @stop(priority=-2)
    def a(self, state): ...

    @stop
    def c(self, state): ...


@pytest.mark.parametrize(
    ("owner", "event", "names"),
    [
        (Ordered(), Event.STOP, ["z", "a", "b", "early_name"]),
        (Ordered(), Event.CLEANUP, ["put_away"]),
        (Ordered(), Event.TEARDOWN, ["close"]),
        (Sub(), Event.STOP, ["z", "b", "c", "early_name", "a"]),
    ],
    ids=["stop", "cleanup", "teardown", "a subclass inherits, adds and overrides"],
)
def test_handlers_come_by_priority_highest_first_and_then_by_name(owner, event, names):
    assert [handler.__name__ for handler in handlers(owner, event)] == names


# Stop


def test_the_first_stop_condition_that_holds_is_noted_by_name_and_all_are_asked_before_each_turn():
    asked = []

    class Env(Talk):
        @stop(priority=5)
        async def patience(self, state):
            asked.append(len(state["trajectory"]))
            return False

        @stop
        def b_second(self, state):
            return len(state["trajectory"]) == 2

        @stop
        def a_first(self, state):
            return len(state["trajectory"]) == 2

    client = ScriptedClient(["1", "2"])
    state = rolled_out(Env(max_turns=5), ROW, client)
    assert (state["stop_condition"], state["is_completed"]) == ("a_first", True)
    assert asked == [0, 1, 2]
    assert client.num_calls == 2


class Adds(Talk):
    async def is_completed(self, state, **kwargs):
        return await super().is_completed(state, **kwargs) or len(state["trajectory"]) == 1


class Notes(Talk):
    async def is_completed(self, state, **kwargs):
        if len(state["trajectory"]) == 1:
            state.update(is_completed=True, stop_condition="mine")
        return state["is_completed"]


class SaysBye(Talk):
    async def is_completed(self, state, **kwargs):
        return False

    async def env_response(self, messages, state, **kwargs):
        state["final_env_response"] = [user("bye")]
        return []


@pytest.mark.parametrize(
    ("env", "reason", "more"),
    [
        (Adds(max_turns=3), None, []),
        (Adds(max_turns=1), "max_turns_reached", []),
        (Notes(), "mine", []),
        (SaysBye(), None, [user("bye")]),
    ],
    ids=[
        "adds its own",
        "asks the conditions first",
        "notes it itself",
        "leaves it to the last word",
    ],
)
def test_an_override_of_is_completed_asks_the_conditions_and_adds_its_own(env, reason, more):
    state = rolled_out(env, ROW, ScriptedClient(["1"]))
    assert (state["is_completed"], state["stop_condition"]) == (True, reason)
    assert state["completion"] == [assistant("1"), *more]


def test_a_stop_condition_that_holds_by_what_the_environment_says_is_asked_when_the_model_has_heard_it():
    """As the document's listing of `rollout` has it."""

    class Game(Talk):
        async def env_response(self, messages, state, **kwargs):
            state["won"] = True
            return [user("you won")]

        @stop
        def won(self, state):
            return state.get("won", False)

    state = rolled_out(Game(max_turns=-1), ROW, ScriptedClient(["1", "hurrah"]))
    assert state["stop_condition"] == "won"
    assert state["completion"] == [assistant("1"), user("you won"), assistant("hurrah")]


# Cleanup: exactly once, whatever fails or is cancelled, is in `test_drawn_environments.py`.


def test_cleanup_goes_on_through_a_second_cancellation():
    log = []

    class Slow(Talk):
        @cleanup
        async def release(self, state):
            log.append("begun")
            await asyncio.sleep(0.05)
            log.append("ended")

    async def twice():
        waiting = ScriptedClient(says_a, delay_s=30)
        task = asyncio.create_task(Slow().rollout(ROW, waiting, "model"))
        for is_ready in (lambda: waiting.num_under_way, lambda: log):
            while not is_ready():
                await asyncio.sleep(0.001)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(twice())
    assert log == ["begun", "ended"]


# Teardown


class Torn(Talk):
    def __init__(self):
        super().__init__()
        self.called, self.tasks = [], []

    @teardown
    def plain(self):
        self.called.append("plain")

    @teardown(priority=1)
    async def first(self):
        await asyncio.sleep(0)
        self.called.append("first")
        self.tasks.append(asyncio.current_task())


@pytest.mark.parametrize("fails", [False, True])
def test_teardown_is_called_once_by_priority_in_the_task_that_closes_the_environment(fails):
    env = Torn()

    async def closed():
        async with env:
            env.tasks.append(asyncio.current_task())
            if fails:
                raise RuntimeError("inside")
        await env.aclose()

    if fails:
        with pytest.raises(RuntimeError, match="inside"):
            asyncio.run(closed())
    else:
        asyncio.run(closed())
    assert env.called == ["first", "plain"]
    assert env.tasks[0] is env.tasks[1], "what it has entered, a handler may leave"


class Hangs(Talk):
    cleanup_timeout_s = 0.05

    def __init__(self, done):
        super().__init__()
        self.done = done

    @teardown(priority=1)
    async def hang(self):
        self.done.append("begun")
        await asyncio.sleep(30)

    @teardown
    async def close(self):
        await asyncio.sleep(0)
        self.done.append("closed")


class Patient(Hangs):
    cleanup_timeout_s = 300.0


class Group(EnvGroup):
    cleanup_timeout_s = 0.5

    @teardown
    async def own(self):
        self.env_map["env_0"].done.append("own")


@pytest.mark.parametrize(
    ("env_of", "expected"),
    [
        (lambda kind, done: kind(done), ["begun", "closed"]),
        (
            lambda kind, done: Group([kind(done), Hangs(done)]),
            ["own", "begun", "closed", "begun", "closed"],
        ),
    ],
    ids=["alone", "in a group"],
)
@pytest.mark.parametrize("ends", ["at its limit", "by a cancellation"])
def test_a_teardown_that_hangs_keeps_no_other_from_its_own(env_of, expected, ends):
    done = []
    if ends == "at its limit":
        late = (
            r"the teardown is not done after cleanup_timeout_s = 0\.05 s; check what it waits for"
        )
        with pytest.raises(TimeoutError, match=late):
            counted(env_of(Hangs, done).aclose())
    else:
        env = env_of(Patient, done)
        cancelled_when(lambda: "begun" in done, env.aclose)
    assert done == expected


@pytest.mark.parametrize("mark", [stop, cleanup])
def test_a_group_whose_own_marked_method_nobody_would_call_is_refused(mark):
    class Marked(EnvGroup):
        @mark
        def own(self, state):
            return False

    with pytest.raises(TypeError, match=r"^own: .*EnvGroup .*@stop or @cleanup"):
        Marked([Talk()])


def test_an_environment_made_off_the_main_thread_sets_no_signal_handler():
    before = signal.getsignal(signal.SIGTERM)
    environments = []
    thread = threading.Thread(target=lambda: environments.append(Torn()))
    thread.start()
    thread.join()
    asyncio.run(environments[0].aclose())
    assert signal.getsignal(signal.SIGTERM) is before
    assert environments[0].called == ["first", "plain"]


# The end of the process

PROGRAM = """
    class Env(Talk):
        @cleanup
        async def put_away(self, state):
            await asyncio.sleep(0.01)
            print("cleanup", flush=True)

        @teardown
        async def close(self):
            await asyncio.sleep(0.01)
            print("teardown", flush=True)

        @teardown
        def close_plainly(self):
            print("plainly", flush=True)

"""
TORN = ["teardown", "plainly"]


def program(body: str, **signalled: Any) -> tuple[list[str], int, str]:
    """Lines that it wrote, how it ended, and what it complained of."""
    code = textwrap.dedent(PROGRAM) + textwrap.dedent(body)
    lines, status, complaints = ran(code, IMPORTS, **signalled)
    return " ".join(lines).split(), status, complaints


OFF_THE_MAIN_THREAD = """
    def work():
        env = Env()
        results = asyncio.run(env.generate(rows(2), ScriptedClient(lambda call: "1"), "model", use_tqdm=False))
        print(len(results.state), "done", flush=True)
    thread = threading.Thread(target=work); thread.start(); thread.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("env = Env(); print('end')", ["end", *TORN]),
        (
            "env = Env(); other = Env(); asyncio.run(env.aclose()); print('end')",
            [*TORN, "end", *TORN],
        ),
        (OFF_THE_MAIN_THREAD, ["cleanup", "cleanup", "2", "done", *TORN]),
    ],
    ids=["open", "one of two was closed", "made off the main thread"],
)
def test_teardown_is_called_once_when_the_process_ends(body, lines):
    assert program(body) == (lines, 0, "")


UNDER_WAY = """
    {handler}
    env = Env()
    {ready}
    asyncio.run(env.generate(rows(1), ScriptedClient(ready), "model", use_tqdm=False))
"""
WAITS = """async def ready(call):
        print("ready", flush=True)
        await asyncio.sleep(60)"""
RUNS = """def ready(call):
        print("ready", flush=True)
        while True: pass"""
DEFAULT = "signal.signal(signal.SIGINT, signal.default_int_handler)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "cleans", "sign"),
    [
        ("    env = Env(); print('ready', flush=True); time.sleep(60)", [], signal.SIGTERM),
        (UNDER_WAY.format(handler="", ready=RUNS), ["cleanup"], signal.SIGTERM),
        (UNDER_WAY.format(handler=DEFAULT, ready=WAITS), ["cleanup"], signal.SIGINT),
    ],
    ids=[
        "nothing is under way",
        "its code runs",
        "a Ctrl-C",
    ],
)
def test_on_a_signal_rollouts_under_way_clean_up_before_the_teardown_which_is_called_once(
    body, cleans, sign
):
    lines, code, complaints = program(body, signal_at="ready", sign=sign)
    assert lines == ["ready", *cleans, *TORN]
    if sign is signal.SIGTERM:
        assert code == 128 + signal.SIGTERM
    else:
        assert "KeyboardInterrupt" in complaints


def test_a_handler_for_sigterm_that_the_program_has_is_left_alone():
    body = """
    signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"mine\\n"), os._exit(7)))
    env = Env(); print("ready", flush=True); time.sleep(60)
    """
    assert program(body, signal_at="ready")[:2] == (["ready", "mine"], 7)


def test_a_cleanup_that_fails_leaves_the_others_their_turn_and_is_raised():
    called = []

    class Env(Talk):
        @cleanup(priority=2)
        def first(self, state):
            called.append("first")
            raise RuntimeError("stuck")

        @cleanup
        async def second(self, state):
            called.append("second")

    with pytest.raises(RuntimeError, match="stuck"):
        rolled_out(Env(max_turns=1), ROW, ScriptedClient(["1"]))
    assert called == ["first", "second"]


def test_a_cleanup_that_hangs_ends_at_the_environments_limit_and_is_its_rollouts_failure():
    class Stuck(Talk):
        cleanup_timeout_s = 0.1

        @cleanup
        async def put_away(self, state):
            if state["prompt"][0]["content"] == "q1":
                await asyncio.sleep(60)

    first, second = generated(Stuck(max_turns=1), rows(2), ScriptedClient(says_a)).state
    assert first["error"] is None
    assert re.search(r"TimeoutError: cleanup .*cleanup_timeout_s = 0\.1 s; ", second["error"])


@pytest.mark.slow
def test_a_teardown_that_fails_at_the_end_is_told_and_the_others_have_their_turn():
    body = """
    class Bad(Env):
        @teardown(priority=9)
        def bad(self): raise RuntimeError("stuck")
    one, other = Bad(), Env()
    """
    lines, _, complaints = program(body)
    assert sorted(lines) == ["plainly", "plainly", "teardown", "teardown"]
    assert "stuck" in complaints and "Bad" in complaints
