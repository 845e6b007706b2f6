"""`@stop`, `@cleanup` and `@teardown` (spec: trajectories, 5)."""

import asyncio
import signal
import textwrap
import threading

import pytest
from environment_support import Talk, assistant, generated, rolled_out, rows, user, without_place
from forked_programs import ran
from scripted_client import ScriptedClient, status_error

from rollout_actors.environments.environment import Environment
from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.lifecycle import Event, cleanup, handlers, stop, teardown

ROW = {"prompt": [user("hi")], "example_id": 0, "task": "talk"}


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


def names(owner, event):
    return [handler.__name__ for handler in handlers(owner, event)]


def test_handlers_come_by_priority_highest_first_and_then_by_name():
    assert names(Ordered(), Event.STOP) == ["z", "a", "b", "early_name"]


def test_each_decorator_marks_for_its_own_event():
    assert names(Ordered(), Event.CLEANUP) == ["put_away"] and names(Ordered(), Event.TEARDOWN) == [
        "close"
    ]


def test_a_subclass_inherits_adds_and_overrides():
    class Sub(Ordered):
        @stop(priority=-2)
        def a(self, state): ...

        @stop
        def c(self, state): ...

    assert names(Sub(), Event.STOP) == ["z", "b", "c", "early_name", "a"]


# Stop


def test_the_first_stop_condition_that_holds_is_noted_by_name():
    class Env(Talk):
        @stop
        def b_second(self, state):
            return True

        @stop(priority=1)
        async def c_first(self, state):
            return len(state["trajectory"]) == 2

        @stop
        def a_never(self, state):
            return False

    class Both(Env):
        @stop
        def b_second(self, state):
            return len(state["trajectory"]) == 2

    assert rolled_out(Env(), ROW, ScriptedClient([]))["stop_condition"] == "b_second"
    done = rolled_out(Both(max_turns=5), ROW, ScriptedClient(["1", "2"]))
    assert (
        done["stop_condition"] == "c_first"
        and done["is_completed"]
        and len(done["trajectory"]) == 2
    )


def test_of_two_stop_conditions_of_one_priority_the_first_by_name_is_noted():
    class Env(Talk):
        @stop
        def bb(self, state):
            return True

        @stop
        def aa(self, state):
            return True

    assert rolled_out(Env(), ROW, ScriptedClient([]))["stop_condition"] == "aa"


def test_stop_conditions_are_checked_each_turn():
    asked = []

    class Env(Talk):
        @stop(priority=1)
        def never(self, state):
            asked.append(len(state["trajectory"]))
            return False

    rolled_out(Env(max_turns=2), ROW, ScriptedClient(["1", "2"]))
    assert set(asked) == {0, 1, 2}


def test_an_override_of_is_completed_asks_the_conditions_and_adds_its_own():
    class Env(Talk):
        async def is_completed(self, state, **kwargs):
            if await super().is_completed(state, **kwargs):
                return True
            return len(state["trajectory"]) == 1

    done = rolled_out(Env(max_turns=3), ROW, ScriptedClient(["1"]))
    assert done["is_completed"] and done["stop_condition"] is None
    assert done["completion"] == [{"role": "assistant", "content": "1"}]
    assert (
        rolled_out(Env(max_turns=1), ROW, ScriptedClient(["1"]))["stop_condition"]
        == "max_turns_reached"
    )


def test_an_override_of_is_completed_that_asks_nobody_else_ends_with_the_environments_last_word_too():
    class Env(Talk):
        async def is_completed(self, state, **kwargs):
            return False

        async def env_response(self, messages, state, **kwargs):
            state["final_env_response"] = [user("bye")]
            return []

    done = rolled_out(Env(max_turns=3), ROW, ScriptedClient(["1"]))
    assert done["is_completed"] and done["completion"] == [assistant("1"), user("bye")]


def test_stop_conditions_are_asked_once_before_each_turn():
    asked = []

    class Patient(Talk):
        @stop(priority=5)
        async def patience(self, state):
            asked.append(len(state["trajectory"]))
            return False

    rolled_out(Patient(max_turns=3), ROW, ScriptedClient(["1", "2", "3"]))
    assert asked == [0, 1, 2, 3]


