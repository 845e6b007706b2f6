"""A run in one process: `cluster=local`."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace

import pytest
import ray
import torch
from config_support import configuration, trajectory_config
from rich.console import Console

from launch.cli import as_schema_overrides
from launch.inspect.diff_runs import diff_runs
from launch.processes import cluster
from launch.processes.learner_client import LearnerClient
from launch.processes.local import ThreadRank
from launch.run_folder.resume import config_of_run
from launch.train import run
from learner.actor import Started
from learner.model.ranks import RankTopology
from rollout_actors.engine.completion import Completion, EngineInfo, StartTime
from rollout_actors.engine.sampling import encode_prompt
from shared.config.rollout import BACKENDS, BackendSpec, EngineLocation
from shared.errors import ConfigError
from shared.rollouts import SyncReport
from shared.run_files import read_lines
from shared.schedule import RunSchedule
from shared.tokens.pictures import pictures_of

LOCAL = {
    "cluster": {"kind": "local"},
    "rollout_matching__rollout_backend": "hf",
    "rollout_matching__max_new_tokens": 24,
    "global_max_length": 512,
    "training__max_steps": 4,
    "training__effective_batch_size": 4,
    "training__packing_window": 4,
    "stage2_ab__channel_b__rollouts_per_step": 4,
    "stage2_ab__channel_b__enable_pipeline": False,
    "stage2_ab__schedule__warmup_steps": 1,
    "stage2_ab__schedule__b_ratio": 1.0,
    "data__max_val_samples": 2,
    "evaluation__worst_scenes": 0,
    "learner__cpus": 0.25,
    "learner__cpu_threads": 1,
}


@pytest.fixture
def config_of(demo_checkpoint, demo_data):
    return lambda folder, **changes: configuration(
        demo_checkpoint, demo_data, folder, **LOCAL | changes
    )


@pytest.fixture
def environment_of(demo_lm):
    """Of an environment: rounds of two examples, with four rollouts of two turns each."""
    changes = {
        "cluster": {"kind": "local"},
        "rollout_matching__rollout_backend": "hf",
        "rollout_matching__decode_batch_size": 8,
        "global_max_length": 512,
        "training__max_steps": 4,
        "training__effective_batch_size": 16,
        "environment__num_eval_examples": 6,
        "environment__refill_rounds": 1,
        "learner__cpus": 0.25,
    }
    return lambda folder, **more: trajectory_config(demo_lm, folder, queue=False, **changes | more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["config_of", "environment_of"])
def test_a_run_without_ray_that_is_interrupted_goes_on_to_the_same_end(
    request, tmp_path, monkeypatch, kind
):
    config_of = request.getfixturevalue(kind)

    def train(folder, **changes):
        console = Console(record=True, width=400)
        run(config_of(folder, **changes), console)
        return console.export_text()

    had_ray = ray.is_initialized()
    had_threads = {*threading.enumerate()}
    told = train(tmp_path / "whole")
    assert re.search(r"^start +the learner .*engine, .*this process: ", told, re.MULTILINE)
    generate = ThreadRank.ask_kept

    def interrupted(self, *arguments):
        references = generate(self, *arguments)
        if self.rank.learner.num_updates == 2:
            raise KeyboardInterrupt  # to the main thread, while the engine generates
        return references

    monkeypatch.setattr(ThreadRank, "ask_kept", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts")
    monkeypatch.undo()
    assert (tmp_path / "parts" / "checkpoint_interrupted_000002").is_dir()
    train(tmp_path / "parts", resume={"run": "auto"})
    lines, parts = diff_runs(tmp_path / "whole", tmp_path / "parts")
    assert not parts, lines
    assert lines[-1] == "equal     4 steps, to the bit"
    assert ray.is_initialized() == had_ray  # of tests before this one
    if kind == "environment_of":
        for line in read_lines(tmp_path / "whole" / "metrics.jsonl"):
            assert line["rollout/turns"] == 2.0
            assert line["rollout/logprob_max_abs"] < 1e-4
    left = {*threading.enumerate()} - had_threads
    assert not [thread for thread in left if thread.name == "environment"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {
                "rollout_matching__rollout_backend": "vllm",
                "rollout_matching__vllm": {"mode": "actors"},
            },
            r"the engines of vllm\.mode actors have their own processes; set .*hf or .*colocate",
        ),
        ({"learner__world_size": 2}, r"learner\.world_size is 2; set it to 1"),
        (
            {"cluster": {"kind": "local", "address": "127.0.0.1:6379"}},
            r"cluster\.address is set; unset it, or set cluster\.kind: ray",
        ),
    ],
)
def test_what_needs_several_processes_is_refused(config_of, tmp_path, changes, problem):
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, **changes)
    found = [line for line in caught.value.problems if line.startswith("cluster.kind: ")]
    assert len(found) == 1
    assert re.search(problem, found[0]), found


def test_the_kind_is_the_short_form_on_the_command_line():
    assert as_schema_overrides(["cluster=local", "cluster.dashboard=false"]) == [
        "++cluster.kind=local",
        "++cluster.dashboard=false",
    ]


@pytest.mark.slow
def test_a_rubric_that_scores_at_once_sees_the_whole_step_whatever_is_decoded_at_a_time(
    environment_of, tmp_path
):
    args = {"ranks": True}
    environment = {"id": "runner_environment", "args": args, "rollouts_per_example": 4}
    changes = {
        "environment": environment,
        "environment__num_eval_examples": 3,
        "environment__refill_rounds": 0,
        "training__max_steps": 2,
        "rollout_matching__decode_batch_size": 4,
    }
    run(environment_of(tmp_path / "run", **changes), Console(record=True))
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [step["reward/num_scored"] for step in steps] == [16.0, 16.0]
    (*_, last) = read_lines(tmp_path / "run" / "evaluations.jsonl")
    assert last["val/reward/num_scored"] == 3.0


class OneByOne:
    """A backend of a user's: greedy, one request at a time, without a cache."""

    def __init__(self, host):
        self.host = host
        self.pictures = pictures_of(host.processor)
        self.version = 0

    def generate(self, requests):
        return [self.answer(request) for request in requests]

    @torch.no_grad()
    def answer(self, request):
        origin = EngineInfo(self.host.name, self.version, None, StartTime.now())
        prompt, features = encode_prompt(request, self.pictures, actor=self.host.name)
        token_ids, logprobs = [], []
        while len(token_ids) < request.decode.max_new_tokens:
            ids = torch.tensor([[*prompt, *token_ids]])
            inputs = {"input_ids": ids, **features}
            if self.pictures.takes_modality:
                inputs["mm_token_type_ids"] = (ids == self.pictures.token_id).int()
            logits = self.host.model(**inputs).logits[0, -1]
            logits[list(request.decode.banned_token_ids)] = -torch.inf
            logprobs.append(float(logits.log_softmax(dim=0).max()))
            token_ids.append(int(logits.argmax()))
            if token_ids[-1] in request.decode.stop_token_ids:
                break
        answer = Completion.up_to_stop(prompt, token_ids, logprobs, request.decode)
        return answer.rollout(request, origin, StartTime.now().counter_s)

    def receive_weights(self, offer):
        self.version = offer.version
        return SyncReport(version=offer.version, bytes=0, phase_s={}, canary_max_abs=0.0)

    def close(self):
        pass


