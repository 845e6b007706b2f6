"""What a save writes beside the weights: the base's files, and a configuration for any reader."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from config_support import trajectory_config
from tiny_qwen import FAMILIES, make_stock_model
from transformers import AutoConfig

from learner.learner import Learner
from learner.model.checkpoint import CheckpointContent, CheckpointWeights
from learner.model.checkpoint_folder import BaseFiles
from learner.model.loading import load_model
from learner.model.ranks import RankTopology, ReceiverGroup
from shared.errors import ConfigError, StorageError
from shared.trajectory import ExampleCounts
from shared.weight_sync.transports import TransportKind

pytestmark = pytest.mark.slow

REFUSED = {"do_sample": False, "temperature": 0.6, "eos_token_id": [2, 0], "of_later_days": 1}
"""transformers reads it with a warning, and refuses to write it."""
EXAMPLES = ExampleCounts(128, 32)


def learner_of(config):
    return Learner(config, RankTopology(TransportKind.GLOO, (ReceiverGroup(1),)), examples=EXAMPLES)


@pytest.fixture
def base(demo_lm, tmp_path):
    """A checkpoint as a hub's cache holds it: links to files that cannot be written."""
    folder = shutil.copytree(demo_lm, tmp_path / "base")
    (folder / "made_from.json").unlink()  # the demo's own
    (folder / "generation_config.json").write_text(json.dumps(REFUSED))
    (folder / "special_tokens_map.json").write_text('{"pad_token":"<pad>"}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    (tmp_path / "blobs").mkdir()
    for path in [one for one in folder.rglob("*") if one.is_file()]:
        blob = tmp_path / "blobs" / path.name
        path.rename(blob)
        blob.chmod(0o444)
        path.symlink_to(blob)
    return folder


def files(folder):
    names = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {name: path.read_bytes() for name, path in names.items() if path.is_file()}


def test_a_save_repeats_its_base_to_the_byte_although_transformers_would_refuse_and_it_is_gone(
    base, tmp_path
):
    loaded = load_model(trajectory_config(base, tmp_path / "run"), torch.device("cpu"))
    given = files(base)
    shutil.rmtree(base)
    shutil.rmtree(tmp_path / "blobs")
    folder = tmp_path / "saved"
    folder.mkdir()
    weights = dict(CheckpointWeights(loaded.model).tensors())
    CheckpointContent(loaded.model, loaded.base, weights).write_weights(folder)
    saved = files(folder)
    assert saved.keys() == given.keys() and saved["model.safetensors"] == given["model.safetensors"]
    assert {name for name in saved if saved[name] != given[name]} == {"config.json"}
    before, after = json.loads(given["config.json"]), json.loads(saved["config.json"])
    assert after == before | {"rope_theta": 10_000.0}
    assert all(path.stat().st_mode & 0o200 for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("family", FAMILIES)
def test_older_readers_find_the_rotary_base_where_they_look_and_transformers_5_reads_the_same(
    tmp_path, family
):
    stock = make_stock_model(tmp_path / "stock", family)
    base = BaseFiles.read(stock)
    for name, dtype in (("one", "bfloat16"), ("two", "float32")):
        (tmp_path / name).mkdir()
        base.write(tmp_path / name, dtype=dtype, has_head=False, text_config={})
        saved = json.loads((tmp_path / name / "config.json").read_text())
        text = saved["text_config"]
        rope = text["rope_parameters"]
        assert text["rope_theta"] == rope["rope_theta"] == 10_000.0
        others = {key: value for key, value in rope.items() if key != "rope_theta"}
        assert text.get("rope_scaling", {"rope_type": "default"}) == others
        read, given = (AutoConfig.from_pretrained(one) for one in (tmp_path / name, stock))
        assert read.get_text_config().rope_parameters == given.get_text_config().rope_parameters
        assert read.dtype == getattr(torch, dtype)
        # It holds for a checkpoint that was saved from such a one.
        base = BaseFiles.read(tmp_path / name)


def test_a_configuration_that_older_programs_wrote_stays_in_their_form(tmp_path):
    older = {"rope_theta": 5e6, "rope_scaling": None, "torch_dtype": "bfloat16", "hidden_size": 8}
    text = json.dumps(older, indent=4)
    for dtype, expected in (("bfloat16", older), ("float32", {**older, "torch_dtype": "float32"})):
        BaseFiles(text, {}).write(tmp_path, dtype=dtype, has_head=False, text_config={})
        written = (tmp_path / "config.json").read_text()
        assert json.loads(written) == expected
        assert (written == text) == (dtype == "bfloat16")


def test_everything_of_a_save_but_weights_is_done_before_the_first_step(
    base, tmp_path, monkeypatch
):
    """And nothing of it stays."""
    adapter = {"kind": "lora", "rank": 4, "target_modules": ["q_proj"]}
    config = trajectory_config(base, tmp_path / "run", model__adapter=adapter)
    written = []
    write = CheckpointContent.write_weights

    def record(content, folder):
        write(content, folder)
        written.extend(files(folder))

    monkeypatch.setattr(CheckpointContent, "write_weights", record)
    learner_of(config)
    assert {"config.json", "generation_config.json", "tokenizer.json"} < set(written)
    assert "adapter/adapter_model.safetensors" in written and "model.safetensors" not in written
    assert not list((tmp_path / "run").glob(".tried*"))


def test_what_would_fail_at_a_save_fails_at_the_start_with_what_is_wrong(
    base, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        learner_of(trajectory_config(base, tmp_path / "file" / "run"))
    changed = {"rope_theta": 7.0, "rope_scaling": {"rope_type": "default", "rope_theta": 7.0}}
    monkeypatch.setattr("learner.model.checkpoint_folder._older_rope", lambda _: changed)
    with pytest.raises(ConfigError, match=r"model\.path: .* rope_parameters .*config\.json"):
        learner_of(trajectory_config(base, tmp_path / "run"))
    assert not list((tmp_path / "run").glob(".tried*"))
