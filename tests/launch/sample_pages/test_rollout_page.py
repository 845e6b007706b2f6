"""One rollout of an environment as a page."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_support import trajectory_config
from page_support import Page
from transformers import AutoTokenizer

from launch.demo.language_model import make_demo_lm
from launch.show_sample import ShowOptions, main, show_sample
from learner.rollout_logs.trajectories import trajectory_record
from learner.rollout_logs.writer import StepLog, step_path
from shared.errors import ConfigError, RecordError
from shared.records import ImageRef
from shared.trajectory import EnvironmentRollout, TrainingExample

STEP = 7
READ = False
"""In place of an advantage."""


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "lm"
    make_demo_lm(out, seed=17)
    return out


class Run:
    """A run's folder with one step of rollouts made by hand."""

    def __init__(self, folder: Path, checkpoint: Path, **changes: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(
            trajectory_config(checkpoint, folder, **changes).model_dump_json()
        )
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def example(self, *parts: tuple[str, float | bool], **fields: Any) -> TrainingExample:
        """Make an example of texts, each with the advantage of its tokens, or READ."""
        token_ids: list[int] = []
        mask: list[int] = []
        advantages: list[float] = []
        ends: list[int] = []
        for text, advantage in parts:
            if advantage is READ and any(mask):
                ends.append(len(token_ids))
            of_part = self.tokenizer.encode(text, add_special_tokens=False)
            token_ids += of_part
            mask += [int(advantage is not READ)] * len(of_part)
            advantages += [float(advantage)] * len(of_part)
        logprobs = [-0.5 if learned else 0.0 for learned in mask]
        others = {
            "reward": 0.75,
            "advantage": 0.5,
            "token_advantages": advantages,
            "weight_version": 5,
            "engine": "actor-2",
            "steps": (0,),
        }
        if len(fields.get("steps", ())) > 1:
            others["step_ends"] = (*ends, len(token_ids))
        return TrainingExample(token_ids, logprobs, mask, **{**others, **fields})

    def rollout(self, *examples: TrainingExample, **changes: Any) -> EnvironmentRollout:
        rollout = EnvironmentRollout(
            position=0,
            example=12,
            reward=0.75,
            metrics={"exact": 1.0, "form": 0.25},
            error=None,
            is_truncated=False,
            num_turns=3,
            num_tokens=8,
            num_length_limited=0,
            num_splits=1,
            examples=examples,
            prompt=[{"role": "user", "content": "first of 431"}],
            completion=[{"role": "assistant", "content": "4"}],
            actor="environment-1",
            started_s=100.0,
            generate_s=1.234,
        )
        return replace(rollout, **changes)

    def write(self, *rollouts: EnvironmentRollout) -> None:
        """Log the rollouts, at positions from 0."""
        log = StepLog(self.folder / "rollouts")
        log.begin(STEP)
        for position, rollout in enumerate(rollouts):
            log.write(trajectory_record(STEP, replace(rollout, position=position)))
        log.close()

    def page(self, position: int = 0) -> str:
        path = show_sample(ShowOptions(run=self.folder, step=STEP, position=position))
        html = path.read_text()
        Page(html)  # elements must nest
        return html

    def page_of(self, rollout: EnvironmentRollout) -> str:
        self.write(rollout)
        return self.page()

    def shown(self, *examples: TrainingExample, **changes: Any) -> Page:
        """Read the page of one rollout."""
        return Page(self.page_of(self.rollout(*examples, **changes)))


@pytest.fixture
def run(tmp_path, language_model):
    return Run(tmp_path / "run", language_model)


def merged(run: Run) -> TrainingExample:
    return run.example(
        ("<|im_start|>user\nfirst of 431<|im_end|><|im_start|>assistant\n", READ),
        ("4<|im_end|>", 0.75),
        ("<|im_start|>user\nlast<|im_end|><|im_start|>assistant\n", READ),
        ("1", -0.25),
        ("<|im_end|>", 0.0),
        steps=(0, 1),
    )


def text_of(html: str) -> str:
    """Return what a reader reads, elements apart."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html.partition("</style>")[2]))


def tooltips(page: Page) -> list[str]:
    return [title for title in page.titles if re.match(r"token \d+ · id \d+ · ", title)]


def test_the_page_lies_in_the_runs_folder_and_its_path_is_printed(run, capsys):
    run.write(run.rollout(merged(run)))
    main([f"run={run.folder}", f"step={STEP}", "position=0"])
    path = run.folder / "samples" / "step_000007_position_000.html"
    assert capsys.readouterr().out.strip() == str(path)
    assert path.read_text().startswith("<!doctype html>")


def test_the_page_needs_nothing_beside_itself_and_the_same_files_give_the_same_bytes(run):
    html = run.page_of(run.rollout(merged(run)))
    assert not re.search(r"(src|href)=", html)
    assert "http" not in html
    assert run.page() == html


def test_the_head_says_which_rollout_it_is_and_what_it_was_worth(run):
    other = run.example(("last", READ), (" of", 0.5), weight_version=6, engine="actor-0")
    errors = {"judge": "TimeoutError: 60 s"}
    rollout = run.rollout(
        merged(run), other, is_truncated=True, is_overlong=True, reward_errors=errors
    )
    text = text_of(run.page_of(rollout))
    for part in (
        "Step 7, position 0",
        str(run.folder),
        "Reward 0.75 for 3 calls of the model: 2 training examples with 5 learned tokens.",
        "row 12",
        "turns 3",
        "splits 1",
        "seconds 1.23",
        "weights v5, v6",
        "engine actor-0, actor-2",
        "environment environment-1",
        "truncated: there was no room for its next prompt",
        "reward 0.75",
        "exact 1",
        "form 0.25",
        "judge failed: TimeoutError: 60 s",
        (
            "Objective: policy_gradient × 1 (clip_low 0.2, clip_high 0.28, ratio_cap 3, normalize"
            " step, advantage_epsilon 0.0001, advantage_baseline mean, ratio_level token, clip ppo,"
            " above_cap truncate)"
        ),
    ):
        assert part in text


def test_every_message_is_shown_by_its_role_and_what_a_model_wrote_is_escaped(run):
    prompt = [
        {"role": "system", "content": "<script>alert(1)</script>"},
        {"role": "user", "content": "first\nsecond"},
    ]
    completion = [
        {"role": "assistant", "content": "4\ud800 \u202egro\u00dfe"},
        {"role": '"><b>', "content": "<hr>"},
    ]
    page = run.shown(prompt=prompt, completion=completion)
    assert page.texts["who"] == 'systemuserassistant"><b>'
    assert not {"script", "hr"} & set(page.tags)
    for text in ("<script>alert(1)</script>", "first↵\nsecond", "<hr>"):
        assert text in page.texts["text"]
    assert page.texts["completion"] == "4\\ud800 \\u202egroße"


def test_a_tool_call_is_shown_with_its_arguments_and_its_answer_with_its_call(run):
    function = {"name": "to_centimetres", "arguments": '{"length": 3, "unit": "<feet>"}'}
    call = json.dumps({"id": "call_7", "type": "function", "function": function})
    calls = [call, "{broken", json.dumps({"other": 1})]
    completion = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "91.44", "tool_call_id": "call_7", "name": None},
    ]
    texts = run.shown(completion=completion).texts
    expected = 'to_centimetres {"length": 3, "unit": "<feet>"} call_7{broken{"other": 1}'
    assert texts["call"] == expected
    assert texts["field"] == "tool_call_id call_7"
    assert "91.44" in texts["text"]


def test_content_in_parts_is_shown_part_by_part_and_what_is_no_text_by_its_type(run):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "how many"}, image, "bare", {"odd": 1}]
    html = run.page_of(run.rollout(prompt=[{"role": "user", "content": parts}]))
    shown = ("how many", '<b class="code">image_url</b>', "bare", '{"odd": 1}')
    assert "".join(f"<div>{part}</div>" for part in shown) in html
    assert "base64" not in html


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "user", "content": ""}, "no content"),
        ({"content": 5}, "no role"),
        ({"role": "tool", "tool_calls": "all"}, "all"),
    ],
)
def test_a_message_of_any_form_is_shown(run, message, shown):
    texts = run.shown(completion=[message]).texts
    assert shown in texts["who"] + texts["text"]


def test_of_an_environment_that_completes_text_the_text_is_shown(run):
    texts = run.shown(prompt="Once upon", completion=" a <time>").texts
    assert texts["who"] == "promptcompletion"
    assert texts["completion"] == " a <time>"


def test_every_token_is_there_in_order_and_says_what_it_is_learned_with(run):
    example = merged(run)
    page = run.shown(example)
    facts = [title.split(" · ") for title in tooltips(page)]
    assert [of_token[:2] for of_token in facts] == [
        [f"token {index}", f"id {token_id}"] for index, token_id in enumerate(example.token_ids)
    ]
    logprob = "log-probability -0.500 (probability 0.607)"
    assert facts[0][2] == "context"
    assert facts[example.mask.index(1)][2:] == ["advantage +0.75", logprob, "4"]
    assert facts[-2][2:] == ["advantage -0.25", logprob, "1"]
    assert facts[-1][2] == "advantage 0"
    assert "first of 431<|im_end|>" in page.texts["tokens"]


def test_the_colour_of_a_learned_token_is_its_advantage_by_sign_and_size(run):
    html = run.page_of(run.rollout(merged(run), run.example(("last", READ), (" of", 0.5))))
    tokens = html.partition("<h3>")[2]
    assert re.findall(r'<span class="run (\w+)"(?: style="--a:([\d.]+)")?>', tokens) == [
        ("context", ""),
        ("up", "0.50"),
        ("context", ""),
        ("down", "0.25"),
        ("level", ""),
        ("context", ""),
        ("up", "0.37"),
    ]
    legend = Page(html).texts["legend"]
    for row in (
        "up3+0.5 … +0.75learned, and to be made more likely",
        "down1-0.25learned, and to be made less likely",
        "level10",
        "context",
    ):
        assert row in legend
    assert "unusable" not in legend


def test_each_example_has_its_figures(run):
    absent = {"token_advantages": None, "weight_version": None, "engine": None, "steps": ()}
    whole = run.example(("last", READ), (" of", 0.5), advantage=-0.5, **absent)
    text = text_of(run.page_of(run.rollout(merged(run), whole, run.example(("last", READ)))))
    first = f"0 {len(merged(run).token_ids)} 4 one per token -0.500 0, 1 v5 actor-2"
    second = "1 2 1 -0.5 -0.500 – – –"
    assert f"{first} {second} 2 1 0 one per token – 0 v5 actor-2" in text


def test_a_metric_called_reward_is_shown_beside_the_rollouts_reward(run):
    html = run.page_of(run.rollout(merged(run), reward=0.75, metrics={"reward": 0.125}))
    assert re.search(r"reward\b(?! \(metric\)).*0\.75.*reward \(metric\).*0\.125", html, re.DOTALL)


def test_the_images_of_each_example_are_counted_where_there_are_any(run):
    images = tuple(ImageRef(None, data, data.hex()) for data in (b"one", b"two"))
    seen = run.example(("last", READ), (" of", 0.5), images=images)
    read = run.example(("last", READ), (" of", 0.5))
    with_images = text_of(run.page_of(run.rollout(seen, read)))
    assert "example tokens images learned" in with_images
    assert "0 2 2 1 one per token" in with_images
    assert "1 2 0 1 one per token" in with_images
    assert "example tokens learned" in text_of(run.page_of(run.rollout(read, read)))


def test_numbers_that_ended_a_run_are_shown(run):
    parts = (("last", READ), (" of", 0.5), (" of", 0.5))
    example = run.example(*parts, token_advantages=None, advantage=math.nan)
    unscored = replace(example, logprobs=[0.0, math.inf, -math.inf], advantage=None)
    page = run.shown(example, unscored, metrics={"exact": math.nan})
    assert "exact nan" in page.text
    assert "to be learned, but with no advantage that is a number: the run ends here" in page.text
    assert any("no advantage · log-probability inf" in title for title in tooltips(page))


def test_a_rollout_that_failed_shows_its_error_and_one_without_examples_says_so(run):
    ended = {"reward": 0.0, "metrics": {}, "prompt": None, "completion": None}
    failed = text_of(run.page_of(run.rollout(error="ValueError: <no>\ud800", **ended)))
    for part in (
        "Failed after 3 calls of the model: nothing is learned of it.",
        "ValueError: &lt;no&gt; \\ud800",
        "none: it ended before",
        "Nothing: it failed.",
    ):
        assert part in failed
    assert "Nothing: no call of the model has left tokens." in run.shown().text


def test_what_the_objective_makes_of_the_advantages_is_told(tmp_path, language_model):
    settings = {"objective": {"advantage_std": True}, "environment__drop_equal_groups": True}
    run = Run(tmp_path / "run", language_model, **settings)
    flat = run.example(("last", READ), (" of", 0.0), advantage=0.0)
    run.write(run.rollout(merged(run)), run.rollout(flat))
    left_out = "drop_equal_groups leaves them out of the step"
    assert "advantage_std divides them by the standard deviation" in run.page(0)
    assert "drop_truncated" not in run.page(0)
    assert left_out not in run.page(0)
    assert left_out in run.page(1)


def test_what_a_teacher_says_of_each_token_is_told(tmp_path, language_model):
    teacher = {"base_url": "http://127.0.0.1:9", "model": "m", "weight": 0.5}
    run = Run(tmp_path / "run", language_model, environment__teacher=teacher)
    example = run.example(("last", READ), (" of", 0.5))
    learned = [-2.25 * mask for mask in example.mask]
    page = run.shown(replace(example, teacher_logprobs=learned))
    assert "learned is 1 times them, and 0.5 times the teacher's log-probability" in page.text
    told = [title for title in tooltips(page) if "advantage +0.5" in title]
    assert told and all("the teacher's -2.250" in title for title in told)


@pytest.mark.slow
def test_a_byte_level_tokenizer_shows_tokens_inside_a_character_by_their_bytes(
    tmp_path, demo_checkpoint
):
    run = Run(tmp_path / "run", demo_checkpoint)
    example = run.example(("cat ", READ), ("猫", 0.5))
    page = run.shown(example)
    assert len(tooltips(page)) == len(example.token_ids) > 2
    assert "e7" in page.texts["code"]


def two_tokens(first: int, second: int) -> TrainingExample:
    return TrainingExample([first, second], [0.0, -0.5], [0, 1], reward=0.75, advantage=0.5)


def test_a_token_outside_the_vocabulary_is_told_of(run):
    size = len(run.tokenizer)
    problem = rf"model\.path: .* has no token {size}, which the log has, but {size} of them"
    with pytest.raises(ConfigError, match=problem + "; restore the folder"):
        run.page_of(run.rollout(two_tokens(1, size)))


def test_a_token_without_a_text_is_one_that_the_embeddings_have_beyond_the_tokenizer(
    tmp_path, language_model
):
    model = Path(shutil.copytree(language_model, tmp_path / "lm"))
    run = Run(tmp_path / "run", model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "vocab_size": 128}))
    assert tooltips(run.shown(two_tokens(1, 127)))[1].endswith("· no text")


def test_a_model_that_is_gone_is_told_of_where_there_are_tokens(tmp_path, language_model):
    model = Path(shutil.copytree(language_model, tmp_path / "lm"))
    run = Run(tmp_path / "run", model)
    run.write(run.rollout(merged(run)), run.rollout(error="ValueError: no"))
    shutil.rmtree(model)
    problem = r"model\.path: .* holds no tokenizer .*; restore the folder"
    with pytest.raises(ConfigError, match=problem):
        run.page(0)
    assert "ValueError: no" in run.page(1)


@pytest.mark.parametrize(
    ("step", "position", "message"),
    [
        (8, 0, r"step: .* has no step 8; it has 7"),
        (STEP, 2, r"position: step 7 of .* has no position 2; it has 0-1"),
    ],
)
def test_no_such_step_or_position_says_which_there_are(run, step, position, message):
    run.write(run.rollout(), run.rollout())
    with pytest.raises(ConfigError, match=message):
        show_sample(ShowOptions(run=run.folder, step=step, position=position))


def test_a_damaged_log_is_an_error_with_its_line(run):
    run.write(run.rollout())
    path = step_path(run.folder / "rollouts", STEP)
    path.write_text(path.read_text() + "{}\n")
    problem = r"step_000007\.jsonl:2: step: field required; a run's log is not to be edited"
    with pytest.raises(RecordError, match=problem):
        run.page()
