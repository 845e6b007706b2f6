"""What tests with real engines share: the actors, and a learner's side small enough to be read beside a test."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from PIL import Image
from process_family import descendants_of, is_engine
from transformers import AutoModelForImageTextToText, AutoProcessor

from launch.runtime.rollout_client import ActorPool, PoolTimeouts
from learner.model.adapters import without_adapter
from learner.model.checkpoint import CheckpointWeights
from learner.model.ranks import ReceiverGroup
from learner.weight_sync.canary import ComputedCanary
from learner.weight_sync.publisher import AdapterSender, Sender
from learner.weight_sync.sender import WeightSender
from rollout_actors.engine.actor import EngineActor, VllmEngineSpec
from rollout_actors.engine.settings import EngineSettings, engine_runtime_env, neighbour_runtime_env
from shared.config.job import TimeoutsSection
from shared.prompts import on_white
from shared.records import ImageRef
from shared.rollouts import DecodeMode, DecodeSettings, Rollout, RolloutRequest, WeightOffer
from shared.sent_requests import PictureShelf
from shared.weight_sync.canary import CanaryProbe
from shared.weight_sync.differences import Differences
from shared.weight_sync.phases import SendReport, sync_weights
from shared.weight_sync.transports import Device, Transport

SUPPORT = Path(__file__).parent
TIMEOUTS = PoolTimeouts.of_actors(TimeoutsSection(start_s=600.0, generate_s=120.0, sync_phase_s=30.0))


def small_settings(checkpoint: Path, **changes: Any) -> EngineSettings:
    settings = EngineSettings(
        model_path=str(checkpoint),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        seed=0,
        transport=Transport.GLOO,
        device=Device.CPU,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=64 << 20,
        worker_extension="spoiling_worker.SpoilingWorker",
    )
    return replace(settings, **changes)


NEIGHBOUR = neighbour_runtime_env(small_settings(Path("of any checkpoint")), PYTHONPATH=str(SUPPORT))
"""Ray's `runtime_env` for an actor beside engines that imports modules of this folder."""


class OpenActor(EngineActor):
    """An ordinary actor whose workers can be asked, and which tells its processes."""

    _engine: Any

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        """What this method of the engine's workers returns, one for each device."""
        return await self._engine.collective_rpc(method, *arguments)

    async def trouble_adapters(self, make: Callable[[Any], Any] | None) -> None:
        """From now on the engine's adapters go through this, over the sound ones; None: no longer."""
        intake = self._engine.intake
        intake.adapter = intake.adapter.sound if make is None else make(intake.adapter)

    async def requests_and_tokens(self) -> tuple[int, int]:
        """Requests under way, and tokens sampled for those that have ended: an aborted one's are in neither."""
        llm = self._engine._llm
        return len(llm.output_processor.request_states), self._engine._num_finished_tokens

    async def process_ids(self) -> list[int]:
        """Its own, then its engine's."""
        return [os.getpid(), *(child.pid for child in descendants_of(psutil.Process()) if is_engine(" ".join(child.cmdline())))]


def create_actor(name: str, settings: EngineSettings, index: int) -> Any:
    runtime_env = engine_runtime_env(settings, PYTHONPATH=str(SUPPORT))
    return ray.remote(OpenActor).options(num_cpus=0, runtime_env=runtime_env).remote(VllmEngineSpec(name, settings, index))


@dataclass(frozen=True)
class EnginePool:
    """Three actors and the pool over them."""

    actors: dict[str, Any]
    pool: ActorPool

    def over(self, *names: str, decode_batch_size: int = 8, learner_ranks: int = 1, timeouts: PoolTimeouts = TIMEOUTS) -> ActorPool:
        """Another pool over some of the same actors, which have started. Not to be closed."""
        actors = [self.actors[name] for name in names]
        return ActorPool(actors, names, timeouts, decode_batch_size=decode_batch_size, learner_ranks=learner_ranks, devices=(1,) * len(names))

    def arm(self, name: str, fault: str, tensor: str) -> None:
        """What `spoiling_worker.Fault` names happens to this tensor in this actor's engine in its next sync."""
        ray.get(self.actors[name].ask.remote("arm", fault, tensor))

    def generate(self, requests: Sequence[RolloutRequest], *names: str) -> list[Rollout]:
        return generated(self.over(*names) if names else self.pool, requests)

    def learn(self, checkpoint: Path, seed: int) -> None:
        """The engines get the weights that a small learner of this checkpoint has after this seed."""
        with closing(SmallLearner(checkpoint, num_receivers=len(self.actors))) as learner:
            learner.version = self.pool.version
            learner.learn(seed)
            sync_weights(learner, self.pool)


def generated(pool: ActorPool, requests: Sequence[RolloutRequest]) -> list[Rollout]:
    """A step of one learner rank, round by round."""
    rounds = [pool.generate(round_).result() for round_ in pool.split([PictureShelf(ray.put).put_each(requests)])]
    return [rollout for (shares,) in rounds for share in ray.get(shares) for rollout in share]


