"""Stock checkpoints become checkpoints with coord tokens, which learner and engines load."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from config_support import configuration
from learner_support import finish_step, make_learner
from tiny_qwen import END, TOWERS, make_stock_model
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

from launch.tools.add_coord_tokens import AddOptions, main, make_coord_model
from learner.model.loading import load_tokens
from shared.errors import ConfigError, StorageError
from shared.model_families import HYBRID_MODEL_TYPES, TILED_MODEL_TYPES
from shared.schedule import RunSchedule
from shared.tokens.fresh import FreshTokens
from shared.tokens.vocabulary import COORD_TOKENS, NUM_BINS

pytestmark = pytest.mark.slow

SCENE = 96 * 96
CASES = [
    *((family, tied) for family in TOWERS for tied in (True, False)),
    ("qwen3_vl_moe", False),
    ("qwen3_5", True),
    ("internvl", False),
]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Stock checkpoints, each made once."""
    folders: dict[tuple, Path] = {}

    def get(family: str = "qwen3_vl", **shape) -> Path:
        key = (family, *sorted(shape.items()))
        if key not in folders:
            folders[key] = make_stock_model(
                tmp_path_factory.mktemp("stock") / family, family, **shape
            )
        return folders[key]

    return get


@pytest.fixture(scope="module")
def made(stock, tmp_path_factory):
    """What `converted` returns of a family, and the folder; each made once."""
    results: dict[tuple[str, bool], tuple] = {}

    def get(family: str, tied: bool):
        if (family, tied) not in results:
            out = tmp_path_factory.mktemp("made") / family
            of_stock = converted(stock(family, tied=tied), out, max_pixels=SCENE)
            results[family, tied] = (*of_stock, out)
        return results[family, tied]

    return get


def options(model: Path, out: Path, **more) -> AddOptions:
    return AddOptions(model=model, out=out, **more)


def converted(stock: Path, out: Path, **more):
    """The printed lines, the stock model and the one that was made, and the latter's processor."""
    lines = make_coord_model(options(stock, out, **more))
    models = [
        AutoModelForImageTextToText.from_pretrained(path, dtype="auto") for path in (stock, out)
    ]
    return lines, *models, AutoProcessor.from_pretrained(out)


def embeddings(model):
    return model.get_input_embeddings().weight


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_every_bin_is_one_token_and_everything_else_stays_as_it_was(stock, made, family, tied):
    lines, old, new, processor, out = made(family, tied)
    tokenizer = processor.tokenizer
    old_tokenizer = AutoProcessor.from_pretrained(stock(family, tied=tied)).tokenizer
    first = len(old_tokenizer)
    ids = list(range(first, first + NUM_BINS))
    assert tokenizer.convert_tokens_to_ids(list(COORD_TOKENS)) == ids
    opened, closed = (tokenizer.encode(text, add_special_tokens=False) for text in ('["', '"]'))
    quoted = tokenizer.encode('["<|coord_7|>"]', add_special_tokens=False)
    assert quoted == [*opened, first + 7, *closed]
    last = [first + 999, tokenizer.eos_token_id]
    assert tokenizer.decode(last, skip_special_tokens=True) == "<|coord_999|>"
    text = 'A "7" and <|coord_1000|>, <|coord_|> or <|im_start|>user'
    assert tokenizer.encode(text) == old_tokenizer.encode(text)

    rows, old_rows = embeddings(new), embeddings(old)
    num_rows = rows.shape[0]
    assert num_rows == new.lm_head.weight.shape[0] == new.config.text_config.vocab_size
    assert num_rows >= first + NUM_BINS and num_rows % 128 == 0
    assert (new.lm_head.weight is rows) == new.config.tie_word_embeddings == tied
    for (name, before), after in zip(old.named_parameters(), new.parameters(), strict=True):
        grew = before.shape != after.shape
        assert torch.equal(before[:first], after[:first]) if grew else torch.equal(before, after), (
            name
        )
    assert new.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(END)
    assert new.generation_config.do_sample
    images = processor.image_processor
    if family in TILED_MODEL_TYPES:
        assert (images.min_patches, images.max_patches, images.crop_to_patches) == (1, 9, True)
        shown = "1 to 9 tiles of 32 x 32 pixels and one of the whole, so at most 40 tokens each"
        assert lines[4] == f"images    {shown}"
    else:
        assert (images.size.shortest_edge, images.size.longest_edge) == (64 * 64, SCENE)
    assert FreshTokens.of(out) == FreshTokens(first, NUM_BINS)
    assert re.search(rf"^tokens +1,000 .* ids {first} to {first + 999}; .*JSON", lines[1])
    free = (
        f"100 of {old_rows.shape[0]} embedding rows had no token, 1000 are needed: now {num_rows}"
    )
    assert free in lines[2]
    assert ("the head tied to it" if tied else "separate weights") in lines[3]


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_neighbouring_bins_are_near_each_other_and_all_are_numbers(stock, made, family, tied):
    _, old, new, processor, _ = made(family, tied)
    digits = processor.tokenizer.convert_tokens_to_ids([*"0123456789"])
    first = processor.tokenizer.convert_tokens_to_ids(COORD_TOKENS[0])
    num_stock = len(AutoProcessor.from_pretrained(stock(family, tied=tied)).tokenizer)
    pairs = [(embeddings(new), embeddings(old)), (new.lm_head.weight, old.lm_head.weight)]
    for weight, stock_weight in pairs:
        rows = weight[first : first + NUM_BINS].detach()
        distances = torch.cdist(rows, rows)
        assert distances.diagonal(1).max() < 0.2 * distances.diagonal(400).min()
        digit_rows = stock_weight[digits]
        centre = digit_rows.mean(dim=0)
        spread = (digit_rows - centre).square().mean().item()
        assert (rows - centre).square().mean().item() == pytest.approx(spread, rel=1e-4)
        added = weight[len(processor.tokenizer) :]
        assert len(added)
        torch.testing.assert_close(added, stock_weight[:num_stock].mean(dim=0).expand_as(added))
    if not tied:
        assert not torch.equal(new.lm_head.weight, embeddings(new))


