"""Compare the estimated memory of a learner rank (`launch/checks/learner_memory.py`) with the peak.

`python -m benchmarks.learner_memory` (CPU, 15 seconds of one core per case) uses the learner's own
loading, rows and update on a random Qwen3-VL of about 7 million parameters. A short row and an
update create the moments, another short row the gradients. Then come a row of `global_max_length`
tokens and the update. The peak is the peak of torch's allocator (tensors and workspaces of kernels,
recorded by `torch.profiler`) plus the weights that exist before. It is exact and excludes all other
memory of the process. So cases with one rank share a process, and cases with two ranks use separate
processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch._C._profiler import _EventType
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.profiler._utils import traverse_dfs
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.logit_memory import PIPELINE
from benchmarks.segments import MERGE, NUM_WORDS, PATCH, ImageIds, random_segment
from launch.checks.learner_memory import learner_estimate
from launch.checks.memory import Estimate
from launch.checks.model_shape import ModelShape, RunSizes
from launch.tools.demo.model import IMAGE_PAD, make_config, make_processor, make_tokenizer
from learner.checks import LogprobTolerance
from learner.model.loading import DTYPES, LoadedModel
from learner.model.optimizer.adamw import Optimizer
from learner.model.ranks import LearnerDevice, Ranks, RankTopology, Rendezvous, join_ranks
from learner.model.sharding import load_parallel
from learner.segments import Segment
from learner.step import RowTrainer
from shared.config import RunConfig, load_config
from shared.config.pipeline import Channel
from shared.weight_sync.transports import TransportKind

T = TypeVar("T")
LIMIT_S = 300.0
"""Limit of each wait: for all ranks, and of one rank for the others."""
FORKSERVER = multiprocessing.get_context("forkserver")
"""Ranks are forked from one process that has the imports. If each imported them itself, on a busy
machine some would need longer than the others wait for them."""
rendezvous: Rendezvous | None = None
"""In the process of rank 0: what the other ranks connect to (`host`)."""
SHORT = 64
"""Tokens of the short row that creates the optimizer's moments and the gradients."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a random model, and of its rows."""

    hidden: int = 256
    layers: int = 4
    intermediate: int = 768
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocabulary: int = 8_000
    vision_hidden: int = 128
    vision_layers: int = 3
    vision_intermediate: int = 512
    tokens: int = 1024
    segment: int = 256
    image: int = 10
    """Side of a segment's image in tokens; 0: no image."""

    @property
    def num_siblings(self) -> int:
        """Number of rollouts of a segment's prompt in a row that has the prompt once.

        Each but the first has its target and the last token of the prompt in the row.
        """
        num_prompt = NUM_WORDS + (self.image**2 + 2 if self.image else 0)
        return 1 + (self.tokens - self.segment) // (self.segment - num_prompt + 1)


USUAL = Sizes()


class Case(NamedTuple):
    """A measured setting: sizes that differ from `USUAL`, and keys of the configuration."""

    sizes: Mapping[str, int] = MappingProxyType({})
    keys: Mapping[str, Any] = MappingProxyType({})


FROZEN = {"training.parts.vision_tower.frozen": True, "training.parts.aligner.frozen": True}
LORA = {"kind": "lora", "rank": 16}
CHECKPOINTING = {"model.gradient_checkpointing": True}
HALF = {"model.dtype": "bfloat16"}
SHARED = {
    "training.share_prompts": True,
    "stage2_ab.channel_b.rollouts_per_sample": 2,
    "training.effective_batch_size": 2,
}
SHARDED = {
    "learner.parallel": "fsdp",
    "learner.world_size": 2,
    "rollout_matching.rollout_backend": "vllm",  # shards cannot generate; no engine is started
}
CASES: Mapping[str, Case] = {
    "full": Case(),
    "full, checkpointing": Case(keys=CHECKPOINTING),
    "full, every second layer": Case(keys=CHECKPOINTING | {"model.recompute_every": 2}),
    "full, tower not recomputed": Case(keys=CHECKPOINTING | {"model.recompute_tower": False}),
    "full, bfloat16": Case(keys=HALF),
    "full, bfloat16, float32 head": Case(
        keys=HALF | CHECKPOINTING | {"model.head_dtype": "float32"}
    ),
    "full, bfloat16, checkpointing": Case(keys=HALF | CHECKPOINTING),
    "full, text, sdpa": Case({"image": 0}, FROZEN | {"model.attention": "sdpa"}),
    "full, text, eager": Case({"image": 0}, FROZEN | {"model.attention": "eager"}),
    "full, text, eager, checkpointing": Case(
        {"image": 0}, FROZEN | {"model.attention": "eager"} | CHECKPOINTING
    ),
    "full, 8-bit moments": Case(keys={"training.optimizer": "adamw_bnb_8bit"} | CHECKPOINTING),
    "full, masters offloaded": Case(keys={"training.optimizer": "adamw_offload"} | CHECKPOINTING),
    "lora": Case(keys={"model.adapter": LORA}),
    "lora, bfloat16, checkpointing": Case(keys={"model.adapter": LORA} | HALF | CHECKPOINTING),
    "full, shared prompts": Case({"segment": 128}, SHARED),
    "full, shared prompts, checkpointing": Case({"segment": 128}, SHARED | CHECKPOINTING),
    "full, two shards": Case(keys=SHARDED | CHECKPOINTING),
    "full, bfloat16, two shards": Case(keys=SHARDED | HALF | CHECKPOINTING),
    "lora, bfloat16, two shards": Case(
        keys=SHARDED | {"model.adapter": LORA} | HALF | CHECKPOINTING
    ),
}


