"""Bad input ends with a clear error before anything is started (issue 2)."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import runner_environment
from config_support import configuration, trajectory_config
from PIL import Image

from launch.checks.data import DataFacts, ImageNeeds, check_data, with_num_steps
from learner.data import kept, samples
from learner.data.samples import load_samples
from shared.errors import ConfigError, RecordError
from shared.records import image_facts
from shared.schedule import RunSchedule
from shared.trajectory import ExampleCounts

ROOT = Path(__file__).parents[3]


@pytest.fixture
def model(tmp_path):
    """A folder that looks like a model."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}{{ tools }}")
    return model


@pytest.fixture
def data(tmp_path, demo_data):
    return shutil.copytree(demo_data, tmp_path / "data")


@pytest.fixture
def config(tmp_path, model, data):
    return configuration(model, data, tmp_path / "run")


def change_row(data, number, name="train.jsonl", **changes):
    lines = (data / name).read_text().splitlines()
    lines[number] = json.dumps(json.loads(lines[number]) | changes)
    (data / name).write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_sound_data_pass(config):
    facts = check_data(config)
    assert facts == DataFacts(ImageNeeds(1, 96 * 96), num_train_skipped=0, num_val_skipped=0)
    assert facts.describe() == []


def test_the_most_images_and_the_largest_are_those_of_training_and_validation(
    config, data, model, tmp_path
):
    Image.new("RGB", (200, 101)).save(data / "val" / "large.png")
    change_row(data, 3, name="val.jsonl", images=["val/large.png"], width=200, height=101)
    three = [f"val/0000{number}.png" for number in (2, 3, 4)]
    change_row(data, 2, name="val.jsonl", images=three)
    change_row(data, 2, images=["train/00002.png", "train/00003.png"])
    assert check_data(config).images == ImageNeeds(3, 20_200)
    enlarged = configuration(model, data, tmp_path / "run", data__augment={"scale": [0.5, 1.5]})
    assert check_data(enlarged).images == ImageNeeds(3, 300 * 152)


def test_pictures_that_exif_turns_are_counted_and_the_first_is_named(config, data):
    exif = Image.Exif()
    exif[0x0112] = 3
    for name in ("a.png", "b.png"):
        Image.new("RGB", (64, 32)).save(data / "val" / name, exif=exif)
    change_row(data, 3, name="val.jsonl", images=["val/a.png"], width=64, height=32)
    change_row(data, 4, name="val.jsonl", images=["val/b.png"], width=64, height=32)
    (line,) = check_data(config).describe()
    assert f"{data / 'val.jsonl'}: 2 images" in line
    assert "EXIF" in line and "first: val/a.png" in line


@pytest.mark.parametrize("check_images", [True, False])
def test_odd_rows_and_pictures_of_both_files_are_counted_and_the_first_is_named(
    config, data, model, tmp_path, check_images
):
    shutil.copy(data / "val" / "00003.png", data / "train" / "copy.png")
    name = "copy.png" if check_images else "../val/00003.png"
    change_row(data, 3, images=[f"train/{name}"])
    box = {"bbox_2d": [10, 20, 300, 400], "desc": "cat"}
    change_row(data, 4, objects=[box, box, box])
    change_row(data, 5, objects=[{"bbox_2d": [10, 20, 15, 25], "desc": "cat"}])
    rows = (data / "train.jsonl").read_text().splitlines()
    rows[7] = json.dumps(json.loads(rows[6]) | {"sample_id": "again"})
    (data / "train.jsonl").write_text("\n".join(rows) + "\n")
    checked = configuration(model, data, tmp_path / "run", data__check_images=check_images)
    told = "\n".join(check_data(checked).describe())
    assert "2 repeated objects of a row (first: line 5)" in told
    assert "1 boxes of one pixel (first: line 6)" in told
    assert re.search(r" 1 rows [^(]*earlier row \(first: line 8, as line 7\)", told)
    assert re.search(rf"{data / 'val.jsonl'}: 1 image .*data\.train .*\(first: ", told)
    same = configuration(model, data, tmp_path / "run", data__val=str(data / "train.jsonl"))
    told = "\n".join(check_data(same).describe())
    assert re.search(r"train\.jsonl .*data\.train .*data\.val$", told, re.MULTILINE)


def test_an_image_that_was_checked_is_not_decoded_at_the_next_start(
    config, data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "QUICK_S", 0.0)
    for name in ("train.jsonl", "val.jsonl"):
        rows = (data / name).read_text().splitlines(keepends=True)
        (data / name).write_text("".join(rows[:5]))
    decoded = []

    def facts_of(path, size):
        decoded.append(path.name)
        return image_facts(path, size)

    monkeypatch.setattr(samples, "image_facts", facts_of)
    facts = check_data(config)
    assert len(decoded) == 10
    assert capsys.readouterr().out == "".join(
        f"data      5 of 5 images of {name}.jsonl are checked\n" for name in ("train", "val")
    )
    monkeypatch.setattr("learner.data.samples.image_size", decoded.append)
    assert check_data(config) == facts
    assert len(decoded) == 10