@pytest.fixture
def run_with(config_of, monkeypatch):
    """Run with a backend of a user's."""

    def run_with(kind, folder, **changes):
        spec = BackendSpec(
            EngineLocation.RANKS, "one by one", has_beams=False, uses_vllm=False, shares_model=True
        )
        monkeypatch.setitem(BACKENDS, "one_by_one", spec)
        monkeypatch.setitem(cluster.IN_RANKS, "one_by_one", lambda *_: kind)
        config = config_of(folder, **changes)
        # The third line that a user writes: the value in the key's `Literal`.
        section = config.rollout_matching.model_copy(update={"rollout_backend": "one_by_one"})
        run(config.model_copy(update={"rollout_matching": section}), Console(record=True))

    return run_with


@pytest.mark.slow
def test_a_backend_that_a_user_registers_generates_for_a_run(config_of, run_with, tmp_path):
    changes = {"training__max_steps": 2, "rollout_matching__max_new_tokens": 8}
    run(config_of(tmp_path / "hf", **changes), Console(record=True))
    run_with(OneByOne, tmp_path / "own", **changes)
    (of_hf, own) = (
        [line["rollout"]["response_token_ids"] for line in read_lines(folder)]
        for folder in (tmp_path / name / "rollouts" / "step_000002.jsonl" for name in ("hf", "own"))
    )
    assert len(own) == 4
    assert own == of_hf


