"""The in-step queue (spec channel-b-pipeline: bounded producer/consumer queue of size 1)."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from launch.pipeline import one_ahead, one_at_a_time
from rollout_actors.backends.scripted import ScriptedBackend
from shared.rollouts import DecodeMode, DecodeSettings, RolloutRequest


class Recorder:
    """Submits rounds to one worker and remembers what happened in which order."""

    def __init__(self, seconds=0.0):
        self.events = []
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(max_workers=1)
        self._lock = threading.Lock()

    def submit(self, round_):
        self.note("submit", round_)
        return self._threads.submit(self._generate, round_)

    def _generate(self, round_):
        time.sleep(self._seconds)
        return f"done {round_}"

    def note(self, what, round_):
        with self._lock:
            self.events.append((what, round_))


def consume(queue, rounds, recorder):
    for index, result in enumerate(queue(recorder.submit, rounds)):
        assert result == f"done {rounds[index]}"
        recorder.note("learn", rounds[index])


def test_round_k_plus_1_is_submitted_before_round_k_is_learned():
    recorder = Recorder()
    consume(one_ahead, ["a", "b", "c"], recorder)
    assert recorder.events == [
        ("submit", "a"),
        ("submit", "b"),
        ("learn", "a"),
        ("submit", "c"),
        ("learn", "b"),
        ("learn", "c"),
    ]


def test_without_the_queue_generation_and_learning_alternate():
    recorder = Recorder()
    consume(one_at_a_time, ["a", "b"], recorder)
    assert recorder.events == [("submit", "a"), ("learn", "a"), ("submit", "b"), ("learn", "b")]


def test_the_queue_never_holds_two_rounds_in_production():
    in_production, most = [], 0

    def submit(round_):
        nonlocal most
        in_production.append(round_)
        most = max(most, len(in_production))

        class Handle:
            def result(self):
                in_production.remove(round_)
                return round_

        return Handle()

    assert list(one_ahead(submit, iter(range(5)))) == [0, 1, 2, 3, 4]
    assert most == 1


def test_a_step_of_a_scripted_backend_gives_the_same_rollouts_pipelined_and_alternating():
    backend = ScriptedBackend(
        "scripted", lambda request: [request.position, request.seed], latency_s=0.01
    )
    greedy = DecodeSettings(
        DecodeMode.GREEDY, 0.0, 1.0, -1, 1.0, 8, 1, (), (), return_logprobs=True
    )
    rounds = [
        [RolloutRequest(0, i, str(i), (1,), (), greedy, 100 + i) for i in range(start, start + 4)]
        for start in (0, 4, 8)
    ]
    with ThreadPoolExecutor(max_workers=1) as threads:
        answers = [
            [
                rollout.response_token_ids
                for done in queue(lambda round_: threads.submit(backend.generate, round_), rounds)
                for rollout in done
            ]
            for queue in (one_ahead, one_at_a_time)
        ]
    assert answers[0] == answers[1] == [(i, 100 + i) for i in range(12)]


def test_without_rounds_nobody_is_called():
    for queue in (one_ahead, one_at_a_time):
        assert list(queue(lambda round_: 1 / 0, [])) == []
