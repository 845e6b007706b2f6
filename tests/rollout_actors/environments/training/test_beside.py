"""An environment in a learner rank's process, before an engine there that answers by a script."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runner_environment
import torch
from sandboxes_environment import noted
from scripted_engines import (
    Says,
    ScriptedEngines,
    decode_settings,
    demo_tokenizer,
    group_requests,
    rollout_of,
)

from rollout_actors.backends.calls import EngineCalls
from rollout_actors.backends.process_isolation import random_state_kept
from rollout_actors.environments.training.beside import EnvironmentBackend, EnvironmentSpec
from rollout_actors.environments.training.runner import (
    EnvironmentRunner,
    RunnerSettings,
    SentRollouts,
    load_tokenizer,
)
from shared.errors import RolloutError
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.trajectory import EnvironmentRequest, ExampleGroup

TOKENIZER = demo_tokenizer()
MakeBackend = Callable[..., EnvironmentBackend]


def by_seed(request: RolloutRequest) -> Says:
    word = "x" * (request.seed % 4) + "o"
    return Says(TOKENIZER.encode(word, add_special_tokens=False), version=5)


class ScriptedBackend:
    """A `ServingBackend` whose answers follow from the seeds, as those of `ScriptedEngines`."""

    name = "learner"
    version = 0
    is_closed = False

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        """Positions of the calls that were answered together."""
        self.fails_at: int | None = None
        """The number of the batch at which the engine fails."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        raise AssertionError("environments ask call by call")

    def serve(self, calls: EngineCalls, begin: Callable[[], None]) -> None:
        with random_state_kept():
            begin()
            while batch := calls.take_together(lambda: None):
                if len(self.batches) == self.fails_at:
                    raise RolloutError("out of memory", actor="learner", phase="generate")
                self.batches.append([call.request.position for call in batch])
                calls.answer(
                    [(call, rollout_of(call.request, by_seed(call.request))) for call in batch]
                )

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        return SyncReport(offer.version, 10, {}, canary_max_abs=0.0)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def engine() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def make_backend(tokenizer_folder: Path, engine: ScriptedBackend) -> Iterator[MakeBackend]:
    made = []

    def make(env_id: str = "runner_environment", **changes: Any) -> EnvironmentBackend:
        settings = RunnerSettings(env_id, str(tokenizer_folder), 512, 64, **changes)
        made.append(EnvironmentSpec(lambda host: engine, settings)(engine))  # type: ignore[arg-type,return-value]
        return made[-1]

    runner_environment.CLEANED.clear()
    yield make
    for backend in made:
        backend.close()


def timeless(answers: Sequence[SentRollouts]) -> list[Any]:
    return [
        replace(rollout, started_s=0.0, generate_s=0.0) for answer in answers for rollout in answer
    ]


def requests() -> list[EnvironmentRequest]:
    decode = decode_settings(TOKENIZER, max_new_tokens=16)
    groups = [ExampleGroup(example, range(2 * example, 2 * example + 2)) for example in range(2)]
    return [EnvironmentRequest(3, (group,), decode, 7) for group in groups]


def test_rounds_are_what_a_runner_makes_of_them_over_engines_elsewhere(
    make_backend: MakeBackend, tokenizer_folder: Path
) -> None:
    settings = RunnerSettings("runner_environment", str(tokenizer_folder), 512, 64)
    tokenizer = load_tokenizer(settings.model_path)
    runner = EnvironmentRunner("learner", settings, ScriptedEngines(by_seed), tokenizer)
    backend = make_backend()
    for asked in (group_requests(4, 1, 2), group_requests(5, first=3)):
        expected = timeless(asyncio.run(runner.run(asked)))
        assert [replace(one, calls=()) for one in timeless(backend.generate(asked))] == [
            replace(one, calls=()) for one in expected
        ]
    assert backend.generate([]) == []


def test_each_turn_of_a_round_is_one_batch_however_long_a_rollout_is_at_work(
    make_backend: MakeBackend, engine: ScriptedBackend
) -> None:
    """One of them sleeps between its turns."""
    backend = make_backend(env_args={"trouble": "nap", "at": 1})
    backend.generate(group_requests(4, 1, 2))
    assert engine.batches == [list(range(6))] * 2


