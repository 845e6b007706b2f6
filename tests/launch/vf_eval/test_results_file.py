"""The rollouts of an evaluation on disk, whatever ended it (issue 5, "Datasets and evaluation")."""

import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_client import Answer, ScriptedClient

from launch.vf_eval.results_file import (
    NAME,
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
    """A rollout as an evaluation has it."""

    def exact(completion, answer):
        return float(completion[-1]["content"] == answer)

    environment = SingleTurnEnv(dataset=[{**ROW, **fields}], rubric=Rubric([exact]))
    client = ScriptedClient(list(script), returns_tokens=True)
    results = environment.generate_sync([{**ROW, **fields}], client, "demo", use_tqdm=False)
    return FinishedRollout.from_state(
        results.state[0], example=example, rollout=rollout, row="0", state_columns=columns
    )


def test_a_rollout_is_a_line_of_json_as_soon_as_it_is_appended(tmp_path):
    with ResultsFile(tmp_path / "new" / "folder") as file:
        for rollout in range(3):
            file.append(finished(rollout=rollout))
            lines = [json.loads(line) for line in file.path.read_text().splitlines()]
            assert [line["rollout"] for line in lines] == list(range(rollout + 1))
    assert lines[0]["example_id"] == 0
    assert lines[0]["completion"] == [{"role": "assistant", "content": "a"}]
    assert lines[0]["reward"] == 1.0
    assert lines[0]["metrics"] == {"exact": 1.0}


def test_what_was_appended_is_read_back_as_it_was(tmp_path):
    one = finished(columns=["timing.total_ms", "trajectory", "nothing"])
    with ResultsFile(tmp_path) as file:
        file.append(one)
    assert read_rollouts(tmp_path / NAME) == [one]
    assert set(one.columns) == {"timing.total_ms", "trajectory"}
    state = one.state()
    assert (state["prompt"], state["completion"], state["answer"], state["info"]) == (
        one.prompt,
        one.completion,
        "a",
        {"kind": "letter"},
    )
    assert state["trajectory"][0]["tokens"]["completion_ids"]
    assert (state["reward"], state["metrics"], state["example_id"], state["id"]) == (
        1.0,
        {"exact": 1.0},
        0,
        0,
    )


def test_numbers_and_texts_that_json_has_no_form_for_are_kept(tmp_path):
    with ResultsFile(tmp_path) as file:
        for value in (math.inf, math.nan):
            file.append(finished().model_copy(update={"metrics": {"exact": value}}))
        file.append(finished(script=["half a pair \ud83d"]))
    first, second, third = read_rollouts(tmp_path / NAME)
    assert first.metrics["exact"] == math.inf
    assert math.isnan(second.metrics["exact"])
    assert third.completion[0]["content"] == "half a pair ?"


def test_the_last_line_of_a_rollout_that_was_made_again_holds(tmp_path):
    with ResultsFile(tmp_path) as file:
        file.append(finished().model_copy(update={"error": "it failed"}))
        file.append(finished())
    with ResultsFile(tmp_path) as file:
        assert file.rollouts[0, 0].error is None
        assert len(file.rollouts) == 1
    assert len((tmp_path / NAME).read_text().splitlines()) == 2


@pytest.mark.parametrize("cut", [1, 2, 40, 400])
def test_a_torn_last_line_is_mended(tmp_path, cut):
    with ResultsFile(tmp_path) as file:
        for rollout in range(2):
            file.append(finished(rollout=rollout))
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-cut])
    with ResultsFile(tmp_path) as file:
        # Where only the newline is missing, nothing is lost.
        assert file.was_torn == (cut > 1)
        assert len(file.rollouts) == (1 if cut > 1 else 2)
        file.append(finished(rollout=1))
    assert [one.rollout for one in read_rollouts(file.path)] == ([0, 1] if cut > 1 else [0, 1, 1])


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
    with ResultsFile(tmp_path) as file:
        for example in range(3):
            file.append(finished(example=example))
    lines = file.path.read_text().splitlines(keepends=True)
    file.path.write_text("".join([lines[0], spoil(lines[1]), lines[2]]))
    before = file.path.read_bytes()
    with pytest.raises(RecordError) as caught:
        ResultsFile(tmp_path)
    assert (caught.value.file, caught.value.line, caught.value.field) == (str(file.path), 2, field)
    assert str(caught.value).endswith("delete this line, and its rollout is made again")
    assert file.path.read_bytes() == before
    # Mended by hand, it is read at once, while the error is still about.
    file.path.write_text("".join([lines[0], lines[2]]))
    with ResultsFile(tmp_path) as mended:
        assert sorted(mended.rollouts) == [(0, 0), (2, 0)]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.slow
def test_a_file_that_another_process_writes_is_refused(tmp_path):
    code = f"""
import sys
from pathlib import Path
from launch.vf_eval.results_file import ResultsFile
with ResultsFile(Path({str(tmp_path)!r})):
    print("open", flush=True)
    sys.stdin.read()
"""
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
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
    step = {"tokens": {"prompt_ids": [1, 2], "completion_ids": [3]}, "response": None}
    assert count_tokens(
        {
            "trajectory": [
                step,
                {
                    "tokens": {"prompt_ids": [1, 2, 3, 4], "completion_ids": [5, 6]},
                    "response": None,
                },
            ]
        }
    ) == (6, 3)
    counted = {"tokens": None, "response": Answer}
    assert count_tokens({"trajectory": [step, counted]}) == (None, None)


def test_the_digest_of_a_row_is_of_its_content_alone():
    class Opaque:
        pass

    assert digest({"a": 1, "b": Opaque()}) == digest({"b": Opaque(), "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})


def test_an_id_beside_an_example_id_is_kept():
    one = finished(id="x", example_id=7)
    assert (one.state()["id"], one.state()["example_id"]) == ("x", 7)
    assert (finished(example_id=7).state()["id"], finished().state()["id"]) == (7, 0)
