"""Attention by segments is that of the masked row, and transformers' own where none is packed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from emulated_cuda import CUDA, HOST, emulated_cuda, on_host
from tiny_qwen import HIDDEN, TOWERS, make_stock_model
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AutoModelForImageTextToText,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import learner.model.attention
from learner.collate import PackedRow, collate
from learner.model.attention import (
    RowBorders,
    attend_by_segments,
    packed_row,
    segment_attention,
    segments_or_mask,
    use_flash_attention_3,
)
from learner.model.packed_rows import prepare_vision_tower
from learner.segments import EncodedPrompt, Segment
from learner.targets import Target, TextWeights, TokenRole
from shared.errors import ConfigError

LENGTHS = (9, 4, 13)
GRIDS = ((1, 8, 12), (1, 10, 14), (1, 8, 8))
TEXT_MODELS = {"qwen2": (Qwen2ForCausalLM, Qwen2Config), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}


def make_model(family: str, folder: Path) -> Any:
    if family in TOWERS:
        stock = make_stock_model(folder / "model", family)
        return AutoModelForImageTextToText.from_pretrained(stock).train()
    model, config = TEXT_MODELS[family]
    torch.manual_seed(3)
    shape = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return model(config(vocab_size=64, **shape, **heads)).train()


def make_row(model: Any, *, has_images: bool) -> PackedRow:
    """A row of segments, each with an image of its own size where there are images."""
    config, draw = model.config, np.random.default_rng(0)
    segments = []
    for position, (length, grid) in enumerate(zip(LENGTHS, GRIDS, strict=True)):
        ids = tuple(draw.integers(5, 60, length).tolist())
        prompt = EncodedPrompt.from_text(ids)
        if has_images:
            pads = (config.image_token_id,) * (grid[1] * grid[2] // 4)
            image = (config.vision_start_token_id, *pads, config.vision_end_token_id)
            ids = (*ids[:2], *image, *ids[2:])
            modality = torch.tensor([int(one == config.image_token_id) for one in ids])
            values = draw.standard_normal((grid[1] * grid[2], 3 * 2 * 8 * 8), dtype=np.float32)
            patches = torch.from_numpy(values)
            prompt = EncodedPrompt(ids, ids, modality, patches, torch.tensor([grid]))
        roles = np.full(3, TokenRole.NEUTRAL, dtype=np.uint8)
        target = Target("s", (7, 8, 9), roles, (), (), (), compared_logprobs=(-1.0,) * 3)
        segments.append(Segment(position, prompt, target))
    rope = model.model.get_rope_index if has_images or hasattr(model.model, "visual") else None
    no_text = TextWeights(desc=0.0, matched_structure=0.0, structure=0.0)
    return collate(segments, text_weights=no_text, rope_index=rope)


def learned(model: Any, row: PackedRow) -> dict[str, torch.Tensor]:
    """The hidden states of a row, and the gradient by parameter of a mean over its tokens."""
    model.zero_grad(set_to_none=True)
    with packed_row(row.lengths):
        hidden_TD = model.model(
            input_ids=row.inputs.input_ids,
            position_ids=row.inputs.position_ids,
            attention_mask=None,
            use_cache=False,
            **row.inputs.image_arguments(torch.float32),
        ).last_hidden_state[0]
    generator = torch.Generator().manual_seed(1)
    (hidden_TD * torch.rand(hidden_TD.shape, generator=generator)).sum(1).mean().backward()
    reached = [(name, one.grad) for name, one in model.named_parameters() if one.grad is not None]
    return {"hidden states": hidden_TD.detach(), **dict(reached)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "has_images", "checkpointing"),
    [
        ("qwen2", False, False),
        ("qwen3", False, False),
        ("qwen3_vl", False, False),
        ("qwen3_vl", True, True),
        *((family, True, False) for family in TOWERS),
    ],
)
def test_a_packed_row_has_the_values_and_gradients_of_the_masked_one(
    family: str, has_images: bool, checkpointing: bool, tmp_path: Path
) -> None:
    model = make_model(family, tmp_path)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    row = make_row(model, has_images=has_images)
    masked = learned(model, row)
    prepare_vision_tower(model)
    attend_by_segments(model)
    by_segments = learned(model, row)
    assert by_segments.keys() == masked.keys()
    assert ("model.visual.patch_embed.proj.weight" in masked) == has_images
    for name, expected in masked.items():
        torch.testing.assert_close(by_segments[name], expected, atol=1e-5, rtol=1e-5)
    sizes = [tensor.abs().max() for name, tensor in masked.items() if name != "hidden states"]
    assert max(sizes) > 0.1, "gradients are so large that 1e-5 says something"


@pytest.mark.slow
@pytest.mark.parametrize("family", [*TEXT_MODELS, *TOWERS])
def test_no_layer_of_a_packed_row_is_given_a_mask(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path)
    attend_by_segments(model)
    masks = []

    def note(layer: Any, arguments: Any, options: dict[str, Any]) -> None:
        masks.append(type(options["attention_mask"]))

    layers = model.get_decoder().layers
    for layer in layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    learned(model, make_row(model, has_images=False))
    assert masks == [RowBorders] * len(layers)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", *TOWERS])
def test_generation_with_padding_and_a_cache_is_transformers_own_to_the_bit(
    family: str, tmp_path: Path
) -> None:
    model = make_model(family, tmp_path).eval()
    ids_BP = torch.randint(5, 60, (3, 8), generator=torch.Generator().manual_seed(2))
    mask_BP = torch.ones_like(ids_BP)
    mask_BP[1, :3], mask_BP[2, :7] = 0, 0

    def generated() -> tuple[torch.Tensor, ...]:
        output = model.generate(
            input_ids=ids_BP,
            attention_mask=mask_BP,
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return (output.sequences, *output.logits)

    before = generated()
    attend_by_segments(model)
    assert all(map(torch.equal, generated(), before))


def test_a_checkpoint_does_not_name_an_attention_that_others_do_not_have(tmp_path: Path) -> None:
    model = make_model("qwen3_vl", tmp_path)
    attend_by_segments(model)
    model.save_pretrained(tmp_path / "saved")
    text = (tmp_path / "saved" / "config.json").read_text()
    assert "rollmatch" not in text
    assert "attn_implementation" not in text


# What transformers calls once in each forward


def mask_of(lengths: tuple[int, ...], num_shared: tuple[int, ...] = (), **changes: Any) -> Any:
    """What the layers of a row with segments of these lengths get."""
    num_tokens = sum(lengths)
    arguments: dict[str, Any] = {
        "batch_size": 1,
        "q_length": num_tokens,
        "kv_length": num_tokens,
        "q_offset": 0,
        "kv_offset": 0,
        "mask_function": lambda batch, head, query, key: key <= query,
        "allow_is_causal_skip": False,
        "dtype": torch.float32,
    }
    with packed_row(lengths, num_shared):
        return segments_or_mask(**arguments | changes)


def test_a_packed_row_has_borders_in_place_of_a_mask() -> None:
    segments = mask_of((3, 1, 2))
    assert isinstance(segments, RowBorders)
    assert (segments.starts.tolist(), segments.starts.dtype) == ([0, 3, 4, 6], torch.int32)
    assert segments.lengths == (3, 1, 2)
    assert mask_of((1,)).starts.tolist() == [0, 1]
    assert mask_of((3,), allow_is_causal_skip=True) is None, "one sequence needs none"


def test_a_segment_that_shares_tokens_sees_them_and_itself_as_if_it_were_alone() -> None:
    """Against each segment alone, and with a window."""
    torch.manual_seed(0)
    lengths, num_shared = (5, 2, 3, 4, 2), (0, 3, 3, 0, 1)
    towards = torch.randn(1, sum(lengths), 4, 8)
    layer: Any = SimpleNamespace(is_causal=True, num_key_value_groups=2)
    for window in (None, 3, 100):
        whole = [torch.randn(1, heads, sum(lengths), 8).requires_grad_() for heads in (4, 2, 2)]
        segments = RowBorders.of(lengths, HOST, num_shared, window)
        assert segments.keys is not None
        assert segments.keys.lengths == (5, 5, 6, 4, 3)
        assert segments.keys.starts.tolist() == [0, 5, 10, 16, 20, 23]
        assert segments.keys.at[5:16].tolist() == [0, 1, 2, 5, 6, 0, 1, 2, 7, 8, 9]
        assert segments.keys.at[16:].tolist() == [10, 11, 12, 13, 10, 14, 15]
        output, _ = segment_attention(layer, *whole, segments)
        found = torch.autograd.grad((output * towards).sum(), whole)
        parts = []
        for at, num_own in zip(segments.keys.at.split(segments.keys.lengths), lengths, strict=True):
            query, key, value = (one[0, :, at] for one in whole)
            key, value = (one.repeat_interleave(2, 0) for one in (key, value))
            scores = query @ key.mT / 8**0.5
            apart = torch.arange(len(at))[:, None] - torch.arange(len(at))
            hidden = (apart < 0) | (apart >= (window or 100))
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            parts.append((weights @ value)[:, -num_own:])
        alone = torch.cat(parts, dim=1).transpose(0, 1)[None]
        expected = torch.autograd.grad((alone * towards).sum(), whole)
        for one, other in zip((output, *found), (alone, *expected), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("changes", [{"use_vmap": True}, {"batch_size": 2}, {"kv_length": 5}])
def test_shared_tokens_are_refused_with_a_mask_that_borders_cannot_say(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match=r"^training\.share_prompts: .*; set it to false$"):
        mask_of((2, 2), (0, 1), **changes)
    assert mask_of((2, 2), (0, 1), local_size=4).window == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"local_size": 4},
        {"attention_mask": torch.tensor([[False, True, True, True]])},
        {"batch_size": 2},
        {"kv_length": 5},
        {"q_length": 3},
    ],
    ids=["a window", "padding", "several rows", "a cache", "another number of tokens"],
)
def test_what_borders_cannot_say_keeps_its_mask(changes: dict[str, Any]) -> None:
    mask = mask_of((2, 2), **changes)
    assert mask.dtype is torch.bool
    assert mask.shape[-2:] == (changes.get("q_length", 4), changes.get("kv_length", 4))


# The kernel of a GPU, which is emulated


def varlen_of_torch_2_11(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """Refuses heads of different numbers."""
    of_segments = (cu_seq_q, cu_seq_k, max_q, max_k)
    return varlen_attn(query, key, value, *of_segments, scale=scale, window_size=window_size)


H100 = (9, 0)


@pytest.mark.parametrize(
    ("device", "capability", "has_package", "has_torch", "activated"),
    [
        (CUDA, H100, True, True, ["FA3"]),
        (CUDA, H100, False, True, []),
        (CUDA, H100, True, False, []),
        (CUDA, (8, 0), True, True, []),
        (CUDA, (10, 0), True, True, []),
        (HOST, H100, True, True, []),
    ],
)
def test_flash_attention_3_is_used_where_gpu_package_and_torch_have_it(
    device: torch.device,
    capability: tuple[int, int],
    has_package: bool,
    has_torch: bool,
    activated: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    package = lambda name: (has_package and name == "flash_attn_interface") or None  # noqa: E731
    monkeypatch.setattr(learner.model.attention, "find_spec", package)
    # Raises if the installed torch has no such function.
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", found.append)
    if not has_torch:
        monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    assert use_flash_attention_3(device) is bool(activated)
    assert found == activated


def test_a_broken_package_of_flash_attention_3_is_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("import flash_attn_3._C")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: H100)
    message = (
        r"^model\.attention: flash_attn_interface, .* \(ModuleNotFoundError: .*'flash_attn_3'\);"
        r" install .* or uninstall"
    )
    with pytest.raises(ConfigError, match=message):
        use_flash_attention_3(CUDA)


def test_torch_knows_the_name_of_flash_attention_3() -> None:
    assert "FA3" in torch.nn.attention.list_flash_attention_impls()


@pytest.mark.parametrize("varlen", [varlen_attn, varlen_of_torch_2_11])
@pytest.mark.parametrize(("causal", "num_kv_heads"), [(True, 2), (True, 4), (False, 4)])
@pytest.mark.parametrize(("num_shared", "window"), [((), None), ((0, 2, 0), None), ((0, 2, 0), 3)])
def test_one_call_for_all_segments_gives_what_one_call_for_each_does(
    causal: bool,
    num_kv_heads: int,
    varlen: Any,
    num_shared: tuple[int, ...],
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if num_shared and not causal:
        pytest.skip("segments of a vision tower share nothing")
    monkeypatch.setattr(learner.model.attention, "varlen_attn", varlen)
    torch.manual_seed(0)
    heads = (4, num_kv_heads, num_kv_heads)
    inputs = [torch.randn(1, number, 9, 8).bfloat16() for number in heads]
    towards = torch.randn(1, 9, 4, 8).bfloat16()
    layer: Any = SimpleNamespace(is_causal=causal, num_key_value_groups=4 // num_kv_heads)

    def attended(device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        """The output, and the gradients of query, key and value."""
        given = [one.to(device, dtype).requires_grad_() for one in inputs]
        segments = RowBorders.of((2, 1, 6), device, num_shared, window)
        output, _ = segment_attention(layer, *given, segments, scaling=0.3)
        (output * towards.to(device, dtype)).sum().backward()
        return on_host([output, *(one.grad for one in given)])

    by_each = attended(HOST, torch.float32)
    with emulated_cuda() as cuda:
        by_one = attended(CUDA, torch.bfloat16)
        assert cuda.num_varlen == 1
    for one, expected in zip(by_one, by_each, strict=True):
        # A value of the product and a sum of a few are rounded to 8 bits.
        torch.testing.assert_close(one.float(), expected, atol=0.02, rtol=0.02)
