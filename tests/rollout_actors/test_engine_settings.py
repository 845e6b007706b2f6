"""What an engine is started with for adapters, and which of vLLM's bounds the configuration keeps to."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_support import small_settings

from rollout_actors.engine_settings import engine_arguments, lora_arguments, model_type
from shared.config.engine_checks import MAX_VLLM_BEAMS
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


@pytest.mark.engine
def test_as_many_beams_are_permitted_as_vllms_search_gets_log_probabilities_for() -> None:
    from vllm.engine.arg_utils import EngineArgs

    assert "max_logprobs" not in engine_arguments(small_settings(Path("model")))
    assert EngineArgs.max_logprobs == 2 * MAX_VLLM_BEAMS


def test_a_checkpoint_says_its_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text"}}')
    assert model_type(str(tmp_path)) == "qwen2_5_vl"
