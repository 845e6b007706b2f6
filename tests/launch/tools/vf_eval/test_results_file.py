"""The rollouts of an evaluation on disk, whatever ended it (issue 5, "Datasets and evaluation")."""

import json
import math

import pytest
from scripted_client import Answer, ScriptedClient

from launch.tools.vf_eval.results_file import (
    FinishedRollout,
    ResultsFile,
    count_tokens,
    read_rollouts,
)
from rollout_actors.environments.datasets import digest
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.types import State
from shared.errors import RecordError, StorageError

ROW = {"question": "say a", "answer": "a", "info": {"kind": "letter"}}


def finished(example=0, rollout=0, columns=(), script=("a",), **fields):
    """Roll a row out, as an evaluation does."""

    def exact(completion, answer):
        return float(completion[-1]["content"] == answer)

    row = {**ROW, **fields}
    environment = SingleTurnEnv(dataset=[row], rubric=Rubric([exact]))
    client = ScriptedClient(list(script), returns_tokens=True)
    results = environment.generate_sync([row], client, "demo", use_tqdm=False)
    return FinishedRollout.from_state(
        results.state[0], example=example, rollout=rollout, row="0", state_columns=columns
    )


def written(folder, *rollouts):
    with ResultsFile(folder) as file:
        for rollout in rollouts:
            file.append(rollout)
    return file.path


def test_a_rollout_is_a_line_of_json_as_soon_as_it_is_appended(tmp_path):
    with ResultsFile(tmp_path) as file:
        for rollout in range(3):
            file.append(finished(rollout=rollout))
            lines = [json.loads(line) for line in file.path.read_text().splitlines()]
            assert [line["rollout"] for line in lines] == list(range(rollout + 1))
    assert lines[0]["state"]["completion"] == [{"role": "assistant", "content": "a"}]


def test_what_was_appended_is_read_back_as_it_was(tmp_path):
    rollout = finished(columns=["timing.total_ms", "trajectory", "nothing"], id="x", example_id=7)
    assert read_rollouts(written(tmp_path, rollout)) == [rollout]
    state = rollout.full_state()
    expected = {
        "answer": "a",
        "info": {"kind": "letter"},
        "reward": 1.0,
        "metrics": {"exact": 1.0},
        "example_id": 7,
        "id": "x",
    }
    assert {name: state[name] for name in expected} == expected
    assert state["trajectory"][0]["tokens"]["completion_ids"]
    assert "nothing" not in state
    assert finished(example_id=7).state["id"] == 7, "rows without an id have the example's"


def test_numbers_and_texts_that_json_has_no_form_for_are_kept(tmp_path):
    odd = finished(script=["half a pair \ud83d"])
    odd.state["metrics"] |= {"infinite": math.inf, "nan": math.nan}
    (read,) = read_rollouts(written(tmp_path, odd))
    assert read.state["metrics"]["infinite"] == math.inf
    assert math.isnan(read.state["metrics"]["nan"])
    assert read.state["completion"][0]["content"] == "half a pair ?"


def test_the_last_line_of_a_rollout_that_was_made_again_holds(tmp_path):
    failed = finished()
    failed.state["error"] = "it failed"
    path = written(tmp_path, failed, finished())
    with ResultsFile(tmp_path) as file:
        assert [rollout.error for rollout in file.rollouts.values()] == [None]
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("cut", [1, 40])
def test_a_last_line_without_its_end_is_removed(tmp_path, cut):
    path = written(tmp_path, finished(), finished(rollout=1))
    path.write_bytes(path.read_bytes()[:-cut])
    with ResultsFile(tmp_path) as file:
        assert file.was_torn
        assert len(file.rollouts) == 1
        file.append(finished(rollout=1))
    assert [rollout.rollout for rollout in read_rollouts(path)] == [0, 1]


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda line: line[:50] + "\n", "line"),
        (lambda line: "[]\n", "line"),
        (lambda line: line.replace('"rollout":0', '"rollout":-1'), "rollout"),
        (lambda line: line.replace('"reward":1.0', '"reward":"much"'), "state.reward"),
        (lambda line: line.replace('"task"', '"tusk"'), "state.task"),
    ],
)
def test_a_broken_line_elsewhere_is_refused_with_file_line_and_remedy(tmp_path, spoil, field):
    path = written(tmp_path, *(finished(example=example) for example in range(3)))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], spoil(lines[1]), lines[2]]))
    before = path.read_bytes()
    with pytest.raises(RecordError) as caught:
        ResultsFile(tmp_path)
    assert (caught.value.file, caught.value.line, caught.value.field) == (str(path), 2, field)
    assert str(caught.value).endswith("delete this line, and resume to repeat its rollout")
    assert path.read_bytes() == before


def test_a_file_that_another_process_writes_is_refused(tmp_path):
    # flock is of the open file: a second one in this process is refused as one elsewhere is
    with ResultsFile(tmp_path), pytest.raises(StorageError, match="another process is writing"):
        ResultsFile(tmp_path)
    with ResultsFile(tmp_path):
        pass


def test_the_tokens_of_a_rollout_are_those_of_all_its_calls_and_unknown_where_a_call_has_none():
    first = {"tokens": {"prompt_ids": [1, 2], "completion_ids": [3]}, "response": None}
    second = {"tokens": {"prompt_ids": [1, 2, 3, 4], "completion_ids": [5, 6]}, "response": None}
    uncounted = {"tokens": None, "response": Answer}
    assert count_tokens(State(trajectory=[first, second])) == (6, 3)
    assert count_tokens(State(trajectory=[first, uncounted])) == (None, None)


def test_the_digest_of_a_row_is_of_its_content_alone():
    class Opaque:
        pass

    assert digest({"a": 1, "b": Opaque()}) == digest({"b": Opaque(), "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})
