"""A learner of trajectories, step by step, with rollouts that no environment had to run (decisions
6, 7, 10, 13, 17 and 37, `policy_gradient`).
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
import torch
from config_support import GROUP, trajectory_config
from learner_support import finish_step, gradients_of_update, same, timeless, weights_of
from trajectory_support import EXAMPLES, SCRIPTED, begin, logprobs_of, make_learner, rollouts_for
from transformers import AutoModelForCausalLM

from launch.run_folder.steps import progress_line
from learner.rollout_logs.trajectories import trajectory_record
from learner.rollout_logs.writer import step_path
from shared.dataset import SampleStream
from shared.errors import RolloutError
from shared.rollouts import DecodeMode
from shared.schedule import RunSchedule
from shared.trajectory import ExampleCounts

pytestmark = pytest.mark.slow

ROLLOUTS = 3 * GROUP


@pytest.fixture
def config(demo_lm, tmp_path_factory):
    return lambda **changes: trajectory_config(demo_lm, tmp_path_factory.mktemp("run"), **changes)


def begun(config, step=0, examples=EXAMPLES, **how):
    """A fresh learner with a step begun, and the answers to it."""
    learner = make_learner(config, examples)
    return learner, begin(learner, RunSchedule(config).plan(step), **how)


STALE = {"rollout_matching__max_staleness": 1}


class Learned:
    """One step of a fresh learner: its report, the gradient of its update, divided and clipped, and
    the weights after it.

    Where staleness is allowed, the rollouts are of the version before.
    """

    def __init__(self, config, groups=None, rounds=None, **how):
        self.learner, answers = begun(config, **how)
        if config.rollout_matching.max_staleness:
            self.learner.publisher.done()
        self.answers = answers if groups is None else groups(answers)
        self.gradients = gradients_of_update(self.learner)
        for round_ in rounds or [range(len(self.answers))]:
            self.learner.accumulate([self.answers[place] for place in round_])
        self.report = finish_step(self.learner)
        self.metrics = self.report.metrics
        self.weights = weights_of(self.learner)

    @property
    def timeless(self):
        return timeless(self.metrics)


def of_rollouts(change):
    """A change of every group, given one of a rollout."""
    return lambda groups: [tuple(map(change, group)) for group in groups]


def only(position, **changes):
    """Of one rollout."""
    return of_rollouts(
        lambda rollout: replace(rollout, **changes) if rollout.position == position else rollout
    )


def of_examples(position, change):
    """A change of every example of one rollout."""
    return of_rollouts(
        lambda rollout: (
            replace(rollout, examples=tuple(change(example) for example in rollout.examples))
            if rollout.position == position
            else rollout
        )
    )


def assert_same_update(one, other, atol=1e-6):
    assert one.gradients.keys() == other.gradients.keys()
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(other.gradients[name], gradient, rtol=0, atol=atol)
    assert other.metrics["loss/total"] == pytest.approx(one.metrics["loss/total"], abs=1e-6)


# Loss and gradient


def slowly(model, answers, config, num_samples):
    """Decision 37, token by token: the loss is `-A min(ratio, ratio_cap)` or that of the clip.

    Its gradient is that of `log p` times `-A min(ratio, ratio_cap)`. Means are over calls or
    rollouts, and the sum of a step is divided by its rollouts.
    """
    rule = config.rollout_matching.pipeline.objective[0].config
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = 0
    for group in answers:
        rewards = [rollout.reward for rollout in group if rollout.error is None]
        for rollout, example in ((one, example) for one in group for example in one.examples):
            advantage = rollout.reward - fmean(rewards)
            if rule.advantage_std:
                advantage /= stdev(rewards) + rule.advantage_epsilon
            of_reward = advantage
            logits = model(input_ids=torch.tensor([example.token_ids])).logits[0]
            learner = logits.double().log_softmax(-1)
            number = {
                "rollout": sum(sum(one.mask) for one in rollout.examples),
                "constant": config.rollout_matching.max_new_tokens,
                "batch": 1,
            }
            num_tokens += sum(example.mask)
            begin = 0
            for end in example.step_ends or (len(example.token_ids),):
                number["step"] = sum(example.mask[begin:end])
                for at in (at for at in range(begin, end) if example.mask[at]):
                    logprob = learner[at - 1, example.token_ids[at]]
                    if (teacher := config.environment.teacher) is not None:
                        advantage = teacher.reward_weight * of_reward + teacher.weight * (
                            example.teacher_logprobs[at] - logprob.item()
                        )
                    ratio = min(math.exp(logprob.item() - example.logprobs[at]), 1e9)
                    if advantage > 0 and ratio > 1 + rule.clip_high:
                        term = -advantage * (1 + rule.clip_high)
                    elif advantage < 0 and ratio < 1 - rule.clip_low:
                        term = -advantage * (1 - rule.clip_low)
                    else:
                        truncated = min(ratio, rule.ratio_cap)
                        term = -advantage * truncated * (1 + logprob - logprob.item())
                    total = total + term / number[rule.normalize]
                begin = end
    return total / (num_tokens if rule.normalize == "batch" else num_samples)


@pytest.mark.parametrize("advantage_std", [False, True])
@pytest.mark.parametrize("normalize", ["step", "rollout", "constant", "batch"])
def test_loss_and_gradient_of_a_step_are_those_of_a_slow_obvious_computation(
    config, demo_lm, normalize, advantage_std
):
    settings = config(
        objective={"normalize": normalize, "advantage_std": advantage_std},
        training__max_grad_norm=None,
        **STALE,
    )
    step = Learned(settings, drift=2.0, fails={5})
    model = AutoModelForCausalLM.from_pretrained(demo_lm)
    loss = slowly(model, step.answers, settings, ROLLOUTS)
    loss.backward()
    assert (
        step.metrics["loss/total"]
        == step.metrics["loss/policy_gradient"]
        == pytest.approx(loss.item(), abs=1e-6)
    )
    assert 0.05 < step.metrics["policy/clipped_share"] < 0.9, (
        "the case needs tokens on both sides of the clip"
    )
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert step.gradients.keys() == gradients.keys()
    assert step.metrics["optim/grad_norm"] > 0.1
    for name, gradient in gradients.items():
        torch.testing.assert_close(step.gradients[name], gradient, rtol=0, atol=2e-6)


def test_a_step_does_not_depend_on_how_it_was_cut_into_rounds(config):
    whole = Learned(config())
    for rounds in ([[0], [1], [2]], [[0, 1], [2]], [[0], [1, 2]]):
        cut = Learned(config(), rounds=rounds)
        assert cut.timeless == whole.timeless
        assert same(cut.weights, whole.weights)


@pytest.mark.parametrize(
    "changes",
    [
        {"training__packing": False},
        {"training__packing_window": 1},
        {"training__packing_window": 100},
        {"global_max_length": 400},
        # Fewer than the segments of the step: a row is taken where it is full.
        {"training__packing_buffer": 3, "training__packing_window": 100},
        {"training__packing_buffer": 1},
    ],
    ids=str,
)
def test_a_step_does_not_depend_on_packing_and_rows(config, changes):
    one, other = Learned(config()), Learned(config(**changes))
    assert one.metrics["packing/num_segments"] == other.metrics["packing/num_segments"] == 16
    assert_same_update(one, other)
    counted = [
        name for name in one.metrics if name.startswith(("rollout/num", "reward/", "policy/"))
    ]
    assert {name: other.metrics[name] for name in counted} == pytest.approx(
        {name: one.metrics[name] for name in counted}, abs=1e-5
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"global_max_length": 400},
        {"training__packing_window": 5, "training__packing_buffer": 2},
        {"model__gradient_checkpointing": True},
        {"model__adapter": {"kind": "lora", "rank": 4}},
        {"reference": {"estimator": "top", "top_tokens": 3}},
        {"objective": {"ratio_level": "call", "normalize": "batch"}},
        {"training__updates_per_batch": 2, "objective": {"normalize": "rollout"}},
    ],
    ids=str,
)
def test_shared_prompts_change_no_update_and_no_metric_but_those_of_rows(config, changes):
    apart = Learned(config(**changes))
    shared = Learned(config(training__share_prompts=True, **changes))
    assert_same_update(apart, shared)
    of_rows = {
        *("packing/num_rows", "packing/num_tokens", "packing/capacity", "packing/fill_ratio"),
        *("packing/num_underfilled_rows", "packing/underfilled_share"),
    }
    kept = [
        {name: value for name, value in one.timeless.items() if name not in of_rows}
        for one in (apart, shared)
    ]
    assert kept[1] == pytest.approx(kept[0], rel=1e-5, abs=1e-6)
    assert kept[0]["packing/num_learned_tokens"] > shared.metrics["packing/num_tokens"]
    assert shared.metrics["packing/num_tokens"] < 0.9 * apart.metrics["packing/num_tokens"]


def test_steps_that_share_prompts_have_equal_bits_whatever_their_rounds(config):
    settings = {"training__share_prompts": True, "learner__cpu_threads": 2}
    one, again, in_rounds = (
        Learned(config(**settings), rounds=rounds)
        for rounds in (None, None, [range(1), range(1, 3)])
    )
    for other in (again, in_rounds):
        assert other.metrics["packing/num_tokens"] == one.metrics["packing/num_tokens"]
        assert all(torch.equal(other.weights[name], one.weights[name]) for name in one.weights)


def test_the_start_checks_a_row_with_a_shared_prompt_if_the_run_has_such_rows(config, monkeypatch):
    asked = []
    check = lambda *_, shares_prompts: asked.append(shares_prompts) or 0.0  # noqa: E731
    monkeypatch.setattr("learner.learner.check_packed_rows", check)
    for share_prompts in (False, True):
        make_learner(config(training__share_prompts=share_prompts))
    assert asked == [False, True]


# Failed rollouts, groups without signal, steps without anything


def flat_in_the_middle(position):
    """The second of the three groups is all equal."""
    return 0.5 if position // GROUP == 1 else (0.0, 1.0, 0.25)[position % 3]


@pytest.mark.parametrize("normalize", ["step", "batch"])
def test_groups_whose_rewards_are_equal_are_left_out_which_changes_no_update_and_is_counted(
    config, normalize
):
    objective = {"normalize": normalize}
    dropping = config(objective=objective)
    keeping = config(environment__drop_equal_groups=False, objective=objective)
    kept = Learned(keeping, reward=flat_in_the_middle)
    left_out = Learned(dropping, reward=flat_in_the_middle)
    assert_same_update(kept, left_out)
    counts = (
        "rollout/num",
        "rollout/num_groups",
        "rollout/num_groups_without_signal",
        "rollout/num_left_out",
        "packing/num_segments",
    )
    assert [kept.metrics[name] for name in counts] == [12, 3, 1, 0, 16]
    assert [left_out.metrics[name] for name in counts] == [12, 3, 1, GROUP, 11]
    for step in (kept, left_out):
        assert step.metrics["rollout/no_signal_share"] == pytest.approx(1 / 3)
    assert left_out.metrics["rollout/reward"] == kept.metrics["rollout/reward"]
    assert [line["position"] for line in logged(dropping, 0)] == list(range(ROLLOUTS))


def test_with_a_teacher_the_loss_is_of_its_advantages_and_the_mean_log_ratio_is_logged(config):
    """Groups of equal rewards are learned too: the teacher tells their tokens apart."""

    def scored(groups):
        def one(example):
            ids = zip(example.token_ids, example.mask, strict=True)
            return replace(
                example, teacher_logprobs=[-(1 + token % 13) / 4 * mask for token, mask in ids]
            )

        return of_rollouts(
            lambda rollout: replace(rollout, examples=tuple(map(one, rollout.examples)))
        )(groups)

    teacher = {"base_url": "http://127.0.0.1:9", "model": "m", "weight": 0.5, "reward_weight": 2.0}
    settings = config(training__max_grad_norm=None, environment__teacher=teacher)
    equal = {"reward": lambda position: 0.5 if position < GROUP else position / 9}
    step = Learned(settings, groups=scored, **equal)
    model = AutoModelForCausalLM.from_pretrained(settings.model.path)
    loss = slowly(model, step.answers, settings, ROLLOUTS)
    loss.backward()
    assert step.metrics["loss/total"] == pytest.approx(loss.item(), abs=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad, rtol=0, atol=1e-6)
    ratios = [
        teacher - engine
        for group in step.answers
        for rollout in group
        for example in rollout.examples
        for teacher, engine, mask in zip(
            example.teacher_logprobs, example.logprobs, example.mask, strict=True
        )
        if mask
    ]
    assert step.metrics["policy/teacher_log_ratio"] == pytest.approx(fmean(ratios), abs=1e-6)
    alone = Learned(config(training__max_grad_norm=None), groups=scored, **equal)
    assert alone.metrics["loss/total"] != pytest.approx(loss.item(), abs=1e-3)


@pytest.mark.parametrize("normalize", ["rollout", "batch"])
def test_rollouts_that_were_cut_for_their_length_can_be_left_out_of_the_loss_and_are_counted(
    config, normalize
):
    """Their rewards stay in their groups' means; with `batch` their tokens count nowhere."""

    def cut(groups):
        long = {4: {"is_truncated": True}, 9: {"num_length_limited": 1}}
        change = of_rollouts(lambda one: replace(one, **long.get(one.position, {})))
        return change(groups)

    def settings(**changes):
        changes |= {"objective": {"normalize": normalize}, "training__max_grad_norm": None}
        return config(**changes)

    kept = Learned(settings(), groups=cut)
    assert kept.metrics["rollout/num_masked"] == 0
    masked = Learned(settings(environment__drop_truncated=True), groups=cut)
    assert masked.metrics["rollout/num_masked"] == 2
    assert masked.metrics["rollout/num"] == ROLLOUTS
    assert masked.metrics["rollout/reward"] == kept.metrics["rollout/reward"]
    assert masked.metrics["packing/num_segments"] < kept.metrics["packing/num_segments"]
    empty = [
        tuple(replace(one, examples=()) if one.position in (4, 9) else one for one in group)
        for group in masked.answers
    ]
    model = AutoModelForCausalLM.from_pretrained(settings().model.path)
    expected = slowly(model, empty, settings(), ROLLOUTS).item()
    assert masked.metrics["loss/total"] == pytest.approx(expected, abs=1e-6)
    assert kept.metrics["loss/total"] != pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "own",
    [{"advantage": 0.5}, {"token_advantages": [0.0, 0.5] * 20}],
    ids=["of the rollout", "of its tokens"],
)
def test_a_group_of_equal_rewards_to_which_a_rubric_gave_advantages_of_its_own_is_learned(
    config, own
):
    def with_own(example):
        size = len(example.token_ids)
        values = {key: own[key][:size] if "token" in key else own[key] for key in own}
        return replace(example, token_is_relative=[0] * size, **values)

    kept, dropping = (
        Learned(
            config(environment__drop_equal_groups=drops),
            groups=of_examples(5, with_own),
            reward=flat_in_the_middle,
        )
        for drops in (False, True)
    )
    without = Learned(config(), reward=flat_in_the_middle).metrics["loss/total"]
    assert dropping.timeless == kept.timeless
    assert dropping.metrics["rollout/num_left_out"] == 0
    assert dropping.metrics["loss/total"] != pytest.approx(without, abs=1e-4)


