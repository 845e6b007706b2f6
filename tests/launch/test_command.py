"""How a command ends."""

import io
import os
import signal

import pytest
from rich.console import Console

from launch.command import explained
from shared.errors import ConfigError, LearnerError, RecordError


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
    assert ending(raising(ConfigError("a.b: is wrong; write c"))) == (2, "ConfigError\na.b: is wrong; write c\n")
    assert ending(raising(RecordError("is wrong", field="x", remedy="mend it")))[0] == 2
    assert ending(raising(LearnerError("ended", phase="start")))[0] == 1
    assert ending(raising(PermissionError(13, "Permission denied", "/x"))) == (1, "PermissionError\n[Errno 13] Permission denied: '/x'\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_with_130_and_no_traceback(number):
    assert ending(lambda: os.kill(os.getpid(), number)) == (130, "interrupted; every process that this command started was ended\n")
