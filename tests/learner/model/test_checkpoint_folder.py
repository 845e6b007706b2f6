"""A name of a hub in place of a folder is told as that, with the command that fetches it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from learner.model.checkpoint_folder import checkpoint_problems, end_token_ids
from shared.errors import ConfigError


@pytest.mark.parametrize("given", ["relative", "absolute"])
def test_the_name_of_a_model_on_a_hub_gets_the_command_that_downloads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """`launch.train` and `launch.preflight` fetch it; others look for its absolute path."""
    monkeypatch.chdir(tmp_path)
    name = Path("Qwen/Qwen3-VL-4B-Instruct")
    (problem,) = checkpoint_problems(name if given == "relative" else tmp_path / name)
    assert problem.startswith("model.path: there is no folder Qwen/Qwen3-VL-4B-Instruct, ")
    download = (
        "`.venv/bin/hf download Qwen/Qwen3-VL-4B-Instruct --local-dir models/Qwen3-VL-4B-Instruct`"
    )
    assert download in problem
    assert " model.path=models/Qwen3-VL-4B-Instruct, " in problem
    (problem,) = checkpoint_problems(Path("Qwen/some@v1.0"))
    assert "hf download Qwen/some --revision v1.0 --local-dir models/some`" in problem


@pytest.mark.parametrize(
    "folder", ["outputs/model", "outputs", "a/b/c", "../a/b", "/nowhere/model"]
)
def test_what_is_a_folder_is_told_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    (tmp_path / "here" / "outputs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    (problem,) = checkpoint_problems(Path(folder))
    assert problem.startswith(
        f"model.path: {folder} holds no checkpoint (no config.json); set model.path to a folder"
    )
    (tmp_path / "here" / "Qwen" / "model").mkdir(parents=True)
    (tmp_path / "here" / "Qwen" / "model" / "config.json").write_text("{}")
    assert checkpoint_problems(Path("Qwen/model")) == ()


def test_a_checkpoint_with_code_of_its_own_is_told_from_the_one_that_is_trained(
    tmp_path: Path,
) -> None:
    config = {"llm_config": {"model_type": "qwen3"}, "model_type": "internvl_chat"}
    (tmp_path / "config.json").write_text(json.dumps(config, indent=2))
    (problem,) = checkpoint_problems(tmp_path)
    assert problem.startswith(f"model.path: {tmp_path} is a internvl_chat model, which needs")
    assert problem.endswith("whose name ends in -HF, such as OpenGVLab/InternVL3_5-4B-HF")


def test_a_folder_with_an_adapter_in_it_is_no_model(tmp_path: Path) -> None:
    """transformers would load the base model that the adapter names, without a word."""
    (tmp_path / "adapter_config.json").write_text("{}")
    for _ in range(2):
        (problem,) = checkpoint_problems(tmp_path, key="model")
        assert problem.startswith(f"model: {tmp_path} holds an adapter") and "merge" in problem
        (tmp_path / "config.json").write_text("{}")


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"eos_token_id": 2,'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_damaged_json_file_of_a_checkpoint_is_named(tmp_path: Path, name: str, content: str):
    (tmp_path / "config.json").write_text("{}")
    assert not checkpoint_problems(tmp_path)
    (tmp_path / name).write_text(content)
    (problem,) = checkpoint_problems(tmp_path, key="model")
    assert problem.startswith(f"model: {tmp_path / name} is not a JSON object")


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 2}, None, {2}),
        ({"eos_token_id": [2, 0]}, None, {0, 2}),
        ({"text_config": {"eos_token_id": [2, 5]}}, None, {2, 5}),
        ({"eos_token_id": 2}, {"eos_token_id": [2, 5]}, {2, 5}),
        ({"eos_token_id": [2, 0]}, {"eos_token_id": 2}, {0, 2}),
        # The default of a class, which is a word of this tokenizer.
        ({"eos_token_id": 7}, {"eos_token_id": 2}, {2}),
        ({"eos_token_id": 999}, {"eos_token_id": 2}, {2}),
        ({"eos_token_id": None}, {}, set()),
    ],
)
def test_every_end_token_that_the_files_name_ends_an_answer(tmp_path, config, generation, ends):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_token_ids(tmp_path, num_tokens=10, special_ids={0, 2}) == ends


@pytest.mark.parametrize("value", [10, -1, True, "<|im_end|>", [2, 10]])
def test_an_end_token_outside_the_vocabulary_is_refused_with_its_file(tmp_path, value):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=r"model\.path: .*generation_config\.json .*eos_token"):
        end_token_ids(tmp_path, num_tokens=10, special_ids={0, 2})
