"""Learner and engines for `benchmarks.weight_sync`, which can skip the verification of a sync."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import Qwen3VLForConditionalGeneration

from launch.tools.demo.model import make_config, make_processor, make_tokenizer
from learner.model.checkpoint import CheckpointWeights
from learner.model.ranks import ReceiverGroup
from learner.weight_sync.sender import WeightSender
from rollout_actors.engine.actor import EngineActor, VllmEngineSpec
from shared.prompts import DEFAULT_USER_PROMPT
from shared.protocols import WatchedEngine
from shared.rollouts import WeightOffer
from shared.weight_sync.canary import CanaryProbe, Differences
from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.offer import FullOffer
from shared.weight_sync.phases import SendReport
from shared.weight_sync.transports import TransportKind

NUM_CANARY_TOKENS = 12
NUM_GREEDY_TOKENS = 12


def make_model(folder: Path, layers: int) -> Qwen3VLForConditionalGeneration:
    """Save a model with all files that vLLM needs (219 million parameters with 24 layers)."""
    tokenizer = make_tokenizer(DEFAULT_USER_PROMPT)
    config = make_config(tokenizer)
    text = config.text_config
    text.hidden_size = 768
    text.intermediate_size = 3072
    text.num_hidden_layers = layers
    text.num_attention_heads = 12
    text.num_key_value_heads = 4
    text.head_dim = 64
    text.vocab_size = 10_240
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [12, 10, 10]}
    config.vision_config.out_hidden_size = 768
    torch.manual_seed(17)
    model = Qwen3VLForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    make_processor(tokenizer).save_pretrained(folder)
    return model


class EngineSpec(VllmEngineSpec):
    def __call__(self) -> WatchedEngine:
        from benchmarks.unverified_engine import UnverifiedEngine

        return UnverifiedEngine(self.name, self.settings, index=self.index)


class Engine(EngineActor):
    """An engine actor that can also reload a checkpoint, corrupt a tensor or skip verification."""

    _engine: Any

    async def reload(self, folder: str) -> None:
        await self._engine.collective_rpc("reload_weights", None, folder)

    async def corrupt(self, name: str) -> None:
        """Make this tensor arrive upside down in the next weight sync, as a fault would."""
        await self._engine.collective_rpc("arm", "corrupt", name)

    async def cpu_s(self) -> float:
        """Return the processor time of the actor's processes since their start."""
        return time.process_time() + sum(await self._engine.collective_rpc("cpu_s"))

    async def set_verified(self, is_verified: bool) -> None:
        """Set whether this engine verifies the next weight syncs."""
        self._engine.is_verified = is_verified
        await self._engine.collective_rpc("set_verified", is_verified)


class UnverifiedWeights(ChecksummedWeights):
    """The tensors of a weight sync, with zeros instead of checksums."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights
        checksums, *canary = self.terms.sent[len(self.terms.tensors) :]
        yield checksums.name, torch.zeros(checksums.num_bytes, dtype=torch.uint8)
        for spec in canary:
            assert self.logprobs is not None
            yield spec.name, torch.tensor(self.logprobs(), dtype=torch.float64).view(torch.uint8)


class Sender(WeightSender):
    """A weight sender that can skip the checksums."""

    is_verified = True

    def outgoing(
        self,
        terms: FullOffer,
        logprobs: Callable[[], Sequence[float]],
        tensors: Iterable[tuple[str, torch.Tensor]],
    ) -> ChecksummedWeights:
        kind = ChecksummedWeights if self.is_verified else UnverifiedWeights
        return kind(tensors, terms, logprobs)


class Learner:
    """A learner without training: a model, the sender of its weights, and the canary.

    Its weights change between syncs.
    """

    offers_adapter = False

    def __init__(
        self, model: Any, num_engines: int, *, bucket_bytes: int, timeout_s: float
    ) -> None:
        self._model = model
        self._version = 0
        self._threads = ThreadPoolExecutor(1)
        self.tokens = tuple(
            torch.randint(
                300, (NUM_CANARY_TOKENS,), generator=torch.Generator().manual_seed(5)
            ).tolist()
        )
        self.sender = Sender(
            CheckpointWeights(model),
            transport=TransportKind.GLOO,
            receivers=(ReceiverGroup(num_engines),),
            timeout_s=timeout_s,
            bucket_bytes=bucket_bytes,
        )

    def learn(self) -> None:
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(1.0 + 0.02 * float(torch.randn(())))

    def offer_weights(self, *, again: bool = False) -> WeightOffer:
        assert not again, "no engine is replaced"
        self._version += 1
        return self.sender.offer(self._version, self.question(), self.logprobs)

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]:
        return self._threads.submit(self.sender.send, offer)

    def leave_groups(self) -> None:
        self.sender.close()

    def sync_done(self, noise: Differences | None) -> None:
        pass

    def question(self) -> CanaryProbe:
        return CanaryProbe(self.tokens, (), self.tokens, None, tolerance=1e-4)

    def logprobs(self) -> tuple[float, ...]:
        if not self.sender.is_verified:
            return (0.0,) * (len(self.tokens) - 1)
        return tuple(
            self._logits(self.tokens)[:-1]
            .log_softmax(-1)
            .gather(1, torch.tensor(self.tokens[1:])[:, None])[:, 0]
            .tolist()
        )

    def greedy(self) -> tuple[int, ...]:
        tokens = list(self.tokens)
        for _ in range(NUM_GREEDY_TOKENS):
            tokens.append(int(self._logits(tokens)[-1].argmax()))
        return tuple(tokens[len(self.tokens) :])

    def save(self, folder: Path) -> None:
        self._model.save_pretrained(folder)

    def _logits(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def set_verified(is_verified: bool, learner: Learner, actors: Sequence[Any]) -> None:
    """Set whether learner and engines verify the next weight syncs.

    Names and numbers of tensors are always compared.
    """
    learner.sender.is_verified = is_verified
    ray.get([actor.set_verified.remote(is_verified) for actor in actors])
