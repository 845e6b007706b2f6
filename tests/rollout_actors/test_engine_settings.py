"""What an engine is started with for adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_support import small_settings

from rollout_actors.engine_settings import lora_arguments, model_type
from shared.lora import LORA_RANKS


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (4, 8), (8, 8), (9, 16), (64, 64), (300, 320), (512, 512)])
def test_an_adapter_takes_the_room_of_the_next_rank_that_vllm_knows(rank: int, room: int) -> None:
    arguments = lora_arguments(small_settings(Path("model"), enable_lora=True, max_lora_rank=rank))
    assert arguments == {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}


def test_an_engine_without_lora_is_started_as_ever() -> None:
    assert lora_arguments(small_settings(Path("model"))) == {}


@pytest.mark.engine
def test_the_ranks_are_vllms_own() -> None:
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == LORA_RANKS


def test_a_checkpoint_says_its_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text"}}')
    assert model_type(str(tmp_path)) == "qwen2_5_vl"
