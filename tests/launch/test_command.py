"""How a command ends."""

import io
import os
import signal

import pytest
from ray.exceptions import RayTaskError
from rich.console import Console

from launch.cli import explained
from shared.errors import ConfigError, LearnerError, RecordError, RolloutError


def ending(action):
    """Exit status and what was said."""
    said = io.StringIO()
    with pytest.raises(SystemExit) as caught, explained(Console(file=said, width=200)):
        action()
    return caught.value.code, said.getvalue()


def raising(error):
    def act():
        raise error

    return act


def test_what_the_user_can_mend_ends_with_2_and_what_went_wrong_with_1():
    assert ending(raising(ConfigError("a.b: is wrong; write c"))) == (
        2,
        "ConfigError\na.b: is wrong; write c\n",
    )
    assert ending(raising(RecordError("is wrong", field="x", remedy="mend it")))[0] == 2
    assert ending(raising(LearnerError("ended", phase="start")))[0] == 1
    assert ending(raising(PermissionError(13, "Permission denied", "/x"))) == (
        1,
        "PermissionError\n[Errno 13] Permission denied: '/x'\n",
    )


def test_what_ray_makes_of_an_actors_error_is_not_told_a_second_time_with_its_traceback():
    own = RolloutError(
        "the engine did not start: EngineCore: ValueError: no room",
        actor="rollout-actor-0",
        phase="start",
    )
    of_ray = RayTaskError(
        "EngineActor.start", f"Traceback (most recent call last):\n{own}", own
    ).as_instanceof_cause()
    assert isinstance(of_ray, RolloutError)
    own.__cause__ = of_ray
    assert ending(raising(own)) == (1, f"RolloutError\n{own}\n")
    own.__cause__ = other = LearnerError("ended", phase="send_weights")
    assert ending(raising(own))[1] == f"RolloutError\n{own}\ncaused by LearnerError: {other}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_with_130_and_no_traceback(number):
    assert ending(lambda: os.kill(os.getpid(), number)) == (
        130,
        "interrupted; every process that this command started was ended\n",
    )
