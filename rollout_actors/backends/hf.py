"""transformers' `generate` on the learner's own model: no engine, no weights to send, and the slowest backend.

Shape legend: B sequences of one call, P prompt tokens (image placeholders expanded, padded on the left), R image patches, D patch values, I images.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from rollout_actors.answer import Answer, Origin, Started, cut_behind_stop
from rollout_actors.backends.hf_decoding import BeamScores, Chooser, LeavesOff
from rollout_actors.images import decode_images
from rollout_actors.random_state import random_state_kept
from rollout_actors.repeat_guard_hf import RepeatGuardProcessor
from rollout_actors.repeat_rule import repeat_rule
from shared.errors import RolloutError
from shared.protocols import BackendHost
from shared.repeat_guard import RepeatGuardSettings
from shared.rollouts import DecodeMode, DecodeSettings, Rollout, RolloutRequest, SyncReport, WeightOffer

NO_STOP_TOKEN = -1
"""Where a request has none: transformers would take the checkpoint's for want of any."""


@dataclass(frozen=True, slots=True)
class HFBackendSpec:
    """Makes an `HFBackend` in the learner's process."""

    decode_batch_size: int
    repeat_guard: RepeatGuardSettings | None = None

    def __call__(self, host: BackendHost) -> HFBackend:
        return HFBackend(host, host.name, decode_batch_size=self.decode_batch_size, repeat_guard=self.repeat_guard)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """One prompt as the model takes it."""

    token_ids: tuple[int, ...]
    """[P] without padding."""
    features: dict[str, torch.Tensor]
    """`pixel_values` [R, D] and `image_grid_thw` [I, 3]; empty without images."""


