"""Files whose tensors are not the model's: refused by their headers, at every entry."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
import torch
from config_support import trajectory_config
from safetensors.torch import load_file, save_file
from tiny_qwen import FAMILIES, make_stock_model

from launch.checks.model_shape import ModelShape
from launch.checks.preflight import preflight
from launch.checks.weights import weight_warnings
from launch.processes.placement import Resources
from launch.tools import serve
from launch.tools.add_coord_tokens import AddOptions, make_coord_model
from learner.model.checkpoint import CheckpointContent, CheckpointWeights, require_same_config
from learner.model.checkpoint_folder import BaseFiles
from learner.model.loading import load_model
from learner.model.weights import load_complete
from shared.errors import ConfigError

DOWN = "model.layers.0.mlp.down_proj.weight"
QUERIES = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def changed(demo_lm, tmp_path):
    """Copy a checkpoint with other tensors, and other keys of config.json."""

    def make(change, source=demo_lm, **keys):
        folder = shutil.copytree(source, tmp_path / "changed")
        tensors = change(load_file(folder / "model.safetensors"))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text()) | keys
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def without(*ends):
    return lambda tensors: {k: v for k, v in tensors.items() if not k.endswith(ends)}


def prefixed(prefix):
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def beside(**more):
    names = {key.replace("__", "."): tensor for key, tensor in more.items()}
    return lambda tensors: tensors | names


def refusal(folder, **options):
    with pytest.raises(ConfigError) as caught:
        weight_warnings(folder, **options)
    return str(caught.value)


def test_a_checkpoint_of_a_model_that_generates_no_text_is_refused(changed):
    problem = refusal(changed(without(), model_type="vit"))
    assert re.search(r"^model\.path: .*changed cannot be loaded \(.* a vit model\); give", problem)


@pytest.mark.parametrize(
    ("change", "keys", "names"),
    [
        (without("down_proj.weight"), {}, ["lack 1 tensor ", DOWN]),
        (without("embed_tokens.weight"), {}, ["lack 2 tensors ", "model.embed_tokens.weight"]),
        (
            lambda tensors: tensors,
            {"tie_word_embeddings": False},
            ["lack 1 tensor (lm_head.weight)", "tie_word_embeddings: true if"],
        ),
        (
            prefixed("_orig_mod."),
            {},
            ["lack 14 tensors", "hold 13 tensors", "without a wrapper", "(_orig_mod."],
        ),
        (
            lambda tensors: {
                name.replace(QUERIES, f"{QUERIES}.base_layer"): tensor
                for name, tensor in tensors.items()
            },
            {},
            [f"lack 1 tensor ({QUERIES}.weight)", f"hold 1 tensor ({QUERIES}.base_layer.weight)"],
        ),
        (
            lambda tensors: tensors | {f"{QUERIES}.lora_A.weight": torch.zeros(2, 128)},
            {},
            [f"hold 1 tensor ({QUERIES}.lora_A.weight)", "merge_and_unload"],
        ),
        (
            lambda tensors: tensors | {DOWN: tensors[DOWN][:, :-1].contiguous()},
            {},
            [f"({DOWN}: [128, 383] in the files, [128, 384] in the model)"],
        ),
        (
            lambda tensors: tensors | {DOWN: (100 * tensors[DOWN]).to(torch.int8)},
            {},
            [f"stores {DOWN} as I8", "quantised from"],
        ),
    ],
)
def test_a_checkpoint_that_lacks_tensors_is_refused_with_the_missing_and_the_surplus_names(
    changed, change, keys, names
):
    problem = refusal(changed(change, **keys))
    assert problem.startswith("model.path: ") and all(name in problem for name in names)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_no_checkpoint_of_a_family_is_refused_or_warned_of(tmp_path, family, tied):
    """Names that transformers changes, experts that it turns, heads that are the embedding."""
    assert weight_warnings(make_stock_model(tmp_path, family, tied=tied), for_engines=True) == []


def test_old_and_new_names_of_a_family_are_the_same_model(changed, tmp_path):
    def renamed(tensors):
        return {
            f"model.{name}"
            if name.startswith("visual.")
            else name.replace("model.", "model.language_model.", 1): tensor
            for name, tensor in tensors.items()
        }

    stock = make_stock_model(tmp_path / "stock", "qwen2_5_vl")
    assert weight_warnings(changed(renamed, stock)) == []


def test_tensors_beside_the_models_are_counted_and_named_and_left_out(changed):
    """A value head; not what transformers knows to leave out, such as old rotary buffers."""
    rotary = torch.zeros(2)
    folder = changed(
        beside(
            v_head__summary__weight=torch.zeros(1, 128),
            model__layers__0__self_attn__rotary_emb__inv_freq=rotary,
        )
    )
    (warning,) = weight_warnings(folder)
    assert "hold 1 tensor (v_head.summary.weight)" in warning
    assert "v_head.summary.weight" not in ModelShape.read(folder).parameters
    assert "vLLM does not start" in refusal(folder, for_engines=True)


def test_tokens_beyond_the_embedding_are_told_before_a_prompt_has_one(changed):
    folder = changed(without())
    file = folder / "tokenizer.json"
    written = json.loads(file.read_text())
    num_rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    last = written["added_tokens"][-1]
    written["added_tokens"] += [last | {"id": num_rows + i, "content": f"<new{i}>"} for i in (0, 1)]
    file.write_text(json.dumps(written))
    (warning,) = weight_warnings(folder)
    assert f"2 tokens beyond the {num_rows} rows of the embedding (first: <new0>)" in warning
    file.write_text("{")
    assert "tokenizer.json is not JSON" in refusal(folder)


def test_names_that_transformers_completes_and_engines_do_not_are_refused(changed):
    """Those of a model that was saved without its head, or with it in its embedding's place."""

    def of_base_model(tensors):
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}

    folder = changed(of_base_model)
    assert re.search(r" holds embed_tokens\.weight, .*save_pretrained", refusal(folder))
    shutil.rmtree(folder)

    def head_alone(tensors):
        return {name.replace("model.embed_tokens", "lm_head"): t for name, t in tensors.items()}

    folder = changed(head_alone)
    assert weight_warnings(folder) == []
    assert "hold no embedding" in refusal(folder, for_engines=True)


