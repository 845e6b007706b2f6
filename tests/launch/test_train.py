"""What `launch.preflight` refuses, `launch.train` refuses before it has started or written
anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
from config_support import configuration
from rich.console import Console

from launch.train import run
from shared.errors import ConfigError

SOUND = {
    "global_max_length": 512,
    "rollout_matching__max_new_tokens": 96,
    "learner__cpus": 0.25,
    "rollout_matching__vllm__actors": {"num_actors": 3, "cpus_per_actor": 0.25},
    "rollout_matching__vllm__kv_cache_memory_bytes": 2**26,
}


def no_ray(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("Ray was started")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"learner__cpus": 4096.0}, r"^learner\.cpus: "),
        ({"global_max_length": 128}, r"^global_max_length: 128 is too short for sample "),
        (
            {"model__adapter": {"kind": "lora", "target_modules": ["q_projj"]}},
            r"^model\.adapter\.target_modules: no linear layer .* is called q_projj",
        ),
        ({"cluster__temp_dir": "/tmp/" + "long" * 20}, r"^cluster\.temp_dir: "),
    ],
)
def test_a_run_that_cannot_work_is_refused_before_anything_is_there(
    changes: dict[str, Any],
    problem: str,
    demo_checkpoint: Path,
    demo_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    monkeypatch.setattr(ray, "init", no_ray)
    config = configuration(demo_checkpoint, demo_data, tmp_path / "run", **SOUND | changes)
    with pytest.raises(ConfigError, match=problem) as caught:
        run(config, Console())
    assert len(caught.value.problems) == 1
    assert not (tmp_path / "run").exists()