@pytest.mark.slow
def test_the_check_loads_neither_torch_nor_what_needs_it():
    heavy = {"torch", "transformers", "ray", "vllm"}
    code = f"import sys, launch.checks.data; print({heavy} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "set()\n"


def test_a_missing_file_is_named_with_its_key(config, data):
    (data / "val.jsonl").unlink()
    missing = r"data\.val: there is no file .*val\.jsonl; set data\.val .*, or choose data=demo"
    with pytest.raises(ConfigError, match=missing):
        check_data(config)


BOX = {"bbox_2d": [1, 2, 3, 4], "desc": "one"}
POLYGON = {"poly": [1, 2, 3, 4, 5, 6], "desc": "two"}


def make_text(data):
    (data / "train" / "00003.png").write_text("not a picture")


def truncate(data, name="00003.png"):
    image = data / "train" / name
    image.write_bytes(image.read_bytes()[:60])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(
            lambda data: change_row(data, 4, objects=[BOX | {"bbox_2d": [5, 5, 1, 9]}]),
            r"train\.jsonl:5: objects\[0\]\.bbox_2d",
            id="a box from right to left",
        ),
        pytest.param(
            lambda data: change_row(data, 4, objects=[BOX, POLYGON]),
            r"train\.jsonl:5: objects\[1\]\.poly: .*; write it as bbox_2d \(`rollmatch coco import"
            r" geometry=bbox` ",
            id="a ground-truth polygon",
        ),
        pytest.param(make_text, r"00003\.png", id="not a picture"),
        pytest.param(
            truncate,
            r"train\.jsonl:4: images\[0\]: .*00003\.png is not a readable image",
            id="a truncated picture",
        ),
        pytest.param(
            lambda data: Image.new("RGB", (50, 40)).save(data / "train" / "00003.png"),
            r"train\.jsonl:4: images\[0\]: .* is 50 x 40 pixels, the row says 96 x 96",
            id="a picture of another size",
        ),
        pytest.param(
            lambda data: (make_text(data), (data / "val" / "00000.png").unlink()),
            r"(?s)train\.jsonl:4: images\[0\]: .*\n.*val\.jsonl:1: images\[0\]: ",
            id="bad rows of both files",
        ),
    ],
)
def test_a_bad_row_is_located_by_file_line_and_field(config, data, spoil, message):
    spoil(data)
    with pytest.raises(RecordError, match=message):
        check_data(config)


def test_bad_images_and_rows_are_skipped_and_counted_when_told_to(tmp_path, model, data):
    config = configuration(model, data, tmp_path / "run", data__on_bad_row="skip")
    make_text(data)
    truncate(data, "00005.png")
    Image.new("RGB", (50, 40)).save(data / "train" / "00007.png")
    change_row(data, 9, objects=[{"bbox_2d": [9, 9, 1, 1], "desc": "two"}])
    (data / "val" / "00000.png").unlink()
    facts = check_data(config)
    assert (facts.num_train_skipped, facts.num_val_skipped) == (4, 1)
    (line,) = facts.describe()
    assert re.search(r"^data .* 4 .*data\.train .* 1 .*data\.val ", line)
    assert "data.on_bad_row: skip" in line
    loaded = [sample.sample_id for sample in load_samples(config, *config.data.sources("train"))]
    assert loaded[:6] == [f"train:{line}" for line in (1, 2, 3, 5, 7, 9)]


# Of an environment


ADD = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOLS = {"oai_tools": [{"type": "function", "function": ADD}]}
COUNTS = ExampleCounts(6, 3)


@pytest.fixture
def of_environment(tmp_path, model):
    """Check a configuration of an environment with these arguments."""

    def check(env_id="runner_environment", run=None, **section):
        environment = {"id": env_id, "rollouts_per_example": 4, **section}
        changes = {"environment": environment, **(run or {})}
        return check_data(trajectory_config(model, tmp_path / "run", **changes))

    return check


def refused(of_environment, *arguments, **section):
    with pytest.raises(ConfigError) as caught:
        of_environment(*arguments, **section)
    return str(caught.value)


@pytest.mark.parametrize("of_an_environment", [False, True])
def test_a_missing_checkpoint_is_named_with_its_key(
    config, of_environment, model, of_an_environment
):
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.path: .* holds no checkpoint"):
        of_environment() if of_an_environment else check_data(config)


