"""`scripts/stages.sh`, which decides whether CI passes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

STAGES = Path(__file__).parents[2] / "scripts" / "stages.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STAGES, *arguments], capture_output=True, text=True, timeout=60, check=False
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
    done = run("one", "exit 3", "two", "echo second")
    assert done.returncode == 1
    assert "second" in done.stdout.splitlines()
    assert "FAILED (exit status 3)" in done.stdout
    assert done.stderr == "== failed: one\n"


def test_an_interruption_ends_all_stages_whatever_the_one_under_way_makes_of_it():
    """pytest ends with status 2."""
    command = "trap 'exit 2' INT; echo here; sleep 60 >/dev/null 2>&1 & wait"
    # A shell cannot trap what was ignored when it began, as in a job in the background.
    stages = ["env", "--default-signal=INT", STAGES, "one", command, "two", "echo second"]
    with subprocess.Popen(
        stages, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        while "here" not in process.stdout.readline():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "second" not in output
    assert "interrupted in stage 1 of 2: one" in errors