def test_rows_without_a_token_are_used_where_there_are_enough(stock, tmp_path):
    lines, old, new, _ = converted(stock(padding=1100), tmp_path / "out")
    num_rows = old.config.text_config.vocab_size
    assert new.config.text_config.vocab_size == num_rows
    enough = f"1100 of {num_rows} embedding rows had no token: enough, no rows were added"
    assert lines[2] == f"rows      {enough}"
    assert torch.equal(embeddings(new)[-100:], embeddings(old)[-100:])


def test_the_mean_of_all_tokens_is_the_other_way_to_begin(stock, tmp_path):
    _, old, new, processor = converted(stock(), tmp_path / "out", init="mean")
    first = processor.tokenizer.convert_tokens_to_ids(COORD_TOKENS[0])
    rows = embeddings(new)[first : first + NUM_BINS]
    torch.testing.assert_close(rows, embeddings(old)[:first].mean(dim=0).expand_as(rows))


def test_the_number_type_of_the_stock_checkpoint_is_kept_and_bins_stay_apart_in_it(stock, tmp_path):
    half = AutoModelForImageTextToText.from_pretrained(stock(), dtype=torch.bfloat16)
    folder = tmp_path / "half"
    shutil.copytree(stock(), folder)
    half.save_pretrained(folder)
    _, _, new, processor = converted(folder, tmp_path / "out")
    first = processor.tokenizer.convert_tokens_to_ids(COORD_TOKENS[0])
    assert {parameter.dtype for parameter in new.parameters()} == {torch.bfloat16}
    assert len(embeddings(new)[first : first + NUM_BINS].unique(dim=0)) == NUM_BINS


def test_the_same_arguments_give_the_same_bytes_and_another_seed_others(stock, tmp_path):
    def files(name, **more):
        make_coord_model(options(stock("qwen2_5_vl"), tmp_path / name, **more))
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    first = files("a")
    assert files("b") == first
    assert files("c", seed=18)["model.safetensors"] != first["model.safetensors"]


def test_every_problem_is_reported_at_once_and_nothing_is_written(stock, tmp_path):
    folder = tmp_path / "there"
    make_coord_model(options(stock(), folder))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError) as caught:
        make_coord_model(options(folder, folder, min_pixels=10, max_pixels=9))
    out, model, largest, smallest = caught.value.problems
    assert out.startswith(f"out: {folder} exists; ")
    assert re.search(rf"^model: {folder} already .*; .*model\.path", model)
    assert re.search(r"^max_pixels: 9 .*256 pixels.*; raise ", largest)
    assert re.search(r"^min_pixels: 10 .*max_pixels, 9; lower ", smallest)
    none = (
        r"model: .*nowhere holds no checkpoint \(no config\.json\); give the folder of a downloaded"
    )
    with pytest.raises(ConfigError, match=none) as caught:
        make_coord_model(options(tmp_path / "nowhere", folder))
    assert len(caught.value.problems) == 2
    assert sorted(tmp_path.iterdir()) == before