def test_an_environments_examples_are_counted_and_told(of_environment):
    facts = of_environment()
    assert facts == DataFacts(ImageNeeds(0), 0, 0, COUNTS)
    (line,) = facts.describe()
    assert re.search(r"^data .* 6 .*train.* 3 .*held out", line)
    assert of_environment(num_eval_examples=2).examples == ExampleCounts(6, 2)
    sizes = {"num_examples": 30, "num_eval_examples": 8}
    assert of_environment("copy_digits", args=sizes).examples == ExampleCounts(30, 8)


def test_a_rubric_that_scores_at_once_is_told_and_needs_one_environment(of_environment):
    facts = of_environment(args={"ranks": True})
    assert facts.examples == ExampleCounts(6, 3, scores_at_once=True)
    assert "score_rollouts" in facts.describe()[1]
    beside = {
        "learner__world_size": 2,
        "rollout_matching__rollout_backend": "hf",
        "queue": False,
    }
    with pytest.raises(ConfigError, match=r"^learner\.world_size: is 2.*score_rollouts"):
        of_environment(args={"ranks": True}, run=beside)
    assert not of_environment(run=beside).examples.scores_at_once


def test_the_environment_that_was_looked_at_is_closed(of_environment):
    """Those that run rollouts are in actors; what this one holds must not stay for the length of
    the run.
    """
    runner_environment.TORN_DOWN.clear()
    of_environment()
    assert runner_environment.TORN_DOWN == ["runner_environment"]


@pytest.mark.parametrize(
    ("env_id", "args", "problem"),
    [
        (
            "copy_digit",
            {},
            "environment.id: no environment 'copy_digit' (did you mean copy_digits?); use ",
        ),
        (
            "copy_digits",
            {"num_digit": 3},
            "environment.args: copy_digits: got an unexpected keyword argument 'num_digit'",
        ),
        ("copy_digits", {"num_digits": 1}, "environment.args: num_digits is 1; with fewer than 2"),
        (
            "runner_environment",
            {"num_rows": 0},
            "environment.id: runner_environment has a dataset without rows; give it some",
        ),
        ("nowhere/mine.py", {}, "environment.id: nowhere/mine.py: there is no such file"),
    ],
)
def test_what_is_wrong_with_an_environment_is_told_with_its_key(
    of_environment, env_id, args, problem
):
    assert refused(of_environment, env_id, args=args).startswith(problem)


def test_a_second_system_prompt_is_told_before_the_start(of_environment):
    problem = refused(of_environment, "arithmetic", system_prompt="Think.")
    assert problem.startswith(
        "environment.system_prompt: arithmetic already has the system prompt '"
    )
    assert of_environment("guess_number", system_prompt="Think.").examples


@pytest.mark.parametrize("folder", ["", "site-packages/"])
@pytest.mark.parametrize(
    ("body", "args", "problem"),
    [
        ("json.loads('{\"a\": 1}')[name]", {"name": "x"}, "KeyError: 'x'"),
        (
            "json.loads(1)",
            {},
            "TypeError: the JSON object must be str, bytes or bytearray, not int",
        ),
        (
            "__import__('no_such_module_at_all')",
            {},
            "ModuleNotFoundError: No module named 'no_such_module_at_all'",
        ),
    ],
)
def test_whatever_an_environment_raises_is_told_with_its_own_line(
    of_environment, tmp_path, folder, body, args, problem
):
    """Also of one that is installed, and not that of a library that it calls."""
    mine = tmp_path / folder / "mine.py"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text(f"import json\n\n\ndef load_environment(name=''):\n    return {body}\n")
    assert refused(of_environment, str(mine), args=args) == (
        f"environment.id: {mine} was not loaded: {problem} ({mine}:5); check environment.args and"
        " the environment"
    )


def test_an_environment_that_fails_in_lines_of_ours_alone_is_told_too(of_environment):
    arguments = {"num_examples": "many"}
    failed = r"^environment\.id: copy_digits was not loaded: TypeError: .*\(.*\.py:\d+\); check"
    with pytest.raises(ConfigError, match=failed):
        of_environment("copy_digits", args=arguments)


def test_an_environment_with_tools_needs_a_reader_of_calls(of_environment, model):
    problem = refused(of_environment, args=TOOLS)
    key = "environment.tool_call_parser: runner_environment has tools, but neither "
    assert problem.startswith(key) and "; set it to vLLM's name" in problem
    assert of_environment(args=TOOLS, tool_call_parser="hermes").examples == COUNTS
    (model / "tokenizer_config.json").write_text('{"response_template": {}}')
    assert of_environment(args=TOOLS).examples == COUNTS


def test_a_template_that_shows_no_tools_to_an_environment_with_tools_is_warned_of(
    of_environment, model
):
    template = model / "chat_template.jinja"
    template.write_text("{{ messages }}")
    (warning,) = of_environment(args=TOOLS, tool_call_parser="hermes").describe()[1:]
    assert warning.startswith(
        f"warning   runner_environment has tools, but the chat template of {model} does not"
        " show them, so the model cannot know them"
    )
    assert of_environment().warning is None
    template.write_text("{{ messages }}{{ tools }}")
    assert of_environment(args=TOOLS, tool_call_parser="hermes").warning is None