@pytest.mark.parametrize(("drops", "is_changed"), [(None, False), (False, True)])
def test_moments_change_the_weights_in_a_step_without_signal_only_if_it_is_learned(
    config, drops, is_changed
):
    settings = config(environment__drop_equal_groups=drops)
    first = Learned(settings)
    learner = first.learner
    learner.publisher.done()
    plan = RunSchedule(settings).plan(1)
    learner.accumulate(begin(learner, plan, reward=lambda _: 0.5, version=1))
    assert finish_step(learner).metrics["optim/grad_norm"] == 0.0
    assert same(first.weights, weights_of(learner)) is not is_changed


@pytest.mark.parametrize("reason", ["nothing was sampled", "no group has a signal"])
def test_a_step_of_which_nothing_is_learned_is_an_update_by_zeros_with_metrics_and_a_progress_line(
    config, reason
):
    if reason == "nothing was sampled":
        nothing = {"num_tokens": 0, "num_splits": 0, "examples": (), "is_truncated": True}
        # Divided by the tokens that there are none of.
        settings = config(objective={"normalize": "batch"})
        step = Learned(settings, groups=of_rollouts(lambda rollout: replace(rollout, **nothing)))
    else:
        step = Learned(config(), reward=lambda _: 0.5)
    assert same(step.weights, weights_of(make_learner(config())))
    assert (step.learner.num_updates, step.metrics["optim/grad_norm"]) == (1, 0.0)
    for name in ("loss/total", "packing/num_rows", "packing/num_segments"):
        assert step.metrics[name] == 0
    line = progress_line(step.report, step.metrics | {"time/step_s": 1.0}, 3)
    assert line.startswith("step    1/3 B  loss  0.0000  rows 0  reward 0.5")
    assert "logp not compared" in line
    assert ("cut 1.00" in line) is (reason == "nothing was sampled")