@pytest.mark.slow
def test_a_backend_knows_when_no_rollouts_will_be_asked_of_its_weights_any_more(run_with, tmp_path):
    """After the last round of a step, and neither between rounds nor in a held-out report."""
    events = []

    class Watched(OneByOne):
        def generate(self, requests):
            events.append((len(requests), self.host.updates_next))
            return super().generate(requests)

        def receive_weights(self, offer):
            events.append("sync")
            return super().receive_weights(offer)

    changes = {"rollout_matching__decode_batch_size": 3, "rollout_matching__max_new_tokens": 3}
    run_with(Watched, tmp_path / "run", training__max_steps=3, **changes)
    report = (2, False)
    step = [(2, False), (2, True)]
    assert events == ["sync", "sync", report, *step, "sync", *step, "sync", report]


@pytest.mark.parametrize(("refill_rounds", "expected"), [(0, [True, False]), (1, [False, False])])
def test_an_update_is_not_announced_where_rollouts_may_be_asked_for_again(
    environment_of, tmp_path, refill_rounds, expected
):
    begun = []

    class Rank:
        learner = SimpleNamespace(
            next_requests=lambda plan: [], refill_requests=lambda plan: [], close=int, stop=int
        )

        def start(self, *_):
            return Started(1, offers_adapter=False, findings=())

        def begin(self, requests, *, updates_next):
            begun.append(updates_next)
            return len(requests)

    config = environment_of(tmp_path, environment__refill_rounds=refill_rounds)
    ranks = ThreadRank()
    ranks.rank = Rank()
    learner = LearnerClient(ranks, None)
    learner.start(config, [RankTopology("inproc", ())], make_backend=OneByOne)
    plan = RunSchedule(config).plan(0)
    assert learner.next_requests(plan) == learner.refill_requests(plan) == [[]]
    assert begun == expected


@pytest.mark.slow
def test_a_run_of_one_epoch_draws_each_row_once_and_its_resume_finds_it_complete(
    tmp_path, config_of
):
    folder = tmp_path / "run"
    changes = {
        "training__max_steps": None,
        "training__num_epochs": 1,
        "training__effective_batch_size": 16,
        "training__lr_schedule": "linear",
        "stage2_ab__schedule__b_ratio": 0.0,
        "data__val": None,
    }

    def told(config):
        console = Console(record=True, width=400)
        run(config, console)
        return console.export_text()

    first = told(config_of(folder, **changes))
    assert re.search(r"^epochs +1 x 64 training rows are 4 steps$", first, re.MULTILINE)
    assert re.search(r"^updates +4 = 4 channel A", first, re.MULTILINE)
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    rates = [line["optim/learning_rate"] for line in lines]
    assert rates == pytest.approx([rates[0] * share for share in (1, 3 / 4, 2 / 4, 1 / 4)])
    ledger = [line for line in read_lines(folder / "ledger.jsonl") if "samples" in line]
    assert ledger[-1]["samples"][1] == 64
    for again in (config_of(folder, **changes, resume={"run": "auto"}), config_of_run(folder, [])):
        assert "after 4 of 4 steps" in told(again)
        assert "complete" in told(again)
