"""The rollouts of an evaluation on disk, whatever ended it (issue 5, "Datasets and evaluation")."""

import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

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
    with ResultsFile(tmp_path / "new" / "folder") as file:
        for rollout in range(3):
            file.append(finished(rollout=rollout))
            lines = [json.loads(line) for line in file.path.read_text().splitlines()]
            assert [line["rollout"] for line in lines] == list(range(rollout + 1))
    expected = {
        "example_id": 0,
        "completion": [{"role": "assistant", "content": "a"}],
        "reward": 1.0,
        "metrics": {"exact": 1.0},
    }
    assert {name: lines[0][name] for name in expected} == expected


def test_what_was_appended_is_read_back_as_it_was(tmp_path):
    rollout = finished(columns=["timing.total_ms", "trajectory", "nothing"])
    assert read_rollouts(written(tmp_path, rollout)) == [rollout]
    assert set(rollout.columns) == {"timing.total_ms", "trajectory"}
    state = rollout.state()
    expected = {
        "prompt": rollout.prompt,
        "completion": rollout.completion,
        "answer": "a",
        "info": {"kind": "letter"},
        "reward": 1.0,
        "metrics": {"exact": 1.0},
        "example_id": 0,
        "id": 0,
    }
    assert {name: state[name] for name in expected} == expected
    assert state["trajectory"][0]["tokens"]["completion_ids"]


def test_numbers_and_texts_that_json_has_no_form_for_are_kept(tmp_path):
    infinite, nan = (
        finished().model_copy(update={"metrics": {"exact": value}})
        for value in (math.inf, math.nan)
    )
    path = written(tmp_path, infinite, nan, finished(script=["half a pair \ud83d"]))
    first, second, third = read_rollouts(path)
    assert first.metrics["exact"] == math.inf
    assert math.isnan(second.metrics["exact"])
    assert third.completion[0]["content"] == "half a pair ?"


def test_the_last_line_of_a_rollout_that_was_made_again_holds(tmp_path):
    path = written(tmp_path, finished().model_copy(update={"error": "it failed"}), finished())
    with ResultsFile(tmp_path) as file:
        assert [rollout.error for rollout in file.rollouts.values()] == [None]
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("cut", [1, 2, 40, 400])
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
        (lambda line: line.replace('"reward":1.0', '"reward":"much"'), "reward"),
        (lambda line: line.replace('"task"', '"tusk"'), "task"),
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
    assert str(caught.value).endswith("delete this line, and its rollout is made again")
    assert path.read_bytes() == before
    # Mended by hand, it is read at once, while the error is still about.
    path.write_text("".join([lines[0], lines[2]]))
    with ResultsFile(tmp_path) as mended:
        assert sorted(mended.rollouts) == [(0, 0), (2, 0)]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.slow
def test_a_file_that_another_process_writes_is_refused(tmp_path):
    code = f"""
import sys
from pathlib import Path
from launch.tools.vf_eval.results_file import ResultsFile
with ResultsFile(Path({str(tmp_path)!r})):
    print("open", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[4],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(StorageError, match="another process is writing it"):
            ResultsFile(tmp_path)
        other.stdin.close()
    with ResultsFile(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError, match="taken"):
        ResultsFile(tmp_path / "taken" / "folder")


def test_the_tokens_of_a_rollout_are_those_of_all_its_calls_and_unknown_where_a_call_has_none():
    first = {"tokens": {"prompt_ids": [1, 2], "completion_ids": [3]}, "response": None}
    second = {"tokens": {"prompt_ids": [1, 2, 3, 4], "completion_ids": [5, 6]}, "response": None}
    uncounted = {"tokens": None, "response": Answer}
    assert count_tokens({"trajectory": [first, second]}) == (6, 3)
    assert count_tokens({"trajectory": [first, uncounted]}) == (None, None)


def test_the_digest_of_a_row_is_of_its_content_alone():
    class Opaque:
        pass

    assert digest({"a": 1, "b": Opaque()}) == digest({"b": Opaque(), "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})


def test_an_id_beside_an_example_id_is_kept():
    state = finished(id="x", example_id=7).state()
    assert (state["id"], state["example_id"]) == ("x", 7)
    assert (finished(example_id=7).state()["id"], finished().state()["id"]) == (7, 0)