def noise_image(seed: int) -> ImageRef:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (96, 96, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return ImageRef(path=None, data=buffer.getvalue(), sha256=hashlib.sha256(buffer.getvalue()).hexdigest())


class SmallLearner:
    """transformers' model and processor, a sender, and nothing that is tested elsewhere."""

    offers_adapter = falls_back = False

    def __init__(self, checkpoint: Path, num_receivers: int, *, timeout_s: float = TIMEOUTS.sync_phase.seconds) -> None:
        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.tokenizer = self.processor.tokenizer
        self.model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.start = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self._image_pad = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.canary_tolerance = 1e-4
        self.stop = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.banned = tuple(self.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]))
        self.sender: Sender = WeightSender(
            CheckpointWeights(self.model),
            transport="rollmatch_gloo",
            receivers=(ReceiverGroup(num_receivers),),
            timeout_s=timeout_s,
            bucket_bytes=1 << 20,
        )
        self._threads = ThreadPoolExecutor(1)
        self.version = 0

    def learn(self, seed: int) -> None:
        """New weights, a function of the seed: the checkpoint's plus noise that is large enough to change every greedy token."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.start[name] + 0.05 * torch.randn(parameter.shape, generator=generator))

    def scale_embeddings(self, factor: float) -> None:
        with torch.no_grad():
            self.model.get_input_embeddings().weight.mul_(factor)

    def prompt_ids(self) -> tuple[int, ...]:
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Detect every object in the image."}]}]
        return tuple(self.tokenizer(self.processor.apply_chat_template(messages, add_generation_prompt=True), add_special_tokens=False).input_ids)

    def request(self, position: int, *, temperature: float = 0.0, max_new_tokens: int = 16) -> RolloutRequest:
        decode = DecodeSettings(
            mode=DecodeMode.SAMPLE if temperature else DecodeMode.GREEDY,
            temperature=temperature,
            top_p=1.0,
            top_k=-1,
            repetition_penalty=1.0,
            max_new_tokens=max_new_tokens,
            num_beams=1,
            stop_token_ids=(self.stop,),
            banned_token_ids=self.banned,
            return_logprobs=True,
        )
        return RolloutRequest(1, position, f"sample-{position}", self.prompt_ids(), (noise_image(position),), decode, 1000 + position)

    def logits(self, token_ids: Sequence[int], image: ImageRef) -> tuple[tuple[int, ...], torch.Tensor]:
        """The expanded tokens and their logits [T, V]."""
        assert image.data is not None
        pixels = self.processor.image_processor(images=[on_white(Image.open(io.BytesIO(image.data)))], return_tensors="pt")
        num_pads = int(pixels["image_grid_thw"].prod()) // self.processor.image_processor.merge_size**2
        expanded = tuple(token for token_id in token_ids for token in ([token_id] * num_pads if token_id == self._image_pad else [token_id]))
        ids_1T = torch.tensor([expanded])
        with torch.no_grad():
            output = self.model(input_ids=ids_1T, mm_token_type_ids=(ids_1T == self._image_pad).int(), use_cache=False, **pixels)
        return expanded, output.logits[0]

    def greedy(self, request: RolloutRequest) -> tuple[tuple[int, ...], list[float]]:
        """The response without its stop token, and the log-probability of each token, by one forward per token."""
        token_ids, logprobs = list(request.prompt_token_ids), []
        for _ in range(request.decode.max_new_tokens):
            logits_V = self.logits(token_ids, request.images[0])[1][-1]
            logits_V[list(self.banned)] = -torch.inf
            best = int(logits_V.argmax())
            if best == self.stop:
                break
            token_ids.append(best)
            logprobs.append(float(logits_V.log_softmax(-1)[best]))
        return tuple(token_ids[len(request.prompt_token_ids) :]), logprobs

    def canary(self) -> CanaryProbe:
        image = noise_image(999)
        token_ids = (*self.prompt_ids(), *self.tokenizer('{"object_1": {', add_special_tokens=False).input_ids)
        expanded, logprobs = self._scores(token_ids, image)
        base_logprobs = None
        if isinstance(self.sender, AdapterSender):
            with without_adapter(self.model):
                base_logprobs = self._scores(token_ids, image)[1]
        return CanaryProbe(token_ids, (image,), expanded, logprobs, self.canary_tolerance, base_logprobs)

    def _scores(self, token_ids: Sequence[int], image: ImageRef) -> tuple[tuple[int, ...], tuple[float, ...]]:
        expanded, logits_TV = self.logits(token_ids, image)
        logprobs = logits_TV[:-1].log_softmax(-1).gather(1, torch.tensor(expanded[1:])[:, None])[:, 0]
        return expanded, tuple(logprobs.tolist())

    def offer_weights(self) -> WeightOffer:
        self.version += 1
        return self.sender.offer(self.version, ComputedCanary(self.canary()))

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]:
        return self._threads.submit(self.sender.send, offer)

    def sync_done(self, noise: Differences | None) -> None:
        pass

    def fall_back_to_full(self) -> None:
        raise AssertionError("nothing but full weights is offered")

    def close(self) -> None:
        self.sender.close()
        self._threads.shutdown()