def test_a_stop_condition_that_holds_by_what_the_environment_says_is_asked_when_the_model_has_heard_it():
    """As the document's listing of `rollout` has it."""

    class Game(Talk):
        async def env_response(self, messages, state, **kwargs):
            state["won"] = True
            return [user("you won")]

        @stop
        def won(self, state):
            return state.get("won", False)

    done = rolled_out(Game(max_turns=-1), ROW, ScriptedClient(["1", "hurrah"]))
    assert done["stop_condition"] == "won" and done["completion"] == [
        assistant("1"),
        user("you won"),
        assistant("hurrah"),
    ]


# Cleanup


class Held(Talk):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.released = []

    async def setup_state(self, state):
        state["sandbox_id"] = f"sandbox-{state['example_id']}"
        return state

    @cleanup
    async def release(self, state):
        await asyncio.sleep(0)
        self.released.append(state["sandbox_id"])


def test_cleanup_is_called_exactly_once_after_a_rollout_that_succeeds():
    env = Held(max_turns=3)
    rolled_out(env, ROW, ScriptedClient(["1", "2", "3"]))
    assert env.released == ["sandbox-0"]


def test_cleanup_is_called_exactly_once_after_an_exception_of_the_model():
    env = Held(max_turns=3)
    with pytest.raises(Exception, match="bad request"):
        rolled_out(env, ROW, ScriptedClient(["1", status_error(400, "bad request")]))
    assert env.released == ["sandbox-0"]


def test_cleanup_is_called_exactly_once_after_an_exception_of_the_environment():
    class Broken(Held):
        async def env_response(self, messages, state, **kwargs):
            raise RuntimeError("broken")

    env = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        rolled_out(env, ROW, ScriptedClient(["1"]))
    assert env.released == ["sandbox-0"]


def test_cleanup_is_called_after_a_setup_that_fails_halfway():
    class Broken(Held):
        async def setup_state(self, state):
            await super().setup_state(state)
            raise RuntimeError("no room")

    env = Broken()
    with pytest.raises(RuntimeError, match="no room"):
        rolled_out(env, ROW, ScriptedClient([]))
    assert env.released == ["sandbox-0"]


def test_cleanup_is_called_exactly_once_after_a_cancellation():
    env, client = Held(max_turns=3), ScriptedClient(lambda call: "1", delay_s=30)

    async def cancelled():
        task = asyncio.create_task(env.rollout(ROW, client, "model"))
        while not client.num_under_way:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert env.released == ["sandbox-0"] and client.num_cancelled == 1


def test_cleanup_goes_on_where_the_rollout_is_cancelled_once_more_meanwhile():
    class Slow(Held):
        @cleanup
        async def release(self, state):
            self.released.append("begun")
            await asyncio.sleep(0.05)
            self.released.append("ended")

    env, client = Slow(), ScriptedClient(lambda call: "1", delay_s=30)

    async def cancelled():
        task = asyncio.create_task(env.rollout(ROW, client, "model"))
        while not client.num_under_way:
            await asyncio.sleep(0.001)
        task.cancel()
        while not env.released:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert env.released == ["begun", "ended"]


def test_a_rollout_that_is_cancelled_during_its_cleanup_is_cancelled_when_that_is_done():
    cleaning, released = threading.Event(), []

    class Slow(Talk):
        @cleanup
        async def release(self, state):
            cleaning.set()
            await asyncio.sleep(0.02)
            released.append(state["example_id"])

    async def cancelled():
        task = asyncio.create_task(Slow(max_turns=1).rollout(ROW, ScriptedClient(["1"]), "model"))
        while not cleaning.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert released == [0]


def test_a_cancelled_batch_cleans_up_every_rollout_that_has_begun_exactly_once():
    env, client = Held(max_turns=3), ScriptedClient(lambda call: "1", delay_s=30)

    async def cancelled():
        task = asyncio.create_task(
            env.generate(rows(5), client, "model", max_concurrent=3, use_tqdm=False)
        )
        while client.num_under_way < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert sorted(env.released) == ["sandbox-0", "sandbox-1", "sandbox-2"]
    assert client.num_under_way == 0


