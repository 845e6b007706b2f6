"""What the canary of a real model in bfloat16 notices, and what is below its noise (decision 38).

A small model learns a language, and then for fifty steps another dialect of it. The engine is the
same model computed in another precision or by another attention: the noise of bfloat16, without an
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from canary_noise import published_noise
from config_support import configuration
from learner_support import make_learner
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.learner import Learner
from learner.model.ranks import RankTopology
from shared.errors import WeightSyncError
from shared.weight_sync.canary import NOISE_FILE, CanaryProbe, Differences, Scores
from shared.weight_sync.transports import TransportKind

pytestmark = pytest.mark.slow

VOCABULARY, LENGTH = 128, 32
STEPS = 50
CONFIG = Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    max_position_embeddings=256,
)
Weights = dict[str, torch.Tensor]


class Language:
    """Every token has four successors, of which the first is the most frequent."""

    frequency = torch.tensor([0.6, 0.2, 0.15, 0.05])

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.successors = self.draw_tokens(VOCABULARY, 4)

    def draw_tokens(self, *shape: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, shape, generator=self.generator)

    def change(self) -> None:
        """Give a third of the tokens other successors."""
        others = self.draw_tokens(VOCABULARY, 4)
        changes = torch.rand(VOCABULARY, 1, generator=self.generator) < 0.3
        self.successors = torch.where(changes, others, self.successors)

    def sentences(self, count: int) -> torch.Tensor:
        """int64 [count, LENGTH]"""
        ids = self.draw_tokens(count, 1)
        while ids.shape[1] < LENGTH:
            which = torch.multinomial(
                self.frequency, count, replacement=True, generator=self.generator
            )
            ids = torch.cat([ids, self.successors[ids[:, -1], which][:, None]], dim=1)
        return ids


@dataclass(frozen=True)
class Trained:
    weights: dict[int, Weights]
    """In float32, by the number of steps in the second dialect."""
    ids_T: torch.Tensor
    """The probe: a sentence, and tokens that follow no rule."""


def train(learning_rate: float) -> Trained:
    """Learn the second dialect at this rate."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, language = Qwen3ForCausalLM(CONFIG), Language(1)

    def learn(steps: int, learning_rate: float) -> Iterator[Weights]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        for _ in range(steps):
            ids = language.sentences(8)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield {name: tensor.clone() for name, tensor in model.state_dict().items()}

    *_, first = learn(120, 3e-3)
    language.change()
    weights = {0: first} | dict(enumerate(learn(STEPS, learning_rate), 1))
    random = language.draw_tokens(16)
    torch.set_num_threads(threads)
    return Trained(weights, torch.cat([language.sentences(1)[0], random]))


@pytest.fixture(scope="module")
def trained() -> Trained:
    return train(3e-5)


Engine = Callable[[Qwen3ForCausalLM], object]


def by_another_attention(model: Qwen3ForCausalLM) -> None:
    model.set_attn_implementation("eager")


