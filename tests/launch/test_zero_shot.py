"""A stock model's figures before anything is trained (issue 21, point 2)."""

import os
import re
from pathlib import Path

import pytest
from learner_support import answer
from tiny_qwen import make_stock_model
from transformers import AutoProcessor

from launch.checks.preflight import engine_family_problems
from launch.cli import read_arguments
from launch.inspect.evaluate import ModelOptions, main, model_config, report_folder
from launch.reports.detection import make_report
from launch.tools.serve import device_here
from learner.data.samples import load_samples
from learner.held_out import HeldOut
from learner.model.loading import load_tokens
from shared.errors import ConfigError
from shared.grounding.evaluation import Evaluation
from shared.prompts import DEFAULT_USER_PROMPT, LIST_USER_PROMPT
from shared.weight_sync.transports import Device

SIZES = ["data.answer_format=qwen3_vl", "global_max_length=512"]
SIZES += ["rollout_matching.max_new_tokens=64", "data.max_val_samples=4"]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A stock-shaped checkpoint, without coord tokens, for pictures as small as the tests'."""
    folder = make_stock_model(tmp_path_factory.mktemp("stock") / "model", "qwen3_vl")
    processor = AutoProcessor.from_pretrained(folder)
    for one in (processor.image_processor, processor.video_processor):
        one.size = {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}
    processor.save_pretrained(folder)
    return folder


def config_of(stock, data, *overrides):
    return model_config(ModelOptions(model=stock, data=data / "val.jsonl"), overrides)


def test_answers_of_a_stock_model_have_the_figures_of_any_other(stock, demo_data, tmp_path):
    config = config_of(stock, demo_data, *SIZES, f"telemetry.run_dir={tmp_path}")
    assert config.model.dtype == "float32"  # the checkpoint's own
    held_out = HeldOut(
        config, [load_samples(config, *config.data.sources("val"))], load_tokens(config)
    )
    requests = held_out.requests(0)
    prompt = held_out.codec.encode(LIST_USER_PROMPT)
    asked = requests[0].prompt_token_ids
    assert any(list(asked[i : i + len(prompt)]) == prompt for i in range(len(asked)))
    rollouts = []
    for request, sample in zip(requests, held_out.samples, strict=True):
        text = f"```json\n{config.answer_format.layout_objects(sample.objects).text}\n```"
        tokens = held_out.codec.encode(text)
        encoded = held_out.encoder.encode(sample)
        rollouts.append(answer(request, encoded, tokens, logprobs=[-0.1] * len(tokens)))
    scenes = held_out.score(rollouts)
    assert not any(scene.never_opened or scene.truncated for scene in scenes)
    evaluation = Evaluation(None, 0, tuple(scenes), wall_s=1.0)
    report = make_report(evaluation, config, subject="stock").as_json()
    assert report["detection"][0]["f1"] == 1.0
    assert report["coco"]["any_class"]["bbox"]["ap"] == pytest.approx(1.0)
    prose = answer(requests[0], held_out.encoder.encode(held_out.samples[0]), [], logprobs=[])
    assert held_out.score([prose])[0].never_opened


def test_a_model_without_coord_tokens_is_told_of_the_format_that_needs_none(stock, demo_data):
    with pytest.raises(ConfigError, match=r"set data\.answer_format .*: qwen3_vl "):
        load_tokens(config_of(stock, demo_data))


def test_the_report_of_a_model_is_named_after_model_and_data(stock, demo_data, tmp_path):
    options = read_arguments(ModelOptions, [f"model={stock}", f"data={demo_data}/val.jsonl"])
    config = model_config(options, ["data.user_prompt=Where?"])
    assert report_folder(config, options) == Path("outputs/evaluations/model_val").resolve()
    assert config.user_prompt == "Where?"
    assert model_config(options, []).user_prompt == DEFAULT_USER_PROMPT
    with pytest.raises(ConfigError, match=r"model\.path: .*; use model=FOLDER"):
        model_config(options, ["model.path=x"])
    nowhere = ModelOptions(model=tmp_path / "nowhere", data=options.data)
    with pytest.raises(ConfigError, match=r"model: .*nowhere holds no checkpoint"):
        model_config(nowhere, [])


@pytest.mark.slow
def test_a_model_is_asked_within_its_positions_and_longer_sequences_are_refused(
    stock, demo_data, monkeypatch, capsys, tmp_path
):
    config = config_of(stock, demo_data)
    assert config.global_max_length == 4096
    assert config.rollout_matching.vllm.enforce_eager == (device_here() is Device.CPU)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    words = [f"model={stock}", f"data={demo_data / 'val.jsonl'}", "global_max_length=4097"]
    with pytest.raises(SystemExit, match="2"):
        main([*words, "data.answer_format=qwen3_vl", f"telemetry.run_dir={tmp_path}"])
    told = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"global_max_length: 4097 .* 4096 .*{stock}", told)


@pytest.mark.skipif(device_here() is not Device.CPU, reason="a limit of vLLM's on CPU")
def test_an_evaluation_says_what_vllm_does_not_do_with_the_family(demo_data, tmp_path):
    config = config_of(make_stock_model(tmp_path / "model", "qwen3_5"), demo_data, *SIZES)
    assert config.model.dtype == "float32"
    (problem,) = engine_family_problems(config.model, config.rollout_matching, Device.CPU)
    assert problem.startswith("model.dtype: float32, but vLLM 0.32 computes the linear attention")
