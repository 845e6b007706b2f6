"""The thin shell around a rank, without Ray."""

import ast
import inspect
from types import SimpleNamespace

from launch.runtime import learner_client
from learner.actor import LearnerActor
from learner.learner import Learner
from learner.weight_sync.publisher import WeightPublisher


def test_requests_leave_in_order_part_by_part():
    rank = LearnerActor()
    rank._learner = SimpleNamespace(
        next_requests=lambda plan: [f"{plan}{i}" for i in range(5)],
        held_out_requests=lambda step: [f"h{step}"],
    )
    assert rank.begin("next_requests", "p") == 5
    assert [rank.requests(0, 2).requests, rank.requests(2, 5).requests] == [
        ("p0", "p1"),
        ("p2", "p3", "p4"),
    ]
    assert rank.begin("held_out_requests", 7) == 1
    assert rank.requests(0, 1).requests == ("h7",)


def test_a_rank_calls_its_learner_and_parts_of_it_by_name():
    rank = LearnerActor()
    publisher = SimpleNamespace(send=lambda offer: f"sent {offer}")
    rank._learner = SimpleNamespace(score=sorted, publisher=publisher)
    assert rank.call("publisher.send", 3) == "sent 3"
    assert rank.call_on_rollouts("score", [3, 1], [2]) == [1, 2, 3]


def named_by_the_driver() -> set[str]:
    """Methods of the learner that the driver's end names: `mypy` does not see these."""
    names = set()
    for node in ast.walk(ast.parse(inspect.getsource(learner_client))):
        if isinstance(node, ast.Call):
            texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
            match ast.unparse(node.func):
                case "self._all":
                    names.add(texts[1])
                case "self._begin" | "self._on_rollouts":
                    names.add(texts[0])
                case func if func.endswith(".call.remote") and texts:
                    names.add(texts[0])
    return names


def test_every_method_that_the_driver_names_is_one_of_the_learners():
    names = named_by_the_driver()
    assert {"finish_step", "score", "next_requests", "publisher.send", "publisher.offer"} <= names
    for name in names:
        owner, _, method = name.rpartition(".")
        assert callable(getattr(WeightPublisher if owner else Learner, method))
