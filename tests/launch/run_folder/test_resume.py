"""A run goes on from a full checkpoint as if it had never ended: n steps are k, a resumption, and
n - k (docs/how_to/resume.md).
"""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from config_support import configuration, trajectory_config
from resumable_run import Interruption, differences, kill_and_resume, ledger, start
from rich.console import Console
from safetensors.torch import load_file, save_file

from launch.run_folder.resume import MAY_CHANGE, config_of_run, resumed
from launch.run_folder.saved_checkpoints import RunState
from launch.run_folder.telemetry import Telemetry
from shared.config.algorithm import TeacherSection
from shared.errors import ConfigError, RecordError, RolloutError
from shared.run_files import SUMS, write_sums

STEPS = 6
TIMEOUT_S = 1200.0
GROUNDING = {
    "global_max_length": 512,
    "training__max_steps": STEPS,
    "training__effective_batch_size": 8,
    "training__packing_window": 4,
    "training__eval_steps": 2,
    "stage2_ab__channel_b__rollouts_per_step": 12,
    "learner__cpu_threads": 1,
    "evaluation__score": "constant",
    "telemetry__ray_metrics": False,
    "checkpoint__save_steps": 1,
    "checkpoint__save_minutes": None,
    "checkpoint__keep_last": 2,
    "checkpoint__keep_best": 1,
    "data__max_val_samples": 4,
    "evaluation__worst_scenes": 0,
}
CASES = {
    "channels A and B": {
        "stage2_ab__schedule__warmup_steps": 2,
        "stage2_ab__schedule__b_ratio": 0.5,
    },
    "carry": {
        "custom__trainer_variant": "stage2_rollout_aligned",
        "stage2_ab": {},
        "global_max_length": 400,
        "training__per_device_train_batch_size": 4,
        "training__packing_buffer": 12,
    },
    "staleness": {
        "stage2_ab__schedule__warmup_steps": 1,
        "rollout_matching__max_staleness": 1,
        "rollout_matching__decoding": {"temperature": 1.0},
    },
    "adapter": {
        "stage2_ab__schedule__warmup_steps": 2,
        "model__adapter": {"kind": "lora", "rank": 4, "alpha": 8.0},
    },
    "environment, three updates of a step": {"training__updates_per_batch": 3},
    "environment, drawn again": {"environment__refill_rounds": 2},
    "bfloat16 masters, augmented pictures": {
        "stage2_ab__schedule__warmup_steps": 1,
        # A CPU needs many times as long for bfloat16.
        "training__max_steps": 3,
        "training__effective_batch_size": 4,
        "stage2_ab__channel_b__rollouts_per_step": 4,
        "model__dtype": "bfloat16",
        "data__augment": {"flip": 0.5, "crop": 0.7, "scale": [0.7, 1.3], "colour": 0.3},
    },
}


