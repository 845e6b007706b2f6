"""Bad input ends with a clear error before anything is started (issue 2)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import runner_environment
from config_support import configuration, trajectory_config
from PIL import Image

from launch.checks.data import DataFacts, ImageNeeds, check_data
from learner import image_files
from learner.samples import load_samples
from shared.errors import ConfigError, RecordError
from shared.records import image_facts
from shared.trajectory import ExampleCounts

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path, demo_data):
    """A configuration over a copy of the data, and the copy's folder; the model is a folder that
    looks like one.
    """
    data = tmp_path / "data"
    shutil.copytree(demo_data, data)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return configuration(model, data, tmp_path / "run"), data


def change_row(data, number, name="train.jsonl", **changes):
    lines = (data / name).read_text().splitlines()
    lines[number] = json.dumps(json.loads(lines[number]) | changes)
    (data / name).write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_sound_data_pass(run):
    facts = check_data(run[0])
    assert facts == DataFacts(ImageNeeds(1, 96 * 96), num_train_skipped=0, num_val_skipped=0)
    assert facts.describe() == []


def test_the_most_images_of_a_row_are_those_of_training_and_validation(run):
    config, data = run
    change_row(
        data, 2, name="val.jsonl", images=["val/00002.png", "val/00003.png", "val/00004.png"]
    )
    change_row(data, 2, images=["train/00002.png", "train/00003.png"])
    assert check_data(config).images.max_per_prompt == 3


def test_an_image_that_was_checked_is_not_decoded_at_the_next_start(
    run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(image_files, "QUICK_S", 0.0)
    for name in ("train.jsonl", "val.jsonl"):
        (run[1] / name).write_text(
            "".join((run[1] / name).read_text().splitlines(keepends=True)[:5])
        )
    decoded = []

    def facts_of(path, size):
        decoded.append(path.name)
        return image_facts(path, size)

    monkeypatch.setattr(image_files, "image_facts", facts_of)
    facts = check_data(run[0])
    assert len(decoded) == 10
    assert capsys.readouterr().out == "".join(
        f"data      5 of 5 images of {name}.jsonl are checked\n" for name in ("train", "val")
    )
    monkeypatch.setattr("learner.samples.image_size", decoded.append)
    assert check_data(run[0]) == facts
    assert len(decoded) == 10


def test_the_largest_image_is_known(run):
    config, data = run
    Image.new("RGB", (200, 101)).save(data / "val" / "large.png")
    change_row(data, 2, name="val.jsonl", images=["val/large.png"], width=200, height=101)
    assert check_data(config).images.max_pixels == 20_200


@pytest.mark.slow
def test_the_check_loads_neither_torch_nor_what_needs_it():
    heavy = {"torch", "transformers", "ray", "vllm"}
    code = f"import sys, launch.checks.data; print({heavy} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=True
    )
    assert done.stdout == "set()\n"


def test_a_missing_file_is_named_with_its_key(run):
    config, data = run
    (data / "val.jsonl").unlink()
    with pytest.raises(
        ConfigError,
        match=(
            r"data\.val: there is no file .*val\.jsonl; run `make demo-data` .*, or set data\.val"
        ),
    ):
        check_data(config)


def test_a_missing_checkpoint_is_named_with_its_key(run, tmp_path):
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.path: .* holds no checkpoint"):
        check_data(run[0])


def test_a_bad_row_is_located_by_file_line_and_field(run):
    config, data = run
    change_row(data, 4, objects=[{"bbox_2d": [5, 5, 1, 9], "desc": "one"}])
    with pytest.raises(RecordError, match=r"train\.jsonl:5: objects\[0\]\.bbox_2d"):
        check_data(config)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda image: image.write_text("not a picture"), r"00003\.png"),
        (
            lambda image: image.write_bytes(image.read_bytes()[:60]),
            r"train\.jsonl:4: images\[0\]: .*00003\.png is not a readable image",
        ),
        (
            lambda image: Image.new("RGB", (50, 40)).save(image),
            r"train\.jsonl:4: images\[0\]: .* is 50 x 40 pixels, the row says 96 x 96",
        ),
    ],
    ids=["not a picture", "truncated", "another size"],
)
def test_an_image_that_is_not_what_its_row_says_is_refused(run, spoil, message):
    config, data = run
    spoil(data / "train" / "00003.png")
    with pytest.raises(RecordError, match=message):
        check_data(config)


def test_a_ground_truth_polygon_is_an_error_with_file_line_and_field(run):
    config, data = run
    change_row(
        data,
        4,
        objects=[
            {"bbox_2d": [1, 2, 3, 4], "desc": "one"},
            {"poly": [1, 2, 3, 4, 5, 6], "desc": "two"},
        ],
    )
    with pytest.raises(
        RecordError,
        match=(
            r"train\.jsonl:5: objects\[1\]\.poly: .*; write it as bbox_2d \(`launch\.coco import"
            r" geometry=bbox` "
        ),
    ):
        check_data(config)


def test_bad_rows_of_one_file_do_not_hide_those_of_the_other(run):
    config, data = run
    (data / "train" / "00003.png").write_text("not a picture")
    (data / "val" / "00000.png").unlink()
    with pytest.raises(
        RecordError, match=r"(?s)train\.jsonl:4: images\[0\]: .*\n.*val\.jsonl:1: images\[0\]: "
    ):
        check_data(config)


def test_bad_images_and_rows_are_skipped_and_counted_when_told_to(run):
    config, data = run
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"on_bad_row": "skip"})}
    )
    (data / "train" / "00003.png").write_text("not a picture")
    image = data / "train" / "00005.png"
    image.write_bytes(image.read_bytes()[:60])
    Image.new("RGB", (50, 40)).save(data / "train" / "00007.png")
    change_row(data, 9, objects=[{"poly": [1, 2, 3, 4, 5, 6], "desc": "two"}])
    (data / "val" / "00000.png").unlink()
    facts = check_data(config)
    assert (facts.num_train_skipped, facts.num_val_skipped) == (4, 1)
    assert facts.describe() == [
        "data      skipped 4 bad rows of data.train and 1 of data.val (data.on_bad_row: skip)"
    ]
    # What the learner loads.
    assert [sample.sample_id for sample in load_samples(config, config.data.train)][:6] == [
        f"train:{line}" for line in (1, 2, 3, 5, 7, 9)
    ]


ADD = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": ADD}


@pytest.fixture
def of_environment(tmp_path):
    """A configuration of an environment with these arguments; the model is a folder that looks like
    one.
    """
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return lambda env_id="runner_environment", **args: trajectory_config(
        tmp_path / "model",
        tmp_path / "run",
        environment={"id": env_id, "rollouts_per_example": 4, **args},
    )


def test_an_environments_examples_are_counted_and_told(of_environment):
    facts = check_data(of_environment())
    assert facts == DataFacts(ImageNeeds(0), 0, 0, ExampleCounts(6, 3))
    assert facts.describe() == [
        "data      the environment has 6 examples to train on, 3 are held out"
    ]
    assert check_data(of_environment(num_eval_examples=2)).examples == ExampleCounts(6, 2)
    assert check_data(
        of_environment("copy_digits", args={"num_examples": 30, "num_eval_examples": 8})
    ).examples == ExampleCounts(30, 8)


def test_the_environment_that_was_looked_at_is_closed(of_environment):
    """Those that run rollouts are in actors; what this one holds must not stay for the length of
    the run.
    """
    runner_environment.TORN_DOWN.clear()
    check_data(of_environment())
    assert runner_environment.TORN_DOWN == ["runner_environment"]


@pytest.mark.parametrize(
    ("env_id", "args", "told"),
    [
        (
            "copy_digit",
            {},
            (
                r"^environment\.id: no environment 'copy_digit' \(did you mean copy_digits\?\);"
                r" there are arithmetic, "
            ),
        ),
        (
            "copy_digits",
            {"num_digit": 3},
            r"^environment\.args: copy_digits: there is no argument 'num_digit'",
        ),
        (
            "copy_digits",
            {"num_digits": 1},
            r"^environment\.args: num_digits is 1; with fewer than 2",
        ),
        (
            "runner_environment",
            {"num_rows": 0},
            r"^environment\.id: runner_environment has a dataset without rows; give it some",
        ),
        ("nowhere/mine.py", {}, r"^environment\.id: nowhere/mine\.py: there is no such file"),
    ],
)
def test_what_is_wrong_with_an_environment_is_told_with_its_key(of_environment, env_id, args, told):
    with pytest.raises(ConfigError, match=told):
        check_data(of_environment(env_id, args=args))


@pytest.mark.parametrize("folder", ["", "site-packages/"])
def test_whatever_an_environment_raises_is_told_with_its_own_line(of_environment, tmp_path, folder):
    """Also of one that is installed."""
    mine = tmp_path / folder / "mine.py"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text(
        "import json\n\n\ndef load_environment(name='x'):\n    return json.loads(name)[name]\n"
    )
    with pytest.raises(ConfigError) as caught:
        check_data(of_environment(str(mine), args={"name": '{"a": 1}'}))
    problem = (
        f"environment.id: {mine} was not loaded: KeyError: '{{\"a\": 1}}' ({mine}:5); check"
        " environment.args and the environment"
    )
    assert str(caught.value) == problem
    mine.write_text("import no_such_module_at_all")
    with pytest.raises(ConfigError) as caught:
        check_data(of_environment(str(mine)))
    assert f"ModuleNotFoundError: No module named 'no_such_module_at_all' ({mine}:1)" in str(
        caught.value
    )
    mine.write_text("import json\n\n\ndef load_environment(name=1):\n    return json.loads(name)\n")
    with pytest.raises(ConfigError, match=rf"TypeError: .* \({mine}:5\)"):
        check_data(of_environment(str(mine)))


def test_an_environment_that_fails_in_lines_of_ours_alone_is_told_too(of_environment):
    with pytest.raises(
        ConfigError,
        match=(
            r"^environment\.id: copy_digits was not loaded: TypeError: .*\(.*\.py:\d+\); check"
            r" environment\.args"
        ),
    ):
        check_data(of_environment("copy_digits", args={"num_examples": "many"}))


def test_an_environment_with_tools_needs_a_reader_of_calls(of_environment, tmp_path):
    args = {"oai_tools": [TOOL]}
    with pytest.raises(
        ConfigError,
        match=(
            r"^environment\.tool_call_parser: runner_environment has tools, and neither .*; set it"
            r" to vLLM's name"
        ),
    ):
        check_data(of_environment(args=args))
    assert check_data(
        of_environment(args=args, tool_call_parser="hermes")
    ).examples == ExampleCounts(6, 3)
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"response_template": {}}')
    assert check_data(of_environment(args=args)).examples == ExampleCounts(6, 3)


def test_a_template_that_shows_no_tools_to_an_environment_with_tools_is_warned_of(
    of_environment, tmp_path
):
    args = {"oai_tools": [TOOL]}
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("{{ messages }}")
    (warning,) = check_data(of_environment(args=args, tool_call_parser="hermes")).describe()[1:]
    assert warning.startswith(
        f"warning   runner_environment has tools, and the chat template of {tmp_path / 'model'}"
        " shows none: the model is not told"
    )
    assert check_data(of_environment()).warning is None
    template.write_text("{{ messages }}{{ tools }}")
    assert check_data(of_environment(args=args, tool_call_parser="hermes")).warning is None


def test_an_environment_without_rows_to_evaluate_on_is_for_runs_without_reports(of_environment):
    """A mean over nothing is no figure."""
    for number in (0, None):
        with pytest.raises(
            ConfigError,
            match=(
                r"num_eval_examples: runner_environment has no rows of its own to evaluate on; give"
                r" it an eval_dataset, or set"
            ),
        ):
            check_data(of_environment(args={"num_eval_rows": number}))
        assert check_data(
            of_environment(args={"num_eval_rows": number}, num_eval_examples=0)
        ).examples == ExampleCounts(6, 0)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_text_model_is_shown_no_images(of_environment, tmp_path, kind):
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind}))
    told = (
        rf"^environment\.max_images_per_prompt: .*model is a {kind} model, which sees no images;"
        r" set it to 0, or choose .*\(qwen2_5_vl, qwen3_vl\)$"
    )
    with pytest.raises(ConfigError, match=told):
        check_data(of_environment(max_images_per_prompt=1))
    assert check_data(of_environment()).images == ImageNeeds(0)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_engines_make_room_for_as_many_images_as_the_environment_may_show(
    of_environment, tmp_path, kind
):
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind}))
    assert check_data(of_environment(max_images_per_prompt=3)).images == ImageNeeds(3)


def test_an_environment_needs_a_checkpoint_all_the_same(of_environment, tmp_path):
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.path: .* holds no checkpoint"):
        check_data(of_environment())