@pytest.fixture(params=[Qwen3ForCausalLM.float, by_another_attention], ids=["float32", "attention"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.param


def scores(
    trained: Trained,
    weights: Weights,
    engine: Engine | None,
    head: torch.Tensor | None = None,
    noise_T: np.ndarray | None = None,
) -> Scores:
    """Score the probe by weights that were rounded to bfloat16; None: as the learner does.

    `head` is one that is not the embedding any more. `noise_T` is added.
    """
    ids_T = trained.ids_T
    # Of its own, since the attention is a part of the configuration.
    model = Qwen3ForCausalLM(deepcopy(CONFIG))
    model.load_state_dict(weights)
    if head is not None:
        model.lm_head.weight = torch.nn.Parameter(head)
    model.to(torch.bfloat16)
    if engine is not None:
        engine(model)
    with torch.no_grad():
        logits_TV = model(input_ids=ids_T[None]).logits[0, :-1].float()
    logprobs = logits_TV.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0]
    if noise_T is not None:
        logprobs += torch.from_numpy(noise_T)
    return tuple(ids_T.tolist()), tuple(logprobs.tolist())


def probe_at(trained: Trained, step: int, noise: Differences | None = None) -> CanaryProbe:
    ids, expected = scores(trained, trained.weights[step], None)
    return CanaryProbe(ids, (), ids, expected, tolerance=None, noise=noise)


@pytest.fixture
def probe(trained: Trained, engine: Engine) -> CanaryProbe:
    """Of the last step, with the noise of version 0."""
    noise = probe_at(trained, 0).measure("actor", scores(trained, trained.weights[0], engine))
    assert noise is not None and 0 < noise.mean < 0.02
    return probe_at(trained, STEPS, noise)


def exchanged_layers(trained: Trained, step: int = STEPS) -> Weights:
    """Exchange the second and the third."""
    names = {".layers.1.": ".layers.2.", ".layers.2.": ".layers.1."}

    def taken_from(name: str) -> str:
        return next((name.replace(one, other) for one, other in names.items() if one in name), name)

    new = trained.weights[step]
    return {name: new[taken_from(name)] for name in new}


def a_share_left_out(trained: Trained) -> Weights:
    """Keep the first of two tensor-parallel workers' part of every split matrix old."""
    rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    found = {}
    for name, tensor in trained.weights[STEPS].items():
        old = trained.weights[0][name]
        found[name] = tensor.clone()
        if any(part in name for part in rows):
            found[name][: len(tensor) // 2] = old[: len(tensor) // 2]
        if any(part in name for part in ("o_proj", "down_proj")):
            found[name][:, : tensor.shape[1] // 2] = old[:, : tensor.shape[1] // 2]
    return found


def weights_fifty_steps_old(trained: Trained) -> Weights:
    """As of an actor that no sync has reached."""
    return trained.weights[0]


NOT_THE_LEARNERS = r"canary on actor: .*weights are not the learner's"


@pytest.mark.parametrize("fault", [exchanged_layers, a_share_left_out, weights_fifty_steps_old])
def test_a_fault_is_noticed_at_bfloat16s_noise(
    trained: Trained, engine: Engine, probe: CanaryProbe, fault: Callable[[Trained], Weights]
) -> None:
    with pytest.raises(WeightSyncError, match=NOT_THE_LEARNERS):
        probe.check("actor", *scores(trained, fault(trained), engine))


def test_a_stale_tied_head_is_noticed_at_bfloat16s_noise(
    trained: Trained, engine: Engine, probe: CanaryProbe
) -> None:
    head = trained.weights[0]["model.embed_tokens.weight"].clone()
    with pytest.raises(WeightSyncError, match=NOT_THE_LEARNERS):
        probe.check("actor", *scores(trained, trained.weights[STEPS], engine, head))


def test_exchanged_layers_are_noticed_though_the_noise_was_measured_with_them(
    trained: Trained, engine: Engine
) -> None:
    """As of an engine that loads the checkpoint wrongly, at the start and at every sync."""
    at_fault = scores(trained, exchanged_layers(trained, 0), engine)
    noise = probe_at(trained, 0).measure("actor", at_fault)
    with pytest.raises(WeightSyncError, match=NOT_THE_LEARNERS):
        probe_at(trained, 0, noise).check("actor", *at_fault)


@pytest.mark.parametrize("step", range(0, STEPS + 1, 10))
def test_the_learners_own_weights_agree_at_every_version(
    trained: Trained, engine: Engine, probe: CanaryProbe, step: int
) -> None:
    at_step = probe_at(trained, step, probe.noise)
    at_step.check("actor", *scores(trained, trained.weights[step], engine))


def test_weights_one_step_old_are_below_the_noise_and_for_checksums_and_versions_to_find(
    trained: Trained, engine: Engine, probe: CanaryProbe
) -> None:
    probe.check("actor", *scores(trained, trained.weights[STEPS - 1], engine))


# At the noise published for GPUs, which is ten times this machine's


@pytest.fixture(scope="module")
def trained_further() -> Trained:
    return train(3e-4)


@dataclass
class NoisyEngine:
    """An engine in bfloat16 of which the learner's version is `STEPS`, with noise of its own."""

    trained: Trained
    draws: np.random.Generator

    def probe(self, step: int = STEPS) -> CanaryProbe:
        """Return the canary of this version, with the noise measured at version 0."""
        noise = probe_at(self.trained, 0).measure("actor", self.scores(self.trained.weights[0]))
        assert noise is not None and noise.mean > 0.02
        return probe_at(self.trained, step, noise)

    def scores(self, weights: Weights, head: torch.Tensor | None = None) -> Scores:
        noise_T = published_noise(self.draws, len(self.trained.ids_T) - 1)
        return scores(self.trained, weights, by_another_attention, head, noise_T)

    def head(self, step: int) -> torch.Tensor:
        return self.trained.weights[step]["model.embed_tokens.weight"].clone()


@pytest.fixture(params=range(5))
def noisy(trained_further: Trained, request: pytest.FixtureRequest) -> NoisyEngine:
    return NoisyEngine(trained_further, np.random.default_rng(request.param))


def half_of_a_tensor_left_out(trained: Trained) -> Weights:
    """One of two workers' part of one matrix is memory that nothing was written to."""
    name = "model.layers.1.mlp.down_proj.weight"
    matrix = trained.weights[STEPS][name].clone()
    matrix[:, : matrix.shape[1] // 2] = 0.0
    return trained.weights[STEPS] | {name: matrix}


@pytest.mark.parametrize(
    "fault",
    [exchanged_layers, a_share_left_out, half_of_a_tensor_left_out, weights_fifty_steps_old],
)
def test_a_fault_is_noticed_at_the_noise_published_for_gpus(
    noisy: NoisyEngine, fault: Callable[[Trained], Weights]
) -> None:
    with pytest.raises(WeightSyncError, match=NOT_THE_LEARNERS):
        noisy.probe().check("actor", *noisy.scores(fault(noisy.trained)))


def test_a_head_that_no_sync_reaches_is_noticed_there_when_it_is_old_enough(
    noisy: NoisyEngine,
) -> None:
    """One step old it is below the noise. Every sync leaves it further behind."""
    newest = noisy.trained.weights
    noisy.probe(1).check("actor", *noisy.scores(newest[1], noisy.head(0)))
    with pytest.raises(WeightSyncError, match=NOT_THE_LEARNERS):
        noisy.probe().check("actor", *noisy.scores(newest[STEPS], noisy.head(0)))


def test_a_sound_engine_agrees_at_every_version_at_the_noise_published_for_gpus(
    noisy: NoisyEngine,
) -> None:
    for step in range(0, STEPS + 1, 10):
        weights = noisy.trained.weights[step]
        noisy.probe(step).check("actor", *noisy.scores(weights))


# The learner's half


def test_an_offer_says_which_tokens_stand_for_images_and_brings_the_noise_that_a_sync_measured(
    demo_checkpoint: Path, demo_data: Path, tmp_path: Path
) -> None:
    config = configuration(demo_checkpoint, demo_data, tmp_path, model__dtype="bfloat16")
    with closing(make_learner(config)) as learner:
        publisher = learner.publisher
        question = publisher.canary.question()
        assert question.placeholder_ids == (learner.loaded.model.config.image_token_id,)
        assert (question.tolerance, question.noise) == (None, None)
        measured = Differences(mean=0.004, largest=0.03)
        for noise in (measured, None):  # of all syncs, the first alone measures it
            publisher.done(noise)
            assert publisher.canary.question().noise == measured
    assert not (tmp_path / NOISE_FILE).exists(), "the learner shares no disk with who writes that"


@pytest.mark.parametrize(("backend", "scores"), [("hf", False), ("vllm", True)])
def test_the_learner_scores_the_canary_unless_the_engine_is_its_own_model(
    backend: str, scores: bool, demo_checkpoint: Path, demo_data: Path, tmp_path: Path
) -> None:
    """`vllm`: an engine in the same process, which has weights of its own."""
    changes = {
        "rollout_matching__rollout_backend": backend,
        "stage2_ab__channel_b__enable_pipeline": False,
    }
    config = configuration(demo_checkpoint, demo_data, tmp_path, **changes)
    with closing(Learner(config, RankTopology(TransportKind.INPROC, ()))) as learner:
        offer = learner.publisher.offer()
        assert offer is not None
        assert (offer.canary.expected_logprobs is not None) is scores