def test_cleanup_is_called_once_for_each_rollout_of_a_batch_also_where_some_fail():
    def script(call):
        return status_error(400, "bad") if call.prompt[0]["content"] in ("q1", "q3") else "1"

    env = Held(max_turns=2)
    results = generated(env, rows(5), ScriptedClient(script))
    assert sorted(env.released) == [f"sandbox-{i}" for i in range(5)]
    assert results.metadata.num_errors == 2


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


# Teardown


class Torn(Talk):
    def __init__(self):
        super().__init__()
        self.called = []

    @teardown
    def plain(self):
        self.called.append("plain")

    @teardown(priority=1)
    async def first(self):
        await asyncio.sleep(0)
        self.called.append("first")


def test_teardown_is_called_once_by_priority():
    async def closed():
        env = Torn()
        async with env:
            pass
        await env.aclose()
        return env.called

    assert asyncio.run(closed()) == ["first", "plain"]


def test_teardown_is_called_also_where_what_is_inside_fails():
    env = Torn()

    async def fails():
        async with env:
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        asyncio.run(fails())
    assert env.called == ["first", "plain"]


PROGRAM = """
    import asyncio, os, signal, sys, threading, time
    sys.path[:0] = ["tests/fakes", "tests/fixtures"]
    from environment_support import Talk, rows
    from rollout_actors.environments.lifecycle import cleanup, teardown
    from scripted_client import ScriptedClient

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


def program(body: str, *, signal_at: str | None = None) -> tuple[list[str], int, str]:
    """Lines that it wrote, how it ended, and what it complained of; with SIGTERM when it has
    written `signal_at`.
    """
    code = textwrap.dedent(PROGRAM) + textwrap.dedent(body)
    lines, status, complaints = ran(code, signal_at=signal_at)
    return " ".join(lines).split(), status, complaints


@pytest.mark.slow
def test_teardown_is_called_once_when_the_process_ends():
    assert program("env = Env(); print('end')") == (["end", "teardown", "plainly"], 0, "")


@pytest.mark.slow
def test_an_environment_that_was_closed_is_not_torn_down_again_when_the_process_ends():
    assert program("env = Env(); other = Env(); asyncio.run(env.aclose()); print('end')")[0] == [
        "teardown",
        "plainly",
        "end",
        "teardown",
        "plainly",
    ]


@pytest.mark.slow
def test_a_teardown_that_fails_at_the_end_is_told_and_the_others_have_their_turn():
    body = """
    class Bad(Env):
        @teardown(priority=9)
        def bad(self): raise RuntimeError("stuck")
    one, other = Bad(), Env()
    """
    lines, _, complaints = program(body)
    assert (
        sorted(lines) == ["plainly", "plainly", "teardown", "teardown"]
        and "stuck" in complaints
        and "Bad" in complaints
    )


@pytest.mark.slow
def test_teardown_is_called_once_on_sigterm():
    lines, code, _ = program(
        "env = Env(); print('ready', flush=True); time.sleep(60)", signal_at="ready"
    )
    assert lines == ["ready", "teardown", "plainly"] and code == 128 + signal.SIGTERM


@pytest.mark.slow
def test_on_sigterm_rollouts_under_way_clean_up_before_the_teardown():
    body = """
    env = Env()
    async def ready(call):
        print("ready", flush=True)
        await asyncio.sleep(60)
    asyncio.run(env.generate(rows(1), ScriptedClient(ready), "model", use_tqdm=False))
    """
    lines, code, _ = program(body, signal_at="ready")
    assert lines == ["ready", "cleanup", "teardown", "plainly"] and code == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize(
    "handler", ["", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))"]
)
def test_sigterm_ends_the_process_also_where_it_comes_while_an_environments_code_runs(handler):
    body = f"""
    {handler}
    env = Env()
    def ready(call):
        print("ready", flush=True)
        while True: pass
    asyncio.run(env.generate(rows(1), ScriptedClient(ready), "model", use_tqdm=False))
    """
    lines, code, _ = program(body, signal_at="ready")
    assert lines == ["ready", "cleanup", "teardown", "plainly"] and code == 128 + signal.SIGTERM


def test_a_handler_for_sigterm_that_the_program_has_is_left_alone():
    body = """
    signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"mine\\n"), os._exit(7)))
    env = Env(); print("ready", flush=True); time.sleep(60)
    """
    assert program(body, signal_at="ready")[:2] == (["ready", "mine"], 7)


@pytest.mark.slow
def test_environments_made_off_the_main_thread_work_and_are_torn_down_when_the_process_ends():
    body = """
    def work():
        env = Env()
        results = asyncio.run(env.generate(rows(2), ScriptedClient(lambda call: "1"), "model", use_tqdm=False))
        print(len(results.state), "done", flush=True)
    thread = threading.Thread(target=work); thread.start(); thread.join()
    """
    lines, code, complaints = program(body)
    assert lines == ["cleanup", "cleanup", "2", "done", "teardown", "plainly"] and (
        code,
        complaints,
    ) == (0, "")


def test_an_environment_made_off_the_main_thread_sets_no_signal_handler():
    before = signal.getsignal(signal.SIGTERM)
    made = []
    thread = threading.Thread(target=lambda: made.append(Torn()))
    thread.start()
    thread.join()
    asyncio.run(made[0].aclose())
    assert signal.getsignal(signal.SIGTERM) is before and made[0].called == ["first", "plain"]


class OwnRollout(Environment):
    """Without the turns of `MultiTurnEnv`."""

    def __init__(self, fails=False, waits=False, **kwargs):
        super().__init__(**kwargs)
        self.fails, self.waits, self.num_waiting, self.cleaned = fails, waits, 0, []

    async def rollout(self, input, client, model, sampling_args=None):
        state = await self.setup_state(await self.init_state(input))
        await self.get_model_response(client, model, state["prompt"], sampling_args=sampling_args)
        if self.fails:
            raise ValueError("own")
        if self.waits:
            self.num_waiting += 1
            await asyncio.sleep(60)
        return state

    @cleanup
    async def put_away(self, state):
        await asyncio.sleep(0)
        self.cleaned.append(state["example_id"])


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_generate_cleans_up_once_after_each_rollout_of_an_environments_own(fails, grouped):
    own = OwnRollout(fails=fails, dataset=rows(3))
    environment = EnvGroup([own]) if grouped else own
    results = generated(environment, environment.dataset, ScriptedClient(lambda call: "a"))
    assert sorted(own.cleaned) == [0, 1, 2] and all(
        (without_place(state) == "ValueError: own") is fails for state in results.state
    )


def test_generate_cleans_up_once_after_a_rollout_of_an_environments_own_that_is_cancelled():
    environment = OwnRollout(waits=True)

    async def cancelled():
        task = asyncio.create_task(
            environment.generate(rows(3), ScriptedClient(lambda call: "a"), "model", use_tqdm=False)
        )
        while environment.num_waiting < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert sorted(environment.cleaned) == [0, 1, 2]


def test_what_a_cleanup_raises_after_a_rollout_of_an_environments_own_fails_the_rollout():
    class Clumsy(OwnRollout):
        @cleanup
        def drop(self, state):
            raise OSError("lost")

    (state,) = generated(Clumsy(), rows(1), ScriptedClient(lambda call: "a")).state
    assert without_place(state) == "OSError: lost"


class Clumsy(Talk):
    """Its first cleanup fails."""

    def __init__(self, error):
        super().__init__(max_turns=1)
        self.error, self.released = error, []

    @cleanup(priority=1)
    async def drop(self, state):
        await asyncio.sleep(0)
        if self.error is asyncio.CancelledError:
            task = asyncio.create_task(asyncio.sleep(60))
            task.cancel()
            await task
        raise self.error("lost")

    @cleanup
    def release(self, state):
        self.released.append(state["example_id"])


def test_a_rollout_that_is_cancelled_stays_cancelled_where_its_cleanup_fails(caplog):
    env, told = Clumsy(OSError), []

    async def cancelled():
        client = ScriptedClient(lambda call: "1", delay_s=30)
        task = asyncio.create_task(
            env.generate(
                rows(2),
                client,
                "model",
                use_tqdm=False,
                on_rollout=lambda place, state: told.append(place),
            )
        )
        while client.num_under_way < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert told == [] and sorted(env.released) == [0, 1] and "OSError: lost" in caplog.text


def test_a_time_limit_around_a_rollout_holds_where_its_cleanup_fails():
    async def limited():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await Clumsy(OSError).rollout(ROW, ScriptedClient(["a"], delay_s=30), "model")

    asyncio.run(limited())


@pytest.mark.slow
def test_a_cleanup_that_hangs_ends_at_the_environments_limit_and_is_its_rollouts_failure():
    class Stuck(Talk):
        cleanup_timeout_s = 0.5

        @cleanup
        async def put_away(self, state):
            if state["prompt"][0]["content"] == "q1":
                await asyncio.sleep(60)

    first, second = generated(Stuck(max_turns=1), rows(2), ScriptedClient(lambda call: "a")).state
    assert first["error"] is None
    assert (
        "TimeoutError: cleaning up is not done after cleanup_timeout_s = 0.5 s; check what"
        in second["error"]
    )


def test_a_teardown_leaves_what_the_task_has_entered_that_closes_the_environment():
    tasks = []

    class Env(Talk):
        @teardown
        async def leave(self):
            tasks.append(asyncio.current_task())

    async def closed():
        async with Env():
            tasks.append(asyncio.current_task())

    asyncio.run(closed())
    assert tasks[0] is tasks[1]


def test_a_teardown_that_hangs_ends_at_the_environments_limit_and_the_others_go_on():
    class Env(Talk):
        cleanup_timeout_s = 0.05

        @teardown(priority=1)
        async def first(self):
            await asyncio.sleep(30)

        @teardown
        def second(self):
            done.append("second")

    done = []
    with pytest.raises(
        TimeoutError,
        match=r"the teardown is not done after cleanup_timeout_s = 0\.05 s; check what it waits for",
    ):
        asyncio.run(Env().aclose())
    assert done == ["second"]


def test_a_teardown_that_hangs_in_one_environment_of_a_group_keeps_no_other_from_its_own():
    done = []

    class Hangs(Talk):
        cleanup_timeout_s = 0.05

        @teardown
        async def hang(self):
            await asyncio.sleep(30)

    class Closes(Talk):
        @teardown
        async def close(self):
            done.append("closed")

    class Short(EnvGroup):
        cleanup_timeout_s = 0.5

        @teardown
        async def own(self):
            done.append("own")

    with pytest.raises(TimeoutError, match=r"not done after cleanup_timeout_s = 0\.05 s"):
        asyncio.run(Short([Hangs(), Closes()]).aclose())
    assert done == ["own", "closed"]


def test_where_the_closing_of_a_group_is_cancelled_its_other_environments_are_closed_all_the_same():
    done = []

    class Waits(Talk):
        @teardown
        async def wait(self):
            done.append("waits")
            await asyncio.sleep(30)

    class Closes(Talk):
        @teardown
        async def close(self):
            done.append("closed")

    async def cancelled():
        closing = asyncio.create_task(EnvGroup([Waits(), Closes()]).aclose())
        while not done:
            await asyncio.sleep(0)
        closing.cancel()
        await closing

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert done == ["waits", "closed"]


def test_the_other_teardowns_go_on_where_aclose_is_cancelled_meanwhile():
    done = []

    class Env(Talk):
        @teardown(priority=1)
        async def first(self):
            await asyncio.sleep(60)
            done.append("first")

        @teardown
        async def second(self):
            await asyncio.sleep(0.01)
            done.append("second")

    async def closed():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Env().aclose(), 0.01)

    asyncio.run(closed())
    assert done == ["second"]


@pytest.mark.parametrize("mark", [stop, cleanup])
def test_a_group_whose_own_marked_method_nobody_would_call_is_refused(mark):
    class Group(EnvGroup):
        @mark
        def own(self, state):
            return False

    with pytest.raises(TypeError, match="own: a group has no @stop and no @cleanup of its own"):
        Group([Talk()])


def test_a_cleanup_method_of_the_environments_own_is_called_once_too():
    class Env(Talk):
        @cleanup
        def put_away(self, state):
            pass

        async def _cleanup(self, state):
            cleaned.append(state["example_id"])

    cleaned = []
    generated(Env(max_turns=1), rows(2), ScriptedClient(lambda call: "a"))
    assert sorted(cleaned) == [0, 1]