def test_another_kind_of_model_and_a_model_without_weights_are_refused(stock, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(stock(), other)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(json.dumps({"model_type": "llama"}))
    message = r"is a llama model, which reads no images; choose one of qwen2_5_vl, qwen3_vl"
    with pytest.raises(ConfigError, match=message):
        make_coord_model(options(other, tmp_path / "out"))
    (other / "config.json").write_text(config)
    (other / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model: .* has no model\.safetensors"):
        make_coord_model(options(other, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_named(stock, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*file/out"):
        make_coord_model(options(stock(), tmp_path / "file" / "out"))


def test_the_command_says_what_it_did(stock, tmp_path, capsys):
    main([f"model={stock()}", f"out={tmp_path / 'out'}", f"max_pixels={SCENE}"])
    printed = capsys.readouterr().out.splitlines()
    words = [line.split()[0] for line in printed]
    assert words == ["model", "tokens", "rows", "init", "images", "saved"]
    assert re.search(r"^images +4,096 to 9,216 pixels, .* 36 tokens", printed[4])


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_the_learner_trains_what_was_made(stock, tmp_path, demo_data, family, tied):
    model = tmp_path / "model"
    make_coord_model(options(stock(family, tied=tied), model, min_pixels=SCENE, max_pixels=SCENE))
    small = {
        "global_max_length": 1024,
        "training__max_steps": 4,
        "training__effective_batch_size": 4,
        "training__learning_rate": 1e-3,
        "stage2_ab__schedule__warmup_steps": 4,
    }
    config = configuration(model, demo_data, tmp_path / "run", **small)
    assert len(load_tokens(config).banned_token_ids) == 4
    learner = make_learner(config)
    losses = []
    for plan in RunSchedule(config).plans():
        learner.next_requests(plan)
        losses.append(finish_step(learner).metrics["loss/total"])
    assert losses[-1] < losses[0]
    trained = tmp_path / "trained"
    learner.publisher.checkpoint(trained).write()
    saved = AutoModelForImageTextToText.from_pretrained(trained)
    assert torch.equal(saved.lm_head.weight, learner.loaded.model.lm_head.weight)
    end = GenerationConfig.from_pretrained(trained).eos_token_id
    assert end == learner.loaded.codec.eos_token_id


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("qwen2_5_vl", False),
        ("qwen3_vl_moe", False),
        ("qwen3_5", True),
        ("internvl", False),
    ],
)
def test_an_engine_serves_what_was_made_and_takes_its_weights(
    ray_cluster, stock, tmp_path, family, tied
):
    import ray
    from engine_support import TIMEOUTS, EnginePool, SmallLearner, create_actor, small_settings

    from launch.processes.fleet import Fleet
    from launch.processes.rollout_client import RolloutClient
    from launch.processes.rounds import RoundSize
    from shared.weight_sync.phases import sync_weights

    make_coord_model(
        options(stock(family, tied=tied), tmp_path / "model", min_pixels=SCENE, max_pixels=SCENE)
    )
    # vLLM computes linear attention on CPU in bfloat16 alone.
    is_exact = family not in HYBRID_MODEL_TYPES
    dtype = "float32" if is_exact else "bfloat16"
    actors = {family: create_actor(family, small_settings(tmp_path / "model", dtype=dtype), 0)}
    pool = RolloutClient(Fleet(list(actors.values()), list(actors), TIMEOUTS), RoundSize(8))
    learner = SmallLearner(tmp_path / "model", num_receivers=1)
    if not is_exact:
        learner.canary_tolerance = None
    try:
        pool.start()
        requests = [learner.request(position) for position in range(2)]
        for seed in (None, 3):
            if seed is not None:
                learner.learn(seed)
                sync_weights(learner, pool)
            for request, rollout in zip(
                requests, EnginePool(actors, pool).generate(requests), strict=True
            ):
                if is_exact:
                    tokens, logprobs = learner.greedy(request)
                    assert rollout.response_token_ids == tokens
                    assert rollout.logprobs == pytest.approx(logprobs, abs=1e-4)
                else:
                    logprobs = learner.score(request, rollout.response_token_ids)
                    assert rollout.logprobs == pytest.approx(logprobs, abs=0.1)
    finally:
        pool.close()
        learner.close()
        ray.kill(actors[family])


def test_a_generation_config_that_transformers_refuses_to_write_is_copied(stock, tmp_path):
    model = shutil.copytree(stock(), tmp_path / "model")
    text = '{"do_sample":false,"temperature":0.6}'
    (model / "generation_config.json").write_text(text)
    make_coord_model(options(model, tmp_path / "out"))
    assert (tmp_path / "out" / "generation_config.json").read_text() == text
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["text_config"]["rope_theta"] == 10_000.0
