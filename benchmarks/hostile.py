"""Count passed robustness tests by area: damaged runs, lost terminals, full disks, hostile input.

    python -m benchmarks.hostile [AREA ...]

Each case is a test that breaks something on purpose. It passes if the promised behaviour happens:
the run continues or ends with a checkpoint, damage is reported before anything is changed, no code
from files or callers is executed, no unauthorised caller gets access. Exit status 1 if one fails.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

LAUNCH = "tests/launch"
SERVER = "tests/rollout_actors/server"
TRIES = {
    "terminal": (
        f"{LAUNCH}/test_cli.py::test_an_interruption_ends_with_130_and_no_traceback",
        f"{LAUNCH}/test_cli.py::test_a_command_under_nohup_continues_when_the_terminal_is_closed",
        f"{LAUNCH}/test_cli.py::test_a_command_outlives_its_console_whose_lines_continue_in_the_run_folder",
        f"{LAUNCH}/processes/test_ray_connection.py::test_what_ray_starts_does_not_hear_that_the_terminal_is_closed",
        f"{LAUNCH}/run_folder/test_console.py::test_controls_changes_of_direction_and_surrogates_are_shown_escaped",
        f"{LAUNCH}/run_folder/test_console.py::test_a_text_whose_controls_rich_would_drop_shows_them_and_colours_of_ours_stay",
    ),
    "damaged runs": (
        f"{LAUNCH}/run_folder/test_resume.py::test_a_checkpoint_that_is_not_as_it_was_saved_is_refused_and_auto_takes_the_one_before_it",
        f"{LAUNCH}/run_folder/test_resume.py::test_where_no_checkpoint_is_sound_auto_does_not_begin_anew",
        f"{LAUNCH}/run_folder/test_resume.py::test_a_whole_checkpoint_of_another_run_is_told_by_the_ledger",
        f"{LAUNCH}/run_folder/test_resume.py::test_weights_that_are_not_those_of_the_step_are_refused_whatever_the_sums_say",
        f"{LAUNCH}/run_folder/test_resume.py::test_a_line_that_is_garbage_is_named_before_anything_is_changed",
        f"{LAUNCH}/run_folder/test_resume.py::test_a_file_that_the_disk_refuses_is_no_damage",
        f"{LAUNCH}/test_cli.py::test_a_run_is_resumed_whatever_characters_its_path_has",
    ),
    "folders": (
        f"{LAUNCH}/test_preflight.py::test_every_folder_that_a_run_writes_is_looked_at",
        f"{LAUNCH}/test_preflight.py::test_a_full_folder_for_temporary_files_is_told",
        f"{LAUNCH}/tools/demo/test_once.py::test_what_is_made_follows_the_umask_whoever_wrote_it",
        "tests/learner/test_run_state.py::test_files_of_a_state_are_as_open_as_their_folder",
    ),
    "Ray": (
        f"{LAUNCH}/processes/test_ray_connection.py::test_ray_s_sockets_and_token_are_for_this_user_alone",
        f"{LAUNCH}/processes/test_ray_connection.py::test_who_gets_in_is_told_with_the_way_to_the_token",
    ),
    "server": (
        f"{SERVER}/test_token_file.py",
        f"{SERVER}/test_lease.py",
        f"{SERVER}/test_app.py",
        f"{SERVER}/test_messages.py",
    ),
    "code in files": (
        "tests/architecture/test_shape.py::test_nothing_unpickles_a_file_or_runs_code_that_one_names",
        "tests/learner/test_run_state.py::test_a_pickle_in_a_checkpoint_is_not_executed_under_any_name",
        "tests/learner/test_run_state.py::test_a_state_that_names_anything_else_is_damaged",
        "tests/learner/model/test_loading.py::test_code_and_templates_of_a_checkpoint_run_nothing",
    ),
    "secrets": (
        "tests/shared/config/test_secrets.py",
        f"{LAUNCH}/run_folder/test_saved_run.py::test_a_secret_is_not_kept_and_the_environment_asks_for_it_again",
        f"{LAUNCH}/processes/test_sweep.py::test_the_files_of_a_sweep_have_no_secret_of_its_configuration",
        "tests/rollout_actors/environments/test_tool.py::test_the_model_is_told_no_secret_of_this_process",
    ),
    "data": ("tests/shared/test_limits.py", f"{LAUNCH}/tools/import_data/test_hostile_sources.py"),
}
"""Names of the counted tests, by area. The name of a file means all of its tests."""


class Outcomes:
    """Counts passed and failed tests; a pytest plugin."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.fallen: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        area = next(
            name
            for name, tests in TRIES.items()
            for test in tests
            if report.nodeid.startswith(test)
        )
        if report.failed:
            self.fallen.setdefault(area, []).append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.held[area] += 1


def main() -> None:
    areas = sys.argv[1:] or list(TRIES)
    if unknown := set(areas) - TRIES.keys():
        sys.exit(f"{', '.join(sorted(unknown))}: unknown area; use {', '.join(TRIES)}")
    outcomes = Outcomes()
    root = Path(__file__).resolve().parents[1]
    tests = [str(root / test) for area in areas for test in TRIES[area]]
    status = pytest.main([*tests, "-q", "-p", "no:cacheprovider", f"--rootdir={root}"], [outcomes])
    print(f"\n{'area':<14} {'tries':>6} {'held':>6} {'fell':>6}")
    for area in areas:
        fallen = outcomes.fallen.get(area, [])
        held = outcomes.held[area]
        print(f"{area:<14} {held + len(fallen):>6} {held:>6} {len(fallen):>6}")
        for test in fallen:
            print(f"  {test}")
    sys.exit(int(status))


if __name__ == "__main__":
    main()