def test_a_step_whose_rollouts_have_all_failed_ends_the_run_with_the_first_error(config):
    learner, groups = begun(config(), fails=range(ROLLOUTS))
    before = weights_of(learner)
    learner.accumulate(only(0, error="ValueError: temperature: 0.7 was asked for")(groups))
    message = (
        r"all 12 rollouts of step 1 failed, the one at position 0 with: ValueError: temperature:"
        r" 0\.7 was asked for; check the environment"
    )
    with pytest.raises(RolloutError, match=message) as caught:
        learner.finish_step()
    assert (caught.value.actor, caught.value.phase) == (SCRIPTED, "environment")
    assert learner.num_updates == 0
    assert same(weights_of(learner), before)


# What contradicts the learner


def learned_of(config, change, **how):
    learner, groups = begun(config, **how)
    learner.accumulate(change(groups))
    learner.finish_step()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight_version": 7},
            r"generated with weight version 7, the learner has 0; a weight sync",
        ),
        ({"weight_version": None}, r"example \d+: the engine did not report its weight version"),
        ({"reward": math.nan}, r"score on .* the advantage nan; reward functions must"),
        (
            {"advantage": None, "group_rewards": ()},
            r"has no advantage, because its rollouts were not scored",
        ),
    ],
)
def test_an_example_that_nothing_can_be_learned_from_ends_the_run(config, changes, message):
    with pytest.raises(RolloutError, match=message) as caught:
        learned_of(config(), of_examples(3, lambda example: replace(example, **changes)))
    assert caught.value.actor == SCRIPTED