def make_checkpoint(folder: Path, sizes: Sizes) -> Path:
    """Write a checkpoint of a random model with the demo's tokenizer; return its folder.

    The embeddings have spare rows.
    """
    tokenizer = make_tokenizer("")
    text = {
        "vocab_size": max(sizes.vocabulary, len(tokenizer)),
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
    }
    values = make_config(tokenizer).to_dict()
    rope = values["text_config"]["rope_parameters"]
    third = sizes.head_dim // 6
    rope["mrope_section"] = [sizes.head_dim // 2 - 2 * third, third, third]
    values["text_config"] |= text
    values["vision_config"] |= {
        "hidden_size": sizes.vision_hidden,
        "depth": sizes.vision_layers,
        "intermediate_size": sizes.vision_intermediate,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "out_hidden_size": sizes.hidden,
        "deepstack_visual_indexes": [0, 1, 2],
    }
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(Qwen3VLConfig(**values)).save_pretrained(folder)
    make_processor(tokenizer).save_pretrained(folder)
    return folder


def make_run(folder: Path, sizes: Sizes, keys: Mapping[str, Any]) -> RunConfig:
    pipeline = PIPELINE.model_dump(mode="json", exclude_none=True)
    # As in the experiments. Coord logits at text positions would take a tenth of such small rows.
    pipeline["objective"][1]["config"]["text_gate_weight"] = 0.0
    values: dict[str, Any] = {
        "model": {"path": str(folder)},
        "data": {"train": str(folder / "train.jsonl")},
        "global_max_length": sizes.tokens,
        "training": {"seed": 0, "max_steps": 10, "learning_rate": 1e-4},
        "custom": {"trainer_variant": "stage2_two_channel"},
        "stage2_ab": {"channel_b": {"enable_pipeline": False}},
        "rollout_matching": {
            "rollout_backend": "hf",
            "max_new_tokens": 64,
            "pipeline": pipeline,
        },
    }
    for path, value in keys.items():
        *parents, key = path.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    return load_config(values)


def segment_maker(loaded: LoadedModel) -> Callable[[int, int, int], Segment]:
    """Return a function that makes a segment from a number, a length and its image's side."""
    ids = loaded.tokenizer.convert_tokens_to_ids(["<|vision_start|>", IMAGE_PAD, "<|vision_end|>"])

    def make(number: int, length: int, image: int) -> Segment:
        return random_segment(
            number,
            length,
            image=image,
            image_ids=ImageIds(*ids),
            words=range(100),
            coord_ids=loaded.codec.coord_ids,
        )

    return make


def measure(config: RunConfig, sizes: Sizes, ranks: Ranks) -> int:
    """Return the peak bytes that torch's allocator holds during a learner rank's steps."""
    loaded, parallel = load_parallel(config, torch.device("cpu"), ranks)
    trainer = RowTrainer(
        config.rollout_matching.pipeline,
        lambda: LogprobTolerance.of(config.model.dtype, config.logprob_tolerance),
        loaded,
        parallel,
        config.rollout_matching.decode_settings(stop_token_ids=(0,), banned_token_ids=()),
        dtype=DTYPES[config.model.dtype],
        share_prompts=config.training.share_prompts,
    )
    local = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for tensor in (*loaded.model.parameters(), *loaded.model.buffers())
    ]
    weights = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local
    }
    make = segment_maker(loaded)
    short = trainer.collate([make(0, SHORT, min(sizes.image, 4))], Channel.A, version=0)
    segments = [
        make(number, sizes.segment, sizes.image) for number in range(sizes.tokens // sizes.segment)
    ]
    if config.training.share_prompts:
        segments = segments[:1] * sizes.num_siblings
    row = trainer.collate(segments, Channel.A, version=0)
    assert row.num_tokens == sizes.tokens, "the measured row has the size of the estimated row"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        optimizer = Optimizer(loaded.model, config.training, ranks)
        trainer.queue(short, Channel.A)()
        optimizer.update(0, 1)
        trainer.queue(short, Channel.A)()
        trainer.queue(row, Channel.A)()
        optimizer.update(1, len(segments))
    # Each event has the allocator's total, so their order does not matter. A sum in the order of
    # their times was far too low twice, when the machine was very busy.
    memory = [
        event.typed[1]
        for event in traverse_dfs(profiled.profiler.kineto_results.experimental_event_tree())
        if event.tag == _EventType.Allocation
    ]
    before = min(event.total_allocated - event.alloc_size for event in memory)
    most = max(event.total_allocated for event in memory) - before
    return sum(weights.values()) + most


def measure_rank(
    place: RankTopology, rendezvous: Rendezvous | None, config: RunConfig, sizes: Sizes
) -> int:
    """Join the other learner ranks, and return the peak bytes of this rank (`measure`).

    Every rank calls it.
    """
    device = LearnerDevice(torch.device("cpu"))
    ranks = join_ranks(place, rendezvous, device, timeout_s=LIMIT_S, num_shards=place.world_size)
    return measure(config, sizes, ranks)


def host() -> str:
    """Host the rendezvous in this process, which becomes rank 0. Return its address."""
    global rendezvous
    rendezvous = Rendezvous("127.0.0.1")
    return rendezvous.endpoint


def as_rank(function: Callable[..., T], place: RankTopology, *arguments: Any) -> T:
    """Return `function(place, rendezvous, *arguments)`; `rendezvous` is None but on rank 0."""
    return function(place, rendezvous, *arguments)


def results(futures: Sequence[Future[T]]) -> list[T]:
    """Return the results. Raises the first error of a rank, and TimeoutError after `LIMIT_S`.

    With TimeoutError it kills the ranks, so that no process waits for them.
    """
    # Not one after the other: the other ranks wait for one that failed.
    done, unfinished = wait(futures, LIMIT_S, FIRST_EXCEPTION)
    for future in done:
        future.result()
    if unfinished:
        for process in multiprocessing.active_children():
            process.kill()
        raise TimeoutError(
            f"{len(unfinished)} of {len(futures)} ranks did not answer within {LIMIT_S:g} s; check"
            " that cores and memory are free, or measure a smaller model"
        )
    return [future.result() for future in futures]


def run_in_ranks(function: Callable[..., T], num_ranks: int, *arguments: Any) -> list[T]:
    """Return `function(place, rendezvous, *arguments)` of learner ranks on this machine.

    The ranks are new processes, because torch names groups of ranks, and a process can use a name
    only once.
    """
    FORKSERVER.set_forkserver_preload(["learner.step"])
    with (
        ProcessPoolExecutor(1, FORKSERVER) as rank_zero,
        ProcessPoolExecutor(num_ranks - 1, FORKSERVER) as peers,
    ):
        (endpoint,) = results([rank_zero.submit(host)])
        places = [
            RankTopology(
                TransportKind.GLOO, (), rank=rank, world_size=num_ranks, rendezvous=endpoint
            )
            for rank in range(num_ranks)
        ]
        pools = (rank_zero, *[peers] * (num_ranks - 1))
        pairs = zip(pools, places, strict=True)
        return results([pool.submit(as_rank, function, one, *arguments) for pool, one in pairs])


def prepare_case(folder: Path, case: Case, usual: Sizes = USUAL) -> tuple[RunConfig, Sizes]:
    """Return a case's configuration and sizes. `folder` has the checkpoint."""
    sizes = replace(usual, **case.sizes)
    return make_run(folder, sizes, case.keys), sizes


def estimate_of(config: RunConfig, sizes: Sizes) -> Estimate:
    run = RunSizes.of(config, ModelShape.read(Path(config.model.path)))
    images = sizes.tokens // sizes.segment * sizes.image**2
    if not config.training.share_prompts:
        return learner_estimate(run, image_tokens=images)
    keys = sizes.num_siblings * sizes.segment
    return learner_estimate(run, image_tokens=sizes.image**2, key_tokens=keys)


def measure_case(config: RunConfig, sizes: Sizes) -> int:
    if not config.learner.is_sharded:
        return measure(config, sizes, Ranks())
    return run_in_ranks(measure_rank, config.learner.world_size, config, sizes)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="run only cases with this text in their name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'case':36} estimate MB  measured MB  ratio")
    with tempfile.TemporaryDirectory(prefix="rollmatch-") as folder:
        path = make_checkpoint(Path(folder), USUAL)
        for name, case in CASES.items():
            if arguments.only is None or arguments.only in name:
                config, sizes = prepare_case(path, case)
                estimate, peak = estimate_of(config, sizes), measure_case(config, sizes)
                total = estimate.total
                print(f"{name:36} {total / 1e6:11.1f} {peak / 1e6:12.1f} {total / peak:6.2f}")
                print(f"    {estimate.describe()}", flush=True)


if __name__ == "__main__":
    main()