def test_a_checkpoint_without_a_chat_template_is_named_unless_prompts_are_plain_text(
    of_environment, model, monkeypatch
):
    (model / "chat_template.jinja").unlink()
    problem = refused(of_environment)
    assert problem.startswith(f"model.path: {model} has no chat template")
    assert "chat_template.jinja" in problem and "; " in problem and "environment" not in problem
    monkeypatch.setattr("launch.checks.environment.asks_by_chat", lambda _: False)
    assert of_environment().examples == COUNTS


@pytest.mark.parametrize("number", [0, None])
def test_an_environment_without_rows_to_evaluate_on_is_for_runs_without_reports(
    of_environment, number
):
    """A mean over nothing is no figure."""
    args = {"num_eval_rows": number}
    remedy = "has no separate rows for evaluation; give it an eval_dataset, or set"
    assert f"num_eval_examples: runner_environment {remedy}" in refused(of_environment, args=args)
    assert of_environment(args=args, num_eval_examples=0).examples == ExampleCounts(6, 0)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_text_model_is_shown_no_images(of_environment, model, kind):
    (model / "config.json").write_text(json.dumps({"model_type": kind}))
    problem = refused(of_environment, max_images_per_prompt=1)
    assert problem.startswith("environment.max_images_per_prompt: ")
    assert re.search(rf"/model .*\b{kind} .*; .* 0, ", problem)
    assert problem.endswith("(qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, internvl)")
    assert of_environment().images == ImageNeeds(0)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_engines_make_room_for_as_many_images_as_the_environment_may_show(
    of_environment, model, kind
):
    (model / "config.json").write_text(json.dumps({"model_type": kind}))
    assert of_environment(max_images_per_prompt=3).images == ImageNeeds(3)


def of_epochs(number, **changes):
    """Of channel A, if `changes` have no schedule."""
    length = {"training__max_steps": None, "training__num_epochs": number}
    return {**length, "stage2_ab__schedule": {"b_ratio": 0.0}, **changes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epochs", "changes", "steps"),
    [
        (1, {"training__effective_batch_size": 8}, 8),
        (3, {"training__effective_batch_size": 8}, 24),
        (1, {"training__effective_batch_size": 24}, 3),  # the last step draws 8 of the next epoch
        (1, {"training__effective_batch_size": 128}, 1),
        # 4 rows on channel A, and 16 on every other step after 4 of them: 16 + 4 + 16 + 4 + 16 + 4
        (
            1,
            {
                "training__effective_batch_size": 4,
                "stage2_ab__channel_b__rollouts_per_step": 16,
                "stage2_ab__schedule": {"warmup_steps": 4, "b_ratio": 0.5},
            },
            10,
        ),
    ],
)
def test_epochs_become_the_steps_that_draw_each_of_the_64_rows_so_often(
    model, data, tmp_path, epochs, changes, steps
):
    config = configuration(model, data, tmp_path / "run", **of_epochs(epochs, **changes))
    shown = []
    resolved = with_num_steps(config, shown.append)
    assert (resolved.training.max_steps, resolved.training.num_epochs) == (steps, None)
    schedule = RunSchedule(resolved)
    assert (
        schedule.num_samples_before(steps) >= epochs * 64 > schedule.num_samples_before(steps - 1)
    )
    plural = "" if steps == 1 else "s"
    assert shown == [f"epochs    {epochs} x 64 training rows are {steps} step{plural}"]
    assert with_num_steps(resolved, shown.append) is resolved


@pytest.mark.slow
def test_rows_that_are_skipped_do_not_count_in_an_epoch(demo_checkpoint, data, tmp_path):
    (data / "train" / "00003.png").unlink()  # this row cannot be read
    Image.new("RGB", (300, 1)).save(data / "train" / "thin.png")
    # The processor takes no image with a side more than 200 times the other.
    change_row(data, 5, images=["train/thin.png"], width=300, height=1)
    changes = {"training__effective_batch_size": 2, "data__on_bad_row": "skip"}
    folders = (demo_checkpoint, data, tmp_path / "run")
    config = configuration(*folders, **of_epochs(1, global_max_length=512, **changes))
    assert with_num_steps(config, print).training.max_steps == 31


@pytest.mark.slow
def test_an_epoch_of_an_environment_asks_every_example_once(tmp_path, demo_lm):
    """Of 32 examples with 4 rollouts each, 3 a step."""
    args = {"environment__args": {"num_examples": 32}}
    config = trajectory_config(demo_lm, tmp_path / "run", **of_epochs(2, **args))
    assert with_num_steps(config, print).training.max_steps == -(-2 * 32 // 3)