def test_log_probabilities_are_those_of_the_temperature_that_the_run_samples_at(config):
    """An engine at temperature 0.7 gives `log_softmax(z / 0.7)`."""
    settings = config(rollout_matching__decoding={"temperature": 0.7})
    learner = make_learner(settings)

    def cooled(**inputs):
        return SimpleNamespace(logits=learner.loaded.model(**inputs).logits / 0.7)

    learner.accumulate(begin(learner, RunSchedule(settings).plan(0), model=cooled))
    metrics = finish_step(learner).metrics
    assert metrics["rollout/num_compared_tokens"] == metrics["rollout/num_tokens"]
    assert metrics["policy/logprob_difference"] < 1e-5
    with pytest.raises(RolloutError, match=r"log-probability .* engine .* learner"):
        learned_of(settings, lambda groups: groups)


@pytest.mark.parametrize("reward", [math.nan, -math.inf])
def test_a_reward_that_is_no_number_ends_the_run(config, reward):
    message = rf"score on {SCRIPTED}: example \d+, position 6: the reward is {reward}; a rubric"
    with pytest.raises(RolloutError, match=message):
        learned_of(config(), lambda groups: groups, reward=lambda at: reward if at == 6 else 0.5)


# Staleness (decision 13)


def stale_steps(config):
    """Two: the second's first round is generated with the weights from before the first's
    update."""
    learner, schedule = make_learner(config), RunSchedule(config)
    first = begin(learner, schedule.plan(0))
    learner.accumulate(first[:2])
    second_requests = learner.next_requests(schedule.plan(1))
    early = rollouts_for(learner, second_requests[:1], version=0)
    learner.accumulate(first[2:])
    reports = [finish_step(learner)]
    learner.publisher.done()
    learner.accumulate(early)
    learner.accumulate(rollouts_for(learner, second_requests[1:], version=1))
    return learner, [*reports, finish_step(learner)]


