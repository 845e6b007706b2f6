"""`model.path` may be a hub's id: it is found in the cache, or fetched, or the error says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from config_support import configuration
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from launch.checks.hub import FILES, fetch_model, with_fetched_model
from learner.model.checkpoint_folder import hub_id
from shared.errors import ConfigError

SHA = "0123456789012345678901234567890123456789"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, as huggingface_hub has it, of somebody without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)

    def offline(*_: Any, **__: Any) -> None:
        raise OfflineModeIsEnabled("Cannot reach the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
    return tmp_path / "hub"


def keep(cache: Path) -> Path:
    """Put a model into the cache."""
    model = cache / "models--some--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(SHA)
    snapshot = model / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return snapshot


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[dict[str, Any]]]:
    """A hub with some/model of so many bytes; returns the downloads that were asked for."""
    asked: list[dict[str, Any]] = []

    def make(num_bytes: int) -> list[dict[str, Any]]:
        siblings = [
            SimpleNamespace(rfilename="model.safetensors", size=num_bytes),
            SimpleNamespace(rfilename="pytorch_model.bin", size=num_bytes),
        ]
        info = SimpleNamespace(sha=SHA, siblings=siblings)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
        from_cache = huggingface_hub.snapshot_download

        def download(repo: str, **options: Any) -> str:
            if options.get("local_files_only"):
                return from_cache(repo, **options)
            asked.append({"repo": repo, **options})
            return str(keep(cache))

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return asked

    return make


@pytest.mark.parametrize(
    ("path", "is_id"),
    [
        ("some/model", True),
        ("some/model@v1.0", True),
        ("here/model", False),
        ("/some/model", False),
        ("some/more/model", False),
        ("model", False),
    ],
)
def test_a_hubs_id_is_told_from_a_folder(cache: Path, path: str, is_id: bool) -> None:
    Path("here").mkdir()
    assert (hub_id(Path(path)) == path) is is_id


def test_what_is_in_the_cache_is_used_without_the_hub(cache: Path) -> None:
    folder = keep(cache)
    lines: list[str] = []
    assert fetch_model("some/model", lines.append) == str(folder)
    assert lines == [f"model     some/model at revision {SHA}, in {folder}"]


def test_what_is_not_is_fetched_at_the_revision_of_now_without_other_formats(hub: Any) -> None:
    asked = hub(2_000_000)
    lines: list[str] = []
    fetch_model("some/model", lines.append)
    assert asked == [{"repo": "some/model", "revision": SHA, "allow_patterns": list(FILES)}]
    assert lines[0].startswith(f"model     fetching some/model at revision {SHA}: 0.00 GB, ")


def test_a_disk_that_is_too_small_is_told_before(hub: Any) -> None:
    asked = hub(10**18)
    with pytest.raises(
        ConfigError, match=r"some/model needs 1000000000.00 GB, .* free in .*HF_HOME"
    ):
        fetch_model("some/model", print)
    assert not asked


def test_without_a_network_the_error_has_the_command(cache: Path) -> None:
    message = (
        "not in .*hub, and the hub cannot be reached .* `hf download some/model --revision v2`"
    )
    with pytest.raises(ConfigError, match=message):
        fetch_model("some/model@v2", print)


def test_a_folder_is_left_as_it_is(demo_checkpoint: Path, demo_data: Any, tmp_path: Path) -> None:
    config = configuration(demo_checkpoint, demo_data, tmp_path)
    assert with_fetched_model(config, print) is config
