"""What is shown while a run starts."""

import io
import logging
import math
import re

import pytest
from rich.console import Console
from rich.text import Text

from launch.run_folder.console import EscapedRecord, StartUp, StepBar, Wait, make_console


def test_a_log_has_a_line_when_a_stage_begins_and_one_with_its_seconds_when_it_is_done():
    output = io.StringIO()
    start_up = StartUp(Console(file=output, width=200))
    with start_up.stage("Ray"):
        assert output.getvalue() == "start     Ray ...\n"
    with start_up.stage("[learner-0], learner-1"):
        pass
    first, done, second, second_done = output.getvalue().splitlines()
    assert (first, second) == ("start     Ray ...", "start     [learner-0], learner-1 ...")
    assert re.fullmatch(r"start     Ray: \d+\.\d s, \d+ s in total", done)
    assert re.fullmatch(
        r"start     \[learner-0\], learner-1: \d+\.\d s, \d+ s in total", second_done
    )


def test_a_stage_that_fails_is_left_to_its_error():
    output = io.StringIO()
    with (
        pytest.raises(RuntimeError, match="no such cluster"),
        StartUp(Console(file=output)).stage("Ray"),
    ):
        raise RuntimeError("no such cluster")
    assert output.getvalue() == "start     Ray ...\n"


def test_a_terminal_shows_a_bar_while_a_stage_lasts():
    output = io.StringIO()
    start_up = StartUp(Console(file=output, width=100, force_terminal=True, soft_wrap=True))
    with start_up.stage("[learner]"):
        shown = output.getvalue()
    assert "start     [learner]" in shown and "━" in shown and "0:00:00" in shown
    # Nothing of it stays but the line.
    assert "start     [learner] ..." not in shown
    assert output.getvalue().rstrip().endswith("s in total")


def test_a_log_has_the_count_of_a_long_stage_from_time_to_time_and_when_all_is_done(monkeypatch):
    output = io.StringIO()
    monkeypatch.setattr("launch.run_folder.console.SHOW_EVERY_S", math.inf)
    with StartUp(Console(file=output, width=200)).stage("checks"):
        Wait.count("data", 1, 4, "images are checked")
        monkeypatch.setattr("launch.run_folder.console.SHOW_EVERY_S", 0.0)
        Wait.count("data", 2, 4, "images are checked")
        monkeypatch.setattr("launch.run_folder.console.SHOW_EVERY_S", math.inf)
        Wait.count("data", 3, 4, "images are checked")
        Wait.count("data", 4, 4, "images are checked")
    assert output.getvalue().splitlines()[1:-1] == [
        "data      2 of 4 images are checked",
        "data      4 of 4 images are checked",
    ]


def test_the_count_of_a_stage_is_in_its_bar_and_without_a_stage_on_the_standard_output(capsys):
    output = io.StringIO()
    start_up = StartUp(Console(file=output, width=100, force_terminal=True, color_system=None))
    with start_up.stage("checks"):
        Wait.count("data", 1, 4, "images are checked")
    assert re.search(r"start     checks, 1 of 4 images are checked ━{10} +0:", output.getvalue())
    assert capsys.readouterr().out == ""
    for done in (3, 4):
        Wait.count("data", done, 4, "images are checked")
    assert capsys.readouterr().out == "data      4 of 4 images are checked\n"


def test_the_count_of_a_wait_stands_next_to_the_bar_of_the_steps():
    output = io.StringIO()
    bar = StepBar(Console(file=output, width=100, force_terminal=True, color_system=None), 160)
    with bar.waits_for("the held-out report"):
        with bar.waits_for("rollouts"):
            Wait.count("held out", 2, 9, "rounds are scored")
        bar.close()
    assert re.search(
        r"step 0/160 .*left, waits for the held-out report, 2 of 9 rounds are", output.getvalue()
    )


def test_a_terminal_shows_the_step_of_how_many_the_time_left_and_what_is_waited_for():
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=True, color_system=None)
    bar = StepBar(console, 160)
    bar.go_on(20)
    with bar.waits_for("[rollouts]"), bar.waits_for("a part of that wait"):
        pass
    assert re.search(r"step 20/160 ━+ *-:--:-- left, waits for \[rollouts\]", output.getvalue())
    console.print("step   21/160 B")
    for number in (21, 22, 23):
        bar.done(number)
    with bar.waits_for("the learner"):
        bar.close()
    first, last = output.getvalue().split("step   21/160 B")
    # Lines stand above the bar, which comes again below them.
    assert "step 20/160" in first and "a part" not in first
    assert re.search(r"step 23/160 [━╸╺ ]+\d:\d\d:\d\d left, waits for the learner", last)


def test_a_log_has_no_bar():
    output = io.StringIO()
    bar = StepBar(Console(file=output, width=100), 160)
    with bar.waits_for("rollouts"):
        bar.done(1)
    bar.close()
    assert output.getvalue() == ""


@pytest.mark.parametrize("make", [str, Text])
def test_controls_changes_of_direction_and_surrogates_are_shown_escaped(make):
    output = io.StringIO()
    console = make_console(file=output, width=200)
    console.print(make("a\x1b]0;title\x9b2J\u202eb\udc80\u2066:x:\nc\td"), markup=False)
    shown = output.getvalue().replace(" ", "").replace("\t", "")
    assert shown == "a\\x1b]0;title\\x9b2J\\u202eb\\udc80\\u2066:x:\ncd\n"


def test_a_text_whose_controls_rich_would_drop_shows_them_and_colours_of_ours_stay():
    output = io.StringIO()
    console = make_console(file=output, force_terminal=True, color_system="standard")
    console.print("[bold]x[/]a\a\b\r", highlight=False)
    assert output.getvalue() == "\x1b[1mx\x1b[0ma\\x07\\x08\\r\n"


def test_a_record_is_escaped_and_a_condition_in_place_of_an_error_is_none():
    record = EscapedRecord("a", logging.ERROR, "a.py", 1, "\x1b[31m%s", ("\x07",), exc_info=False)
    assert record.getMessage() == "\\x1b[31m\\x07"
    assert record.exc_text is None