def test_stale_rollouts_are_learned_counted_and_logged_with_their_step_and_are_not_compared(config):
    settings = config(**STALE)
    learner, (first, second) = stale_steps(settings)
    compared = [step.metrics["rollout/num_compared_tokens"] for step in (first, second)]
    assert (first.metrics["rollout/staleness"], first.metrics["rollout/staleness_max"]) == (0.0, 0)
    assert second.metrics["rollout/staleness"] == pytest.approx(1 / 3)
    assert second.metrics["rollout/staleness_max"] == 1
    assert second.metrics["packing/num_segments"] == 16
    assert compared[1] < compared[0]
    assert learner.num_updates == 2
    for step in (0, 1):
        lines = [(line["step"], line["position"]) for line in logged(settings, step)]
        assert lines == [(step + 1, position) for position in range(ROLLOUTS)]


# Requests


def test_a_step_asks_for_whole_groups_whose_rollouts_are_adjacent_and_draws_the_rows_in_the_seeded_order(
    config,
):
    settings = config()
    learner = make_learner(settings)
    stream = SampleStream(EXAMPLES.train, seed=settings.training.seed, shuffle=True)
    for plan in list(RunSchedule(settings).plans())[:3]:
        asked = learner.next_requests(plan)
        learner.accumulate(rollouts_for(learner, asked, version=0, drift=0.0))
        learner.finish_step()
        groups = [group for request in asked for group in request.groups]
        positions = [position for group in groups for position in group.positions]
        assert [group.example for group in groups] == stream.take(3)
        assert positions == list(range(ROLLOUTS))
        assert {len(group.positions) for group in groups} == {GROUP}
        for request in asked:
            decode = request.decode
            assert (request.step, request.run_seed) == (plan.step, settings.training.seed)
            assert not request.is_held_out
            assert (decode.mode, decode.temperature) == (DecodeMode.SAMPLE, 1.0)
            assert decode.return_logprobs