def test_a_damaged_a_missing_and_an_ambiguous_file_are_named(demo_lm, tmp_path):
    folder = shutil.copytree(demo_lm, tmp_path / "model")
    whole = folder / "model.safetensors"
    content = whole.read_bytes()
    whole.write_bytes(content[:-1000])
    assert "model.safetensors cannot be read" in refusal(folder)
    whole.write_bytes(content)
    shard = folder / "model-00001-of-00002.safetensors"
    shutil.copy(whole, shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard.name}}))
    assert "remove the outdated files" in refusal(folder)
    whole.unlink()
    index.write_text(json.dumps({"weight_map": {"a": shard.name, "b": "other.safetensors"}}))
    assert "do not exist (other.safetensors)" in refusal(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lm", "qwen3_vl"])
def test_a_head_in_the_files_of_a_tied_configuration_is_told_and_wins_and_is_saved_as_untied(
    changed, demo_lm, tmp_path, family
):
    """As in vLLM; transformers 4 would use the embedding, so what is saved must not be tied."""
    source = demo_lm if family == "lm" else make_stock_model(tmp_path / "stock", family)

    def with_head(noise):
        def change(tensors):
            (embedding,) = (t for name, t in tensors.items() if "embed_tokens" in name)
            return tensors | {"lm_head.weight": embedding + noise}

        return change

    folder = changed(with_head(0.05), source)
    (warning,) = weight_warnings(folder, for_engines=True)
    assert "tie_word_embeddings: true" in warning and "a different lm_head.weight." in warning
    model, _ = load_complete(folder)
    assert not torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)
    saved = tmp_path / "saved"
    saved.mkdir()
    weights = dict(CheckpointWeights(model).tensors())
    CheckpointContent(model, BaseFiles.read(folder), weights).write_weights(saved)
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is False
    assert weight_warnings(saved, for_engines=True) == []
    again, _ = load_complete(saved)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    require_same_config(saved, BaseFiles.read(folder))
    shutil.rmtree(folder)
    # A copy of the embedding is no head of its own.
    assert weight_warnings(changed(with_head(0.0), source)) == []
    model, _ = load_complete(folder)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    if family != "lm":
        shutil.rmtree(folder)
        make_coord_model(AddOptions(model=changed(with_head(0.05), source), out=tmp_path / "out"))
        assert weight_warnings(tmp_path / "out") == []


@pytest.mark.slow
def test_every_entry_refuses_a_checkpoint_that_lacks_tensors(
    changed, demo_data, tmp_path, call_command, capsys, monkeypatch
):
    lacking = changed(
        without("visual.merger.norm.weight"), make_stock_model(tmp_path / "s", "qwen3_vl")
    )
    lacks = "lack 1 tensor (model.visual.merger.norm.weight)"
    with pytest.raises(ConfigError) as caught:
        make_coord_model(AddOptions(model=lacking, out=tmp_path / "out"))
    assert lacks in str(caught.value) and not (tmp_path / "out").exists()
    words = [f"model={lacking}", f"data={demo_data / 'val.jsonl'}", "data.answer_format=qwen3_vl"]
    status, output = call_command(
        "launch.inspect.evaluate", *words, f"telemetry.run_dir={tmp_path}"
    )
    assert status == 2 and lacks in " ".join(output.split())
    monkeypatch.setattr(os, "environ", dict(os.environ))  # which the server changes
    with pytest.raises(SystemExit) as ended:
        serve.main([f"model={lacking}", "port=0", "device=cpu"])
    assert ended.value.code == 2 and lacks in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_run_is_refused_by_preflight_and_by_the_learner_itself(changed, tmp_path):
    lacking = changed(without("down_proj.weight"))
    run = trajectory_config(lacking, tmp_path / "run")
    lacks = f"lack 1 tensor ({DOWN})"
    nodes = [Resources(cpus=16, gpus=0)]
    findings = preflight(run, nodes_of=lambda *_: nodes, memory_of=lambda _: None)
    assert any(lacks in problem for problem in findings.problems)
    with pytest.raises(ConfigError) as caught:
        load_model(run, torch.device("cpu"))
    assert lacks in str(caught.value)
