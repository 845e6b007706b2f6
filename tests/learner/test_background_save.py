"""A checkpoint that is written while the learner learns on (`checkpoint.background`)."""

from __future__ import annotations

import errno
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from config_support import configuration
from learner_support import finish_step, make_learner
from safetensors.torch import save_file

from learner import host_memory
from learner.host_memory import NodeMemory
from learner.model.checkpoint import CheckpointContent
from learner.model.checkpoint_save import CheckpointSave, HostCopies
from learner.run_state import RandomState, RankState
from shared.errors import StorageError
from shared.schedule import RunSchedule

LEARNING = {
    "training__max_steps": 3,
    "stage2_ab__schedule__warmup_steps": 3,
    "training__effective_batch_size": 4,
    "global_max_length": 512,
}
CASES = {
    "float32": {},
    "bfloat16 masters": {"model__dtype": "bfloat16"},
    "masters apart": {"training__optimizer": "adamw_offload"},
    "adapter": {"model__adapter": {"kind": "lora", "rank": 4, "alpha": 8.0}},
    "weights alone": {"checkpoint__full": False},
}
WRITE = CheckpointContent.write_weights


@pytest.fixture
def learner_of(demo_checkpoint, demo_data, tmp_path):
    """Make a learner, and return it with the remaining plans, behind one update."""

    def make(**changes):
        config = configuration(demo_checkpoint, demo_data, tmp_path / "run", **LEARNING | changes)
        learner = make_learner(config)
        plans = iter(RunSchedule(config).plans())
        learn(learner, next(plans))
        return learner, plans

    return make


def learn(learner, plan):
    learner.next_requests(plan)
    finish_step(learner)