def test_an_engine_that_fails_ends_the_round_with_its_error_when_all_rollouts_have_cleaned_up(
    make_backend: MakeBackend, engine: ScriptedBackend
) -> None:
    backend = make_backend()
    engine.fails_at = 1
    with pytest.raises(RolloutError, match="generate on learner: out of memory"):
        backend.generate(requests())
    assert sorted(runner_environment.CLEANED) == [0, 1, 2, 3]
    engine.fails_at = None
    assert [one.error for one in timeless(backend.generate(requests()))] == [None] * 4


def test_what_an_environment_draws_goes_on_and_the_learner_draws_as_without_it(
    make_backend: MakeBackend, tmp_path: Path
) -> None:
    (tmp_path / "draws_at_random.py").write_text(
        "import random\n"
        "from rollout_actors.environments import Rubric, SingleTurnEnv\n"
        "def drawn(completion):\n"
        "    return random.random()\n"
        "def load_environment():\n"
        "    random.seed(3)\n"
        "    rows = [{'question': str(number)} for number in range(4)]\n"
        "    return SingleTurnEnv(dataset=rows, rubric=Rubric([drawn]))\n"
    )
    before = random.getstate(), torch.get_rng_state().tolist()
    backend = make_backend(str(tmp_path / "draws_at_random.py"))
    rewards = [one.reward for _ in range(2) for one in timeless(backend.generate(requests()))]
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    generator = random.Random(3)
    assert sorted(rewards) == sorted(generator.random() for _ in rewards)


def test_at_the_end_the_environment_is_torn_down_before_the_engine_whatever_it_raises(
    make_backend: MakeBackend, engine: ScriptedBackend, tmp_path: Path
) -> None:
    mark = tmp_path / "torn down"
    backend = make_backend(env_args={"trouble": "teardown", "mark": str(mark)})
    backend.close()
    assert mark.exists()
    assert engine.is_closed
    assert not backend._thread.is_alive()
    assert backend._loop.is_closed()
    backend.close()


def test_a_round_that_is_under_way_when_the_run_ends_cleans_up_first(
    make_backend: MakeBackend, engine: ScriptedBackend, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    backend = make_backend("sandboxes_environment", env_args={"log": str(log)})
    ended: list[BaseException] = []

    def play() -> None:
        try:
            backend.generate(requests())
        except RolloutError as error:
            ended.append(error)

    round_ = threading.Thread(target=play)
    round_.start()
    while len(noted(log)) < 4:
        assert round_.is_alive()
    backend.close()
    round_.join(60)
    assert "was closed" in str(ended[0])
    assert noted(log)[-1] == "torn down"
    assert len(noted(log)) == 9
    assert engine.is_closed


def test_an_environment_that_cannot_start_is_told_with_the_ranks_name_and_ends_the_engine(
    make_backend: MakeBackend, engine: ScriptedBackend
) -> None:
    with pytest.raises(RolloutError, match=r"start on learner: .*num_row"):
        make_backend(env_args={"num_row": 3})
    assert engine.is_closed


def test_a_teardown_that_hangs_is_told_and_the_engine_is_ended_all_the_same(
    make_backend: MakeBackend,
    engine: ScriptedBackend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from rollout_actors.environments.training import beside

    monkeypatch.setattr(beside, "CLOSED_S", 0.2)
    may_end = tmp_path / "may end"
    (tmp_path / "never_ends.py").write_text(
        "import asyncio, pathlib\n"
        "from rollout_actors.environments import Rubric, SingleTurnEnv, teardown\n"
        "class NeverEnds(SingleTurnEnv):\n"
        "    @teardown\n"
        "    async def hangs(self):\n"
        "        async with asyncio.timeout(240):\n"
        f"            while not pathlib.Path({str(may_end)!r}).exists():\n"
        "                await asyncio.sleep(0.01)\n"
        "def load_environment():\n"
        "    return NeverEnds(dataset=[{'question': '1'}], rubric=Rubric([]))\n"
    )
    backend = make_backend(str(tmp_path / "never_ends.py"))
    with caplog.at_level(logging.WARNING):
        backend.close()
    assert "was not torn down within 0.2 s" in caplog.text
    assert engine.is_closed
    may_end.touch()
    backend._thread.join(240)
    assert not backend._thread.is_alive(), "it ends with the teardown"
