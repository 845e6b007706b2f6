"""`scripts/stages.sh`, which decides whether CI passes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

STAGES = Path(__file__).parents[2] / "scripts" / "stages.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STAGES, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_stages_are_named_as_they_begin_and_what_is_left_out_at_the_end():
    done = run("--not-run", "the rest: make test-all", "one", "echo first", "two", "echo second")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split("  ", 1)[1] for line in lines if "  stage " in line] == [
        "stage 1 of 2: one",
        "stage 2 of 2: two",
    ]
    assert lines.index("first") < lines.index("second")
    assert lines[-1].endswith(": the rest: make test-all")


def test_a_stage_that_fails_does_not_keep_the_next_from_running_and_is_told_at_the_end():
    done = run("one", "echo a test >>$FAILED_TESTS; exit 3", "two", "echo second")
    assert done.returncode == 1
    assert "second" in done.stdout.splitlines()
    assert "FAILED (exit status 3)" in done.stdout
    assert done.stderr == "== failed: one\n   a test\n"


def test_a_stage_runs_next_to_the_one_before_it_and_is_printed_and_counted_after_it(tmp_path):
    """Each of the two waits for the other, and the second ends later."""
    meet = (
        f"cd {tmp_path}; echo {{0}}; touch {{0}}; "
        "for _ in {{1..2400}}; do [ -e {1} ] && {2}; sleep 0.05; done; exit 9"
    )
    first = meet.format("first", "second", "exit 3")
    second = meet.format("second", "first", "sleep 0.3 && echo later && exit 4")
    done = run("one", first, "--beside", "two", second, "three", "echo third")
    lines = done.stdout.splitlines()
    assert lines.index("first") < lines.index("later") < lines.index("third")
    assert re.findall(r"^   (\w+) +\d+:\d\d  (.*)$", done.stdout, re.MULTILINE) == [
        ("one", "FAILED (exit status 3)"),
        ("two", "FAILED (exit status 4)"),
        ("three", "passed"),
    ]
    assert (done.returncode, done.stderr) == (1, "== failed: one\n== failed: two\n")


def test_a_stage_whose_shell_is_killed_has_failed():
    done = run("one", "true", "--beside", "two", "kill -KILL $PPID")
    assert done.returncode == 1
    assert done.stderr.endswith("== failed: two\n")


def test_an_interruption_ends_all_stages_whatever_those_under_way_make_of_it(tmp_path):
    """pytest ends with status 2."""
    begins = f"trap 'echo told; exit 2' INT; cd {tmp_path}"
    waits = "sleep 60 >/dev/null 2>&1 & wait"
    first = f"{begins}; until [ -e other ]; do sleep 0.05; done; echo here; {waits}"
    other = f"{begins}; touch other; {waits}"
    # A shell cannot trap what was ignored when it began, as in a job in the background.
    stages = ["env", "--default-signal=INT", STAGES, "one", first, "--beside", "other", other]
    with subprocess.Popen(
        [*stages, "two", "echo second"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        while "here" not in process.stdout.readline():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert output.splitlines().count("told") == 2
    assert "second" not in output
    assert "interrupted in stage 1 of 3: one" in errors
