"""What is shown while a run starts."""

import io
import re

import pytest
from rich.console import Console

from launch.start_up import StartUp


def test_every_stage_of_a_start_has_a_line_with_its_seconds():
    output = io.StringIO()
    start_up = StartUp(Console(file=output, width=200))
    with start_up.stage("Ray"):
        assert output.getvalue() == ""
    with start_up.stage("learner-0, learner-1"):
        pass
    assert re.fullmatch(r"start     Ray: \d+\.\d s, \d+ s in all\nstart     learner-0, learner-1: \d+\.\d s, \d+ s in all\n", output.getvalue())


def test_a_stage_that_fails_is_left_to_its_error():
    output = io.StringIO()
    with pytest.raises(RuntimeError, match="no such cluster"), StartUp(Console(file=output)).stage("Ray"):
        raise RuntimeError("no such cluster")
    assert output.getvalue() == ""


def test_a_terminal_shows_a_bar_while_a_stage_lasts():
    output = io.StringIO()
    start_up = StartUp(Console(file=output, width=100, force_terminal=True, soft_wrap=True))
    with start_up.stage("[learner]"):
        shown = output.getvalue()
    assert "start     [learner]" in shown and "━" in shown and "0:00:00" in shown
    # Nothing of it stays but the line.
    assert output.getvalue().rstrip().endswith("s in all")