@pytest.mark.parametrize("number", [1, 4, 9])
def test_the_held_out_requests_cover_every_held_out_example_once_greedily(config, number):
    learner = make_learner(config(), ExampleCounts(train=20, held_out=number))
    requests = learner.algorithm.held_out_requests(2)
    groups = [group for request in requests for group in request.groups]
    assert [group.example for group in groups] == list(range(number))
    assert [list(group.positions) for group in groups] == [[index] for index in range(number)]
    assert max(len(request.groups) for request in requests) <= GROUP
    for request in requests:
        assert (request.step, request.is_held_out) == (2, True)
        assert (request.decode.mode, request.decode.temperature) == (DecodeMode.GREEDY, 0.0)


# What is written down


def logged(config, step):
    path = step_path(config.telemetry.run_dir / "rollouts", step + 1)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_rollout_is_a_line_with_its_tokens_rewards_and_messages(config):
    settings = config()
    step = Learned(settings, fails={2})
    rollouts = [rollout for group in step.answers for rollout in group]
    lines = logged(settings, 0)
    assert lines == [json.loads(json.dumps(trajectory_record(1, one))) for one in rollouts]
    assert [len(line["examples"]) > 0 for line in lines] == [one.error is None for one in rollouts]


def test_the_timeline_has_a_span_for_each_environment_actor_of_a_round(config):
    """Of two actors, whose rollouts began at 100 s + position and took half a second."""
    by_two = of_rollouts(
        lambda rollout: replace(rollout, actor=f"environment-{rollout.position // 8}")
    )
    step = Learned(config(), groups=by_two)
    spans = [span for span in step.report.spans if span.name == "rollouts"]
    assert [
        (
            span.track,
            span.start_s,
            span.end_s,
            span.args["first_position"],
            span.args["last_position"],
        )
        for span in spans
    ] == [("environment-0", 100.0, 107.5, 0, 7), ("environment-1", 108.0, 111.5, 8, 11)]
    assert sum(span.args["tokens"] for span in spans) == step.metrics["rollout/num_tokens"]
    assert step.metrics["time/generate_s"] == 11.5