def contents(folder):
    """Every file of a folder, to the byte."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_has_the_bytes_of_one_that_the_run_waited_for_although_it_learned_on(
    case, learner_of, tmp_path
):
    learner, plans = learner_of(**CASES[case])
    learner.save(tmp_path / "foreground", "{}")
    may_write = threading.Event()

    def write_later(content, folder):
        assert may_write.wait(480)
        WRITE(content, folder)

    with patch.object(CheckpointContent, "write_weights", write_later):
        assert learner.save(tmp_path / "background", "{}", background=True) is None
        for plan in plans:
            learn(learner, plan)
        assert learner.finish_save(wait=False) is None
        assert not (tmp_path / "background").exists()
        may_write.set()
        (written,) = learner.finish_save(wait=True)
    assert (written.track, written.name) == ("learner, checkpoints", "write background")
    assert contents(tmp_path / "background") == contents(tmp_path / "foreground")
    assert learner.finish_save(wait=False) == [], "nothing is written any more"
    learner.save(tmp_path / "later", "{}")
    assert contents(tmp_path / "later") != contents(tmp_path / "foreground")


@pytest.mark.slow
def test_what_the_disk_refuses_is_written_again_from_the_same_copy(learner_of, tmp_path):
    learner, plans = learner_of()
    learner.save(tmp_path / "foreground", "{}")
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch.object(CheckpointContent, "write_weights", side_effect=full):
        learner.save(tmp_path / "background", "{}", background=True)
        learn(learner, next(plans))
        for _ in range(2):
            with pytest.raises(StorageError, match=r"background: .*No space left") as caught:
                learner.finish_save(wait=True)
            assert caught.value.can_pass
            assert sorted(path.name for path in tmp_path.glob("*ground*")) == ["foreground"]
    learn(learner, next(plans))
    learner.finish_save(wait=False)
    assert contents(tmp_path / "background") == contents(tmp_path / "foreground")


@pytest.mark.slow
def test_where_there_is_no_memory_for_the_copy_the_run_waits_and_the_figures_are_told(
    learner_of, tmp_path, monkeypatch
):
    learner, _ = learner_of()
    monkeypatch.setattr("learner.saving.available_memory", lambda: 2**31 + 2**20)
    reason = learner.save(tmp_path / "foreground", "{}", background=True)
    assert re.search(r"host memory, .* 2\.00 GiB .*free, .*only 2\.00 GiB", reason)
    assert (tmp_path / "foreground" / "run_state" / "run.json").exists()
    assert learner.finish_save(wait=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_copy_holds_each_tensor_once_and_so_much_memory_is_asked_for(
    case, learner_of, tmp_path, monkeypatch
):
    """Weights in float32 are their own masters, which the files hold beside them."""
    learner, _ = learner_of(**CASES[case])
    weights, state = {}, {}

    def write_later(content, folder):
        weights.update(content.weights)
        WRITE(content, folder)

    def save_state(tensors, path):
        state.update(tensors)
        save_file(tensors, path)

    with (
        patch.object(CheckpointContent, "write_weights", write_later),
        patch("learner.run_state.save_file", save_state),
    ):
        assert learner.save(tmp_path / "background", "{}", background=True) is None
        learner.finish_save(wait=True)
    held = {one.data_ptr(): one.nbytes for one in (*weights.values(), *state.values())}
    live = {parameter.data_ptr() for parameter in learner.loaded.model.parameters()}
    assert not held.keys() & live, "nothing is read that the next update changes"
    written = sum(one.nbytes for one in (*weights.values(), *state.values()))
    twice = sum(one.nbytes for one in weights.values()) if case == "float32" else 0
    assert sum(held.values()) == written - twice
    enough = 2**31 + sum(held.values())
    for available, has_room in ((enough, True), (enough - 1, False)):
        monkeypatch.setattr(
            "learner.saving.available_memory", lambda available=available: available
        )
        reason = learner.save(tmp_path / f"room {has_room}", "{}", background=True)
        assert (reason is None) is has_room
        learner.finish_save(wait=True)


@pytest.mark.parametrize(
    ("nodes", "scarcest"),
    [
        pytest.param([7, 7, 7], NodeMemory(60, 70), id="one machine has to hold all copies"),
        pytest.param([7, 8, 7], NodeMemory(40, 70), id="another one's memory is its own"),
        pytest.param([7, 8, 9], NodeMemory(20, 70), id="a node for each rank"),
    ],
)
def test_each_node_has_to_have_room_for_the_copies_of_its_own_ranks(nodes, scarcest):
    assert NodeMemory.scarcest([20, 20, 20], [90, 80, 70], nodes) == scarcest


def test_a_rank_flushes_its_own_files_and_none_that_another_is_writing(tmp_path, monkeypatch):
    """safetensors writes under another name first: such a file is gone when one opens it."""
    state = tmp_path / "run_state"
    state.mkdir()
    for other in (state / ".tmpAbC", state / "rank_0.safetensors", tmp_path / "model.safetensors"):
        other.write_bytes(b"half")
    flushed = []
    monkeypatch.setattr("os.fsync", lambda number: flushed.append(readlink(number)))
    random = RandomState.capture(torch.device("cpu"))
    RankState(1, random).writer(1, {"a": torch.zeros(2)})(tmp_path)
    assert sorted(flushed) == [str(state / f"rank_1.{kind}") for kind in ("json", "safetensors")]


def readlink(number):
    return str(Path(f"/proc/self/fd/{number}").readlink())


@pytest.mark.parametrize(
    ("own", "files", "available"),
    [
        ("0::/\n", {}, 4_000_000 * 1024),
        (
            "0::/a\n",
            {
                "memory.max": "max\n",
                "a/memory.max": "1000\n",
                "a/memory.current": "900\n",
                "a/memory.stat": "anon 500\ninactive_file 100\nactive_file 50\n",
            },
            250,
        ),
        (
            "4:memory:/\n",
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "700\n",
                "memory/memory.stat": "total_inactive_file 100\ntotal_active_file 1\n",
            },
            401,
        ),
    ],
)
def test_a_container_has_the_memory_that_its_limit_leaves_and_cached_files_give_back(
    tmp_path, monkeypatch, own, files, available
):
    (tmp_path / "own").write_text(own)
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4000000 kB\n")
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    assert host_memory.available_memory() == available


def test_only_a_tensor_of_the_same_elements_gets_the_copy_that_there_is():
    weight = torch.arange(6.0).reshape(2, 3)
    copies = HostCopies([weight])
    copy = copies(weight.detach())
    assert copies(weight).data_ptr() == copy.data_ptr() != weight.data_ptr()
    for other in (weight[:1], weight.T, weight.view(torch.int32), weight.clone()):
        assert torch.equal(copies(other), other)
        assert copies(other).data_ptr() != copy.data_ptr()
    weight += 1
    assert torch.equal(copy, torch.arange(6.0).reshape(2, 3))


def test_of_two_ranks_each_sums_up_what_it_wrote_and_nothing_that_another_writes(tmp_path):
    """safetensors writes into `.tmpXXXXXX`, which another rank sees come and go."""
    files = ["model.safetensors", "rank_0.json", "rank_1.json", ".tmpAb12cd", "SHA256SUMS.1"]
    for name in files:
        (tmp_path / name).touch()
    own = []
    for rank in range(2):
        save = CheckpointSave(
            SimpleNamespace(rank=rank), tmp_path, write=lambda _: None, finish=None
        )
        own.append([name for name in files if save._is_own(tmp_path / name)])
    assert own == [["model.safetensors", "rank_0.json"], ["rank_1.json"]]