HOW = {"environment, drawn again": {"reward": lambda at: 0.5 if at // 4 % 2 else at % 2}}
"""How environments answer, of some cases: here without signal in every second group."""


@pytest.fixture(scope="module")
def config_of(demo_checkpoint, demo_data, demo_lm):
    """Make the configuration of a case in this folder."""

    def make(case: str, folder: Path, **changes):
        if case.startswith("environment"):
            changes = CASES.get(case, {}) | changes
            keys = {
                key: value
                for key, value in GROUNDING.items()
                if key.startswith(("checkpoint", "telemetry")) and "best" not in key
            }
            return trajectory_config(
                demo_lm,
                folder,
                training__max_steps=STEPS,
                environment__num_eval_examples=0,
                **keys | changes,
            )
        data = changes.pop("samples", demo_data)
        if case == "staleness":  # and its samples are of two files
            files = [("train.jsonl", 2), ("val.jsonl", 1)]
            changes["data__train"] = [
                {"path": str(data / name), "weight": weight} for name, weight in files
            ]
        return configuration(
            demo_checkpoint, data, folder, **GROUNDING | CASES.get(case, {}) | changes
        )

    return make


def assert_same(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_interrupted_anywhere_and_resumed_has_the_ledger_of_one_that_was_not(
    case, config_of, tmp_path
):
    whole = tmp_path / "whole"
    count = Interruption()
    how = HOW.get(case, {})
    weights = start(config_of(case, whole), count, **how)
    parts = tmp_path / "parts"
    starts = 0
    while True:
        starts += 1
        config = config_of(case, parts, resume={"run": "auto"})
        # Each start comes some events further than its checkpoint; a step has about five.
        at = config.training.max_steps + 3 * starts
        try:
            resumed_weights = start(config, Interruption(at=at), **how)
            break
        except KeyboardInterrupt:
            assert starts < 40
    assert starts > 2
    assert_same(weights, resumed_weights)
    assert differences(ledger(parts), ledger(whole)) == []
    refilled = [line for line in ledger(whole)["ledger.jsonl"] if "refilled" in line]
    assert bool(refilled) is bool(how)
    assert not (parts / "error.txt").exists()
    # Where the run was interrupted the periodic ones are of other steps.
    best = [
        [(kept["step"], kept["score"]) for kept in index(folder) if "best" in kept["reasons"]]
        for folder in (whole, parts)
    ]
    assert best[0] == best[1]
    assert "interrupted" not in {reason for kept in index(parts) for reason in kept["reasons"]}


def index(folder: Path) -> list[dict]:
    return json.loads((folder / "checkpoints.json").read_text())


@pytest.mark.slow
def test_a_failed_rollout_costs_a_round_that_was_generated_ahead_and_the_resumption_says_so(
    config_of, tmp_path
):
    """Its answers were of weights that no longer exist."""
    config = config_of("staleness", tmp_path, resume={"run": "auto"})
    error = RolloutError("gone", actor="actor-0", phase="generate")
    with pytest.raises(RolloutError):
        start(config, Interruption(at=10, error=error))
    at, point = resumed(config)
    assert point is not None
    assert (point.state.has_answers_ahead, point.state.lost_answers_ahead) == (False, True)
    assert re.search("^warning .* ahead .*lost", point.describe(at)[-1])
    start(config)
    assert [line["step"] for line in ledger(tmp_path)["metrics.jsonl"]] == [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def saved(config_of, tmp_path_factory):
    """A run that was interrupted behind its second step, and its configuration."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    config = config_of("channels A and B", folder)
    with pytest.raises(KeyboardInterrupt):
        start(config, Interruption(at=9))
    return folder


@pytest.mark.slow
def test_what_changes_the_computation_is_refused_by_its_key(saved, config_of):
    changes = {
        "training__seed": 18,
        "training__learning_rate": 2e-3,
        "training__max_steps": STEPS + 1,
        "timeouts__learn_s": 7.0,
        "telemetry__ray_metrics": False,
        "rollout_matching__decode_batch_size": 3,
    }
    config = config_of("channels A and B", saved, resume={"run": "auto"}, **changes)
    with pytest.raises(ConfigError) as caught:
        resumed(config)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "training.learning_rate",
        "training.seed",
    ]
    assert re.search(r"training\.seed: was 17 .* is 18 ", str(caught.value))
    assert "resume.allow=[training.seed]" in str(caught.value)
    allowed = {"run": "auto", "allow": ["training"]}
    _, point = resumed(config_of("channels A and B", saved, resume=allowed, **changes))
    assert point is not None and point.step >= 2


@pytest.mark.slow
def test_a_key_that_is_younger_than_the_checkpoint_had_its_default(saved, config_of, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    for file in run.glob("checkpoint*/**/run.json"):
        state = json.loads(file.read_text())
        del state["config"]["rollout_matching"]["point_tolerance"]
        del state["config"]["rollout_matching"]["pipeline"]["objective"][0]["config"][
            "fp_end_weight"
        ]
        file.write_text(json.dumps(state))
        seal(file.parents[1])
    _, point = resumed(config_of("channels A and B", run, resume={"run": "auto"}))
    assert point is not None and "point_tolerance" not in point.state.config["rollout_matching"]
    changed = {"rollout_matching__trim_trailing_false_positives": True}
    with pytest.raises(ConfigError, match=r"trim_trailing_false_positives: .* False .* True "):
        resumed(config_of("channels A and B", run, resume={"run": "auto"}, **changed))


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_configuration_and_single_keys_changed(saved):
    (*_, checkpoint) = sorted((saved / "checkpoints").glob("step_*"))
    for path in (saved, checkpoint):
        config = config_of_run(path, ["++training.max_steps=40", "++telemetry.name=longer"])
        assert (config.training.max_steps, config.telemetry.name) == (40, "longer")
        assert config.telemetry.run_dir == saved
        at, point = resumed(config)
        assert point is not None and at.resume.run == point.checkpoint
    assert point.checkpoint == checkpoint
    for override in ("+experiment=stage2_3v1", "~training.max_steps"):
        with pytest.raises(ConfigError, match="continues with its own configuration; leave"):
            config_of_run(saved, [override])


def test_no_run_and_no_checkpoint_are_told(config_of, saved, tmp_path):
    config = config_of("channels A and B", tmp_path, resume={"run": str(tmp_path)})
    with pytest.raises(ConfigError, match="has no full checkpoint"):
        resumed(config)
    away = str(saved / "checkpoints" / "step_000099")
    config = config_of("channels A and B", saved, resume={"run": away})
    with pytest.raises(ConfigError, match="step_000099 is not a full checkpoint of"):
        resumed(config)
    config = config_of("channels A and B", tmp_path / "new", resume={"run": "auto"})
    assert resumed(config)[1] is None


@pytest.mark.slow
def test_a_run_that_is_interrupted_before_its_first_update_keeps_the_answers_that_it_had(
    config_of, tmp_path
):
    """They are of weights that no longer exist, so nobody can give them again."""
    whole = config_of("staleness", tmp_path / "whole")
    start(whole)
    parts = config_of("staleness", tmp_path / "parts", resume={"run": "auto"})
    for at in (15, 2, 2, None):
        with nullcontext() if at is None else pytest.raises(KeyboardInterrupt):
            start(parts, Interruption(at=at))
    assert differences(ledger(tmp_path / "parts"), ledger(tmp_path / "whole")) == []


@pytest.mark.slow
def test_a_start_that_fails_as_on_other_data_changes_nothing(saved, config_of, demo_data, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    before = ledger(run)
    data = tmp_path / "data"
    shutil.copytree(demo_data, data)
    lines = (data / "train.jsonl").read_text().splitlines(keepends=True)
    (data / "train.jsonl").write_text("".join([*lines[1:], lines[0]]))
    oldest, *later = sorted((run / "checkpoints").glob("step_*"))
    config = config_of("channels A and B", run, resume={"run": str(oldest)}, samples=data)
    with pytest.raises(ConfigError, match=r"data\.train: its contents have changed"):
        start(config)
    assert ledger(run) == before
    assert all(folder.is_dir() for folder in later)


@pytest.mark.slow
def test_an_older_checkpoint_puts_later_ones_aside_and_what_a_killed_run_left_half_written_goes(
    saved, config_of, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    checkpoint, newest = sorted((run / "checkpoints").glob("step_*"))[:2]
    half = run / "checkpoint_interrupted_000009.partial"
    unindexed = run / "checkpoints" / "step_000001"
    later = run / "checkpoints" / "step_000008"
    half.mkdir()
    for folder, step in ((unindexed, 1), (later, 8)):
        shutil.copytree(checkpoint, folder)
        state = json.loads(_state(folder))
        (folder / "run_state" / "run.json").write_text(json.dumps({**state, "step": step}))
    mine = [run / "evaluations" / name for name in ("step_000006_val", "step_best")]
    for folder in mine:
        folder.mkdir(parents=True)
    with (run / "evaluations.jsonl").open("a") as file:
        file.write('{"step": 4, "weig')
    config = config_of("channels A and B", run, resume={"run": str(checkpoint)})
    with pytest.raises(KeyboardInterrupt):
        start(config, Interruption(at=1))
    left = sorted(path.name for path in run.glob("checkpoint*/*") if path.name.startswith("step"))
    assert {"step_000008.replaced", f"{newest.name}.replaced"} <= set(left)
    assert not {"step_000001", "step_000008", newest.name} & set(left)
    steps = [line["step"] for line in ledger(run)["metrics.jsonl"]]
    assert steps == list(range(1, RunState(**json.loads(_state(checkpoint))).step + 1))
    assert not half.exists()
    assert all(folder.is_dir() for folder in mine)


def test_a_second_writer_of_a_folder_is_refused(config_of, tmp_path):
    config = config_of("channels A and B", tmp_path)
    console = Console(quiet=True)
    with Telemetry(config, console):
        again = config_of("channels A and B", tmp_path, resume={"run": "auto"})
        with pytest.raises(ConfigError, match="another process writes to"):
            Telemetry(again, console)


@pytest.mark.slow
def test_auto_never_begins_anew_over_weights_and_no_run_ends_before_its_checkpoint(
    saved, config_of, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    short = config_of("channels A and B", run, resume={"run": "auto"}, training__max_steps=1)
    with pytest.raises(ConfigError, match=r"training\.max_steps: is 1, .* after 3 steps"):
        resumed(short)
    for state in run.glob("**/run_state"):
        shutil.rmtree(state)
    with pytest.raises(ConfigError, match=r"auto .*not a full checkpoint, .*run_dir"):
        resumed(config_of("channels A and B", run, resume={"run": "auto"}))


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.slow
def test_auto_goes_on_from_the_newest_checkpoint_that_is_sound_and_ends_in_the_same_ledger(
    saved, config_of, tmp_path
):
    whole = config_of("channels A and B", tmp_path / "whole")
    weights = start(whole)
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    *_, sound, newest = sorted((run / "checkpoints").glob("step_*"))
    interrupted = run / "checkpoint_interrupted_000003"
    shutil.copytree(newest, interrupted)
    cut_off(interrupted / "run_state" / "rank_0.json")
    cut_off(newest / "run_state" / "rank_0.safetensors")
    at, point = resumed(config_of("channels A and B", run, resume={"run": "auto"}))
    assert point is not None and point.checkpoint == sound
    told = point.describe(at)
    assert any(re.search(rf"^warning +{newest} is damaged \(.*changed ", line) for line in told)
    assert newest.is_dir() and interrupted.is_dir(), "nothing has started yet"
    again = start(config_of("channels A and B", run, resume={"run": "auto"}))
    assert_same(weights, again)
    assert differences(ledger(run), ledger(tmp_path / "whole")) == []
    assert [path.name for path in sorted(run.glob("**/*.damaged"))] == [
        f"{interrupted.name}.damaged",
        f"{newest.name}.damaged",
    ]
    assert resumed(config_of("channels A and B", run, resume={"run": "auto"}))[1] is not None


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def edit(file: Path, key: str, value: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))


def with_part_of(part: str):
    """Replace a part of the newest checkpoint by that of the one before it."""

    def damage(newest: Path, before: Path) -> None:
        if (before / part).is_dir():
            shutil.rmtree(newest / part)
            shutil.copytree(before / part, newest / part)
        else:
            shutil.copy(before / part, newest / part)

    return damage


DAMAGES = {
    "the state of an earlier step": (with_part_of("run_state"), "its state is of step 2"),
    "the weights of an earlier step": (with_part_of("model.safetensors"), "model.safetensors"),
    "all of an earlier step": (with_part_of("."), "its state is of step 2"),
    "an edited run.json": (
        lambda newest, _: edit(newest / "run_state/run.json", "sync_fallback", "x"),
        "run_state/run.json",
    ),
    "a flipped bit": (
        lambda newest, _: flip_a_bit(newest / "run_state/rank_0.safetensors"),
        "rank_0.safetensors",
    ),
    "a file that is gone": (
        lambda newest, _: (newest / "tokenizer.json").unlink(),
        "tokenizer.json is missing",
    ),
    "no sums": (lambda newest, _: (newest / SUMS).unlink(), f"{SUMS} is missing"),
    "damaged sums": (lambda newest, _: cut_off(newest / SUMS), ""),
}


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_is_not_as_it_was_saved_is_refused_and_auto_takes_the_one_before_it(
    damage, saved, config_of, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    *_, before, newest = sorted((run / "checkpoints").glob("step_*"))
    spoil, told = DAMAGES[damage]
    spoil(newest, before)
    left = tree(run)
    with pytest.raises(ConfigError, match=rf"{newest} is damaged \(.*{told}"):
        resumed(config_of("channels A and B", run, resume={"run": str(newest)}))
    _, point = resumed(config_of("channels A and B", run, resume={"run": "auto"}))
    assert point is not None and point.checkpoint == before
    assert list(point.damaged) == [newest]
    assert tree(run) == left


@pytest.mark.slow
def test_where_no_checkpoint_is_sound_auto_does_not_begin_anew(saved, config_of, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    for state in run.glob("**/run_state"):
        flip_a_bit(state / "rank_0.json")
    auto = config_of("channels A and B", run, resume={"run": "auto"})
    with pytest.raises(ConfigError, match=r"all checkpoints .* damaged .*rank_0\.json"):
        resumed(auto)


@pytest.mark.slow
def test_a_whole_checkpoint_of_another_run_is_told_by_the_ledger(saved, config_of, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    other = tmp_path / "other"
    changed = {"training__seed": 5, "training__max_steps": 3}
    start(config_of("channels A and B", other, **changed))
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    shutil.rmtree(newest)
    shutil.copytree(other / "checkpoints" / newest.name, newest)
    insists = {"run": str(newest), "allow": ["training.seed"]}
    left = tree(run)
    config = config_of("channels A and B", run, resume=insists)
    with pytest.raises(ConfigError, match=r"of this run.*weights of step 3 "):
        start(config)
    # What the attempt says about itself, and nothing else.
    changed = [name for name, content in tree(run).items() if left.get(name) != content]
    assert changed == ["error.txt"]


@pytest.mark.slow
def test_weights_that_are_not_those_of_the_step_are_refused_whatever_the_sums_say(
    saved, config_of, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    file = newest / "run_state" / "rank_0.safetensors"
    tensors = load_file(file)
    master = next(name for name in tensors if name.endswith("/master"))
    tensors[master].view(-1)[0] += 1.0
    save_file(tensors, file)
    seal(newest)
    with pytest.raises(ConfigError, match=rf"{newest} .* weights .*checksum"):
        start(config_of("channels A and B", run, resume={"run": str(newest)}))


GARBAGE = {
    "metrics.jsonl": [b'{"loss/total": 1.0}', b"\xff\x00"],
    "plan.jsonl": [b"3"],
    "doctor.jsonl": [b'{"step": 2}'],
    "evaluations.jsonl": [b'{"step": 2}'],
    "timeline.json": [b'{"ph": "X", "name": "step 3 (A)"},', b"[]"],
    "checkpoints.json": [b"garbage"],
}


@pytest.mark.slow
@pytest.mark.parametrize("file", GARBAGE)
def test_a_line_that_is_garbage_is_named_before_anything_is_changed(
    file, saved, config_of, tmp_path
):
    for number, garbage in enumerate(GARBAGE[file]):
        run = tmp_path / f"run {number}"
        shutil.copytree(saved, run)
        lines = (run / file).read_bytes().split(b"\n")
        first = [one for one in lines[:1] if one]  # a run may have no finding
        (run / file).write_bytes(b"\n".join([*first, garbage, *(lines[1:] or [b""])]))
        left = tree(run)
        place = str(run / file) + (
            f":{len(first) + 1}: line: " if file != "checkpoints.json" else " cannot be"
        )
        with pytest.raises((ConfigError, RecordError), match=re.escape(place)):
            start(config_of("channels A and B", run, resume={"run": str(run)}))
        assert tree(run) == left


@pytest.mark.slow
@pytest.mark.parametrize("file", ["rank_0.json", "run.json"])
def test_a_file_that_the_disk_refuses_is_no_damage(file, saved, config_of, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    refused = sorted(run.glob("**/run_state"))[-1] / file
    refused.unlink()
    refused.mkdir()
    with pytest.raises(ConfigError, match=rf"{file} cannot be read \(.*Is a directory"):
        resumed(config_of("channels A and B", run, resume={"run": "auto"}))


def seal(checkpoint: Path) -> None:
    """Write the sums that fit what is there."""
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != SUMS]
    write_sums(checkpoint, files, SUMS)


def _state(checkpoint: Path) -> str:
    return (checkpoint / "run_state" / "run.json").read_text()


def test_the_table_of_what_may_change_names_keys_of_the_configuration(config_of, tmp_path):
    values = config_of("channels A and B", tmp_path).model_dump()
    teacher = TeacherSection(base_url="http://127.0.0.1:9", model="m").model_dump()
    values["environment"] = {"num_actors": 1, "cpus_per_actor": 0, "teacher": teacher}
    for key in MAY_CHANGE:
        section = values
        for name in key.split("."):
            section = section[name]


def test_the_page_shows_the_table():
    page = (Path(__file__).parents[3] / "docs" / "how_to" / "resume.md").read_text()
    assert all(f"| `{key}` | {meaning} |\n" in page for key, meaning in MAY_CHANGE.items())


KILLS = 30
SMALL = {
    "training__max_steps": 4,
    "training__eval_steps": None,
    "training__effective_batch_size": 4,
    "stage2_ab__channel_b__rollouts_per_step": 4,
    "data__max_val_samples": 1,
}


@pytest.mark.processes
@pytest.mark.long
def test_a_run_that_is_killed_at_any_moment_and_resumed_has_the_ledger_of_one_that_was_not(
    config_of, tmp_path
):
    """By SIGKILL, at 30 random moments. `save_steps` is 1."""
    # Forked from a process without threads, which pytest's own is not.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "resumable_run"])
    config = config_of("staleness", tmp_path, resume={"run": "auto"}, **SMALL)
    process = context.Process(target=kill_and_resume, args=(config, KILLS, 19))
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