# Weights


def test_a_sync_is_proved_by_a_sequence_that_stays_the_same(config):
    """From all over the vocabulary: tokens that no example of the environment has are proved
    too."""
    learner = make_learner(config())
    probe = learner.publisher.offer().canary
    logprobs = learner.publisher.canary.logprobs()
    assert probe.token_ids == probe.expanded_token_ids
    assert set(probe.token_ids) == set(range(len(learner.loaded.tokenizer)))
    expected = logprobs_of(learner.loaded.model, probe.token_ids)[1:]
    assert logprobs == pytest.approx(expected, abs=1e-5)
    learner.publisher.done()
    assert learner.publisher.version == 1
    learner.accumulate(begin(learner, RunSchedule(config()).plan(0), version=1))
    learner.finish_step()
    assert learner.publisher.offer().canary.token_ids == probe.token_ids
    assert learner.publisher.canary.logprobs() != pytest.approx(logprobs, abs=1e-4)


def test_a_failed_rollout_teaches_nothing_and_counts_in_the_denominator(config):
    """The others of its group are as they would be without it."""
    settings = config(training__max_grad_norm=None)
    failed = Learned(settings, fails={4})
    rewards = [one.reward for group in failed.answers for one in group if one.error is None]
    assert failed.metrics["rollout/num_failed"] == 1
    assert failed.metrics["rollout/num"] == ROLLOUTS
    assert failed.metrics["rollout/reward"] == pytest.approx(fmean(rewards))
    assert failed.answers[1][0].examples == ()
    sound = [group if index != 1 else group[1:] for index, group in enumerate(failed.answers)]
    model = AutoModelForCausalLM.from_pretrained(settings.model.path)
    expected = slowly(model, sound, settings, ROLLOUTS).item()
    assert failed.metrics["loss/total"] == pytest.approx(expected, abs=1e-6)


def test_a_rollout_that_no_teacher_has_scored_ends_a_run_that_has_one(config):
    teacher = {"base_url": "http://127.0.0.1:9", "model": "m"}
    with pytest.raises(RolloutError, match=r"no teacher .*environment\.teacher"):
        Learned(config(environment__teacher=teacher))


def test_a_held_out_reward_that_is_no_number_ends_the_run(config):
    learner, groups = begun(config())
    with pytest.raises(RolloutError, match=r"position 6: the reward is nan"):
        learner.algorithm.score(only(6, reward=math.nan)(groups))