class HFBackend:
    """A `RolloutBackend` over the model of its host, which may carry an adapter, be in training mode and recompute its activations.

    A response depends on its request alone: on its seed, not on its neighbours or on any global random state. In fp32 the log-probabilities of a
    padded batch differ from those of a prompt alone by the rounding of the sums (under 1e-5).
    """

    def __init__(self, host: BackendHost, name: str, *, decode_batch_size: int, repeat_guard: RepeatGuardSettings | None = None) -> None:
        """At most `decode_batch_size` sequences are decoded at a time, each beam being one; the beams of one prompt are never separated."""
        self._host = host
        self._name = name
        self._decode_batch_size = decode_batch_size
        self._rule = repeat_rule(repeat_guard, lambda: host.processor.tokenizer)
        self._version = 0
        self._closed = False

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Leaves off between two tokens where the host raises."""
        if self._closed and requests:
            raise RolloutError("the backend was closed", actor=self._name, phase="generate")
        origin = Origin(self._name, self._version, self._rule, Started.now())
        rollouts: list[Rollout] = []
        with random_state_kept(), evaluating(self._host.model), torch.no_grad():
            for batch in self._batches(requests):
                encoded = [self._encode(request) for request in batch]
                answers = self._decode(batch, encoded)
                rollouts += [answer.rollout(request, origin, end) for request, (answer, end) in zip(batch, answers, strict=True)]
        return rollouts

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        """Nothing travels and nothing can differ: the weights are the learner's own."""
        self._version = offer.version
        return SyncReport(version=offer.version, bytes=0, phase_s={}, canary_max_abs=0.0)

    @property
    def version(self) -> int:
        return self._version

    def close(self) -> None:
        self._closed = True

    def _batches(self, requests: Sequence[RolloutRequest]) -> Iterator[list[RolloutRequest]]:
        for decode, group in groupby(requests, key=lambda request: request.decode):
            alike = list(group)
            width = decode.num_beams if decode.mode is DecodeMode.BEAM else 1
            size = self._decode_batch_size // width
            if not size:
                over = f"{width} beams do not fit into a batch of {self._decode_batch_size} sequences; lower num_beams, or raise decode_batch_size"
                raise RolloutError(over, actor=self._name, phase="generate")
            yield from (alike[start : start + size] for start in range(0, len(alike), size))

    def _encode(self, request: RolloutRequest) -> _Encoded:
        """Placeholders expanded as the processor does: to as many as the image has merged patches."""
        processor = self._host.processor
        images = decode_images(request.images, request.sample_id, actor=self._name)
        num_pads = request.prompt_token_ids.count(processor.image_token_id)
        if num_pads != len(images):
            raise RolloutError(f"sample {request.sample_id} has {len(images)} images and {num_pads} places for one", actor=self._name, phase="generate")
        if not images:
            return _Encoded(request.prompt_token_ids, {})
        features = processor.image_processor(images=images, return_tensors="pt")
        lengths = iter((features["image_grid_thw"].prod(dim=-1) // processor.image_processor.merge_size**2).tolist())
        token_ids: list[int] = []
        for token_id in request.prompt_token_ids:
            token_ids += [token_id] * (next(lengths) if token_id == processor.image_token_id else 1)
        return _Encoded(tuple(token_ids), {name: features[name] for name in ("pixel_values", "image_grid_thw")})

    def _decode(self, batch: list[RolloutRequest], encoded: list[_Encoded]) -> list[tuple[Answer, float]]:
        """Each answer with the time of its end, by `time.perf_counter`."""
        decode = batch[0].decode
        prompts = [prompt.token_ids for prompt in encoded]
        inputs = self._inputs(encoded)
        num_prompt_tokens = inputs["input_ids"].shape[1]
        if decode.mode is DecodeMode.BEAM:
            beams = BeamScores(decode, prompts)
            output = self._generate(inputs, decode, [*self._watching(decode, num_prompt_tokens), beams])
            end = time.perf_counter()
            # Behind a response there is padding, which no beam has chosen.
            rows = [cut_behind_stop(row, decode) for row in output.sequences[:, num_prompt_tokens:].tolist()]
            logprobs = [beams.logprobs(beam, row) for beam, row in zip(output.beam_indices.tolist(), rows, strict=True)]
            return [(Answer.up_to_stop(*of_row, decode), end) for of_row in zip(prompts, rows, logprobs, strict=True)]
        chooser = Chooser(decode, [request.seed for request in batch], prompts)
        output = self._generate(inputs, decode, [*self._watching(decode, num_prompt_tokens), chooser])
        rows = output.sequences[:, num_prompt_tokens:].tolist()
        answers = [Answer.up_to_stop(*of_row, decode) for of_row in zip(prompts, rows, chooser.logprobs(), strict=True)]
        return [(answer, chooser.times[len(answer.token_ids) - 1]) for answer in answers]

    def _watching(self, decode: DecodeSettings, num_prompt_tokens: int) -> list[LogitsProcessor]:
        """What may end a generation, or a response, before its time."""
        leaves_off = LeavesOff(self._host.require_going_on)
        if self._rule is None or not decode.stop_token_ids:
            return [leaves_off]  # without a stop token there is nothing to force
        return [leaves_off, RepeatGuardProcessor(self._rule, prompt_length=num_prompt_tokens, stop_token_id=decode.stop_token_ids[0])]

    def _inputs(self, encoded: list[_Encoded]) -> dict[str, torch.Tensor]:
        model, processor = self._host.model, self._host.processor
        length = max(len(prompt.token_ids) for prompt in encoded)
        ids_BP = torch.tensor([[processor.tokenizer.pad_token_id] * (length - len(prompt.token_ids)) + list(prompt.token_ids) for prompt in encoded])
        mask_BP = torch.tensor([[0] * (length - len(prompt.token_ids)) + [1] * len(prompt.token_ids) for prompt in encoded])
        inputs = {"input_ids": ids_BP, "attention_mask": mask_BP, "mm_token_type_ids": (ids_BP == processor.image_token_id).int()}
        with_images = [prompt.features for prompt in encoded if prompt.features]
        if with_images:
            inputs["pixel_values"] = torch.cat([features["pixel_values"] for features in with_images]).to(model.dtype)
            inputs["image_grid_thw"] = torch.cat([features["image_grid_thw"] for features in with_images])
        return {name: tensor.to(model.device) for name, tensor in inputs.items()}

    def _generate(self, inputs: dict[str, torch.Tensor], decode: DecodeSettings, processors: list[LogitsProcessor]) -> Any:
        # Everything that a checkpoint's generation_config.json may set is stated: what is left out would come from there.
        config = GenerationConfig(
            do_sample=False,
            num_beams=decode.num_beams if decode.mode is DecodeMode.BEAM else 1,
            num_return_sequences=1,
            max_new_tokens=decode.max_new_tokens,
            min_new_tokens=0,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            length_penalty=1.0,
            early_stopping=False,
            eos_token_id=list(decode.stop_token_ids) or [NO_STOP_TOKEN],
            pad_token_id=self._host.processor.tokenizer.pad_token_id,
            use_cache=True,
            return_dict_in_generate=True,
        )
        try:
            return self._host.model.generate(**inputs, generation_config=config, logits_processor=LogitsProcessorList(processors))
        except torch.OutOfMemoryError as error:
            room = f"{len(inputs['input_ids'])} sequences do not fit beside the learner's training state ({error}); lower rollout_matching.decode_batch_size"
            raise RolloutError(room, actor=self._name, phase="generate") from error


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards every module is in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
