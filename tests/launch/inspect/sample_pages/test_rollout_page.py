"""One rollout of an environment as a page."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_support import trajectory_config
from golden import assert_golden, page_text
from page_support import Page
from transformers import AutoTokenizer

from launch.inspect.show_sample import ShowOptions, main, show_sample
from launch.tools.demo.language_model import make_demo_lm
from learner.rollout_logs.trajectories import trajectory_record
from learner.rollout_logs.writer import StepLog
from shared.errors import ConfigError
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


def tool_call(name: str, arguments: str) -> str:
    function = {"name": name, "arguments": arguments}
    return json.dumps({"id": "call_7", "type": "function", "function": function})


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PROMPT = [
    {"role": "system", "content": "<script>alert(1)</script>"},
    {"role": "user", "content": "first\nsecond"},
    {"role": "user", "content": [{"type": "text", "text": "how many"}, IMAGE, "bare", {"odd": 1}]},
]
CALLS = [tool_call("to_centimetres", '{"length": 3}'), "{broken", json.dumps({"other": 1})]
COMPLETION = [
    {"role": "assistant", "content": "4\ud800 \u202egro\u00dfe"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": "91.44", "tool_call_id": "call_7", "name": None},
    *({"role": '"><b>', "content": "<hr>"}, {"role": "user", "content": ""}),
    *({"content": 5}, {"role": "tool", "tool_calls": "all"}),
]
ABSENT = {"token_advantages": None, "weight_version": None, "engine": None, "steps": ()}
IMAGES = tuple(ImageRef(None, data, data.hex()) for data in (b"one", b"two"))
TEACHER = {"base_url": "http://127.0.0.1:9", "model": "m", "weight": 0.5}


def with_teacher(example: TrainingExample) -> TrainingExample:
    return replace(example, teacher_logprobs=[-2.25 * mask for mask in example.mask])


PAGES: dict[str, tuple[dict[str, Any], Callable[[Run], EnvironmentRollout]]] = {
    # Two merged calls; another engine and weights; no token has an advantage of its own; images.
    "examples": (
        {},
        lambda run: run.rollout(
            merged(run),
            run.example(("last", READ), (" of", 0.5), weight_version=6, engine="actor-0"),
            run.example(("last", READ), (" of", 0.5), advantage=-0.5, **ABSENT),
            run.example(("last", READ), images=IMAGES),
            metrics={"exact": 1.0, "form": 0.25, "reward": 0.125},
            is_truncated=True,
            is_overlong=True,
            reward_errors={"judge": "TimeoutError: 60 s"},
        ),
    ),
    "messages": ({}, lambda run: run.rollout(prompt=PROMPT, completion=COMPLETION)),
    "text": ({}, lambda run: run.rollout(prompt="Once upon", completion=" a <time>")),
    "failed": (
        {},
        lambda run: run.rollout(
            error="ValueError: <no>\ud800", reward=0.0, metrics={}, prompt=None, completion=None
        ),
    ),
    # Numbers that ended a run.
    "not_a_number": (
        {},
        lambda run: run.rollout(
            run.example(("last", READ), (" of", 0.5), token_advantages=None, advantage=math.nan),
            replace(
                run.example(("last", READ), (" of", 0.5), (" of", 0.5), token_advantages=None),
                logprobs=[0.0, math.inf, -math.inf],
                advantage=None,
            ),
            metrics={"exact": math.nan},
        ),
    ),
    # What the objective makes of advantages, here none.
    "no_signal": (
        {"objective": {"advantage_std": True}, "environment__drop_equal_groups": True},
        lambda run: run.rollout(run.example(("last", READ), (" of", 0.0), advantage=0.0)),
    ),
    "teacher": (
        {"environment__teacher": TEACHER},
        lambda run: run.rollout(with_teacher(run.example(("last", READ), (" of", 0.5)))),
    ),
}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_of_a_rollout_is_the_one_of_the_file(name, tmp_path, language_model):
    changes, make = PAGES[name]
    run = Run(tmp_path / "run", language_model, **changes)
    html = run.page_of(make(run))
    assert not {"script", "hr"} & set(Page(html).tags)
    assert "\u202e" not in html and "base64" not in html
    folders = {run.folder: "RUN", language_model: "MODEL"}
    assert_golden(f"rollout_{name}.html", page_text(html, folders))


def tooltips(page: Page) -> list[str]:
    return [title for title in page.titles if re.match(r"token \d+ · id \d+ · ", title)]


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
    problem = rf"model\.path: .* has {size} tokens, but the log contains token {size}"
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


def test_advantages_that_the_environment_set_are_not_called_rewards_minus_their_mean(run):
    example = run.example(("4<|im_end|>", 0.75))
    marks = [0] * len(example.token_ids)
    html = run.page_of(run.rollout(replace(example, token_is_relative=marks)))
    assert "The environment set the advantages shown." in html
    assert "minus their mean" not in html
    assert "The environment set" not in run.page_of(run.rollout(example))
