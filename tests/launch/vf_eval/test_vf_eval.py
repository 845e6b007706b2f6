"""`vf-eval` as a process, against an endpoint on this machine (issue 5, "Datasets and evaluation";
spec: orchestration, CLI integration).
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path

import datasets
import pytest
from fake_openai import FakeOpenAI
from fake_server import eventually, serving
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from scripted_client import ScriptedClient

from launch.vf_eval import __main__ as vf_eval
from launch.vf_eval.__main__ import main
from launch.vf_eval.arguments import read_options
from rollout_actors.environments.loading import load_environment
from shared.errors import ConfigError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
ENVIRONMENT = """
    from pathlib import Path

    from rollout_actors.environments.rubric import Rubric
    from rollout_actors.environments.multi_turn import SingleTurnEnv


    def load_environment(num=4, shift=0, log=None, compares=False):
        rows = [{"question": f"word {i + shift}", "answer": f"word {i + shift}", "info": {"number": i} if i % 2 else {"name": "even"}} for i in range(num)]

        def note(text):
            if log is not None:
                with Path(log).open("a") as file:
                    file.write(text + "\\n")

        class Echo(SingleTurnEnv):
            async def add_model_response(self, state, prompt_messages, response):
                await super().add_model_response(state, prompt_messages, response)
                state["letters"] = len(state["prompt"][-1]["content"])
                note("generated")

        def exact(completion, answer):
            note("scored")
            return float(completion[-1]["content"] == answer)

        def length(completion):
            return len(completion[-1]["content"])

        def best(states):
            note(f"compared {len(states)}")
            return [1.0] * len(states)

        return Echo(dataset=rows, rubric=Rubric([best] if compares else [exact, length], [1.0] if compares else [1.0, 0.0]))
"""


class Place:
    """A working directory with an environment in it."""

    def __init__(self, folder: Path, capsys, monkeypatch) -> None:
        self.folder, self._capsys, self._monkeypatch = folder, capsys, monkeypatch
        (folder / "echo_env.py").write_text(textwrap.dedent(ENVIRONMENT))
        monkeypatch.chdir(folder)
        for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
            monkeypatch.delenv(name, raising=False)

    def start(self, *arguments, **changes):
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "COLUMNS": "200",
        }
        command = [sys.executable, "-m", "launch.vf_eval", *map(str, arguments)]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **changes,
        )

    def process(self, *arguments, status=0, **changes):
        """The command, to its end, which must have this exit status."""
        started = self.start(*arguments, **changes)
        out, err = started.communicate(timeout=300)
        assert started.returncode == status, out + err
        assert "Traceback" not in err
        return subprocess.CompletedProcess(arguments, status, out, err)

    def run(self, *arguments, status=0):
        """The same in this process, which is quicker."""
        self._capsys.readouterr()
        ended = 0
        try:
            main(list(map(str, arguments)))
        except SystemExit as exit_:
            ended = exit_.code
        out, err = self._capsys.readouterr()
        assert ended == status, out + err
        assert "Traceback" not in err
        return subprocess.CompletedProcess(arguments, status, out, err)

    @property
    def evaluations(self):
        return sorted(path.parent for path in self.folder.glob("outputs/evals/*/*/evaluation.json"))

    @property
    def evaluation(self):
        [one] = self.evaluations
        return one

    @property
    def lines(self):
        return [
            json.loads(line)
            for line in (self.evaluation / "rollouts.jsonl").read_text().splitlines()
        ]


@pytest.fixture
def place(tmp_path, capsys, monkeypatch):
    return Place(tmp_path, capsys, monkeypatch)


@pytest.fixture
def endpoint():
    return FakeOpenAI()


@pytest.fixture
def url(endpoint):
    with serving(endpoint.app()) as base:
        yield f"{base}/v1"


def cell(output, name):
    """What a table's row says; the first, where a path below begins with the same word."""
    row = next(line for line in output.splitlines() if re.match(rf"\s*{re.escape(name)}\s\s", line))
    return row.split(maxsplit=len(name.split()))[len(name.split())].strip()


NO_EXAMPLES = json.dumps(
    {
        "environment": "e",
        "env_args": {},
        "model": None,
        "sampling_args": {},
        "base_url": None,
        "key_variable": None,
        "num_examples": 0,
        "rollouts_per_example": 1,
        "state_columns": [],
    }
).encode()


def columns_of(path):
    return datasets.Dataset.from_json(str(path)).features


# What it does


def test_an_evaluation_has_a_progress_bar_a_summary_table_and_a_results_file(place, endpoint, url):
    endpoint.reply = lambda text: "no" if text == "word 1" else text
    done = place.process("echo_env", "-m", "demo", "-b", url, "-n", "4", "-r", "2")
    assert "8/8" in done.stderr
    assert "rollout/s" in done.stderr
    # Means of the examples are 1, 0, 1, 1: their standard deviation is 0.5.
    assert cell(done.stdout, "reward").split() == ["0.7500", "0.2500", "0.0000", "1.0000"]
    assert cell(done.stdout, "exact").split()[0] == "0.7500"
    assert cell(done.stdout, "length").split()[0] == "5.0000"
    assert cell(done.stdout, "rollouts") == "8, of 4 examples"
    assert cell(done.stdout, "pass@1").startswith("0.7500")
    assert cell(done.stdout, "pass@2") == "0.7500"
    assert cell(done.stdout, "errors") == "0"
    assert cell(done.stdout, "truncated") == "0"
    assert cell(done.stdout, "tokens") == "80 read, 24 sampled; a rollout 10.0 and 3.0"
    assert re.fullmatch(r"\d+\.\d s", cell(done.stdout, "wall time"))
    assert sorted((line["example"], line["rollout"]) for line in place.lines) == [
        (e, r) for e in range(4) for r in range(2)
    ]
    assert {line["example_id"] for line in place.lines} == {0, 1, 2, 3}


def test_vf_eval_s_produces_identical_schema_via_env_make_dataset(
    place, endpoint, url, monkeypatch
):
    place.process(
        "echo_env", "-b", url, "-n", "4", "-r", "2", "-s", "-C", "timing.total_ms,letters,advantage"
    )
    environment = load_environment("echo_env.py")
    columns = ["timing.total_ms", "letters", "advantage"]
    results = environment.evaluate_sync(
        ScriptedClient(lambda call: call.text),
        "demo",
        num_examples=4,
        rollouts_per_example=2,
        use_tqdm=False,
    )
    made = environment.make_dataset(results, state_columns=columns)
    saved = datasets.Dataset.from_json(str(place.evaluation / "results.jsonl"))
    assert saved.column_names == made.column_names
    assert {
        "id",
        "example_id",
        "prompt",
        "completion",
        "answer",
        "task",
        "info",
        "reward",
        "exact",
        "length",
        *columns,
    } == set(made.column_names)
    assert [{**row, "timing.total_ms": 0, "task": ""} for row in made] == [
        {**json.loads(line), "timing.total_ms": 0, "task": ""}
        for line in (place.evaluation / "results.jsonl").read_text().splitlines()
    ]
    metadata = json.loads((place.evaluation / "metadata.json").read_text())
    assert (
        metadata["avg_reward"],
        metadata["num_examples"],
        metadata["rollouts_per_example"],
        metadata["model"],
    ) == (1.0, 4, 2, "demo")


def test_hub_pushes_use_the_same_dataset_as_files(place, endpoint, url, monkeypatch):
    pushed = {}
    monkeypatch.setattr(
        datasets.Dataset,
        "push_to_hub",
        lambda self, repo_id, **rest: pushed.update({repo_id: self}),
    )
    done = place.run(
        "echo_env.py", "-b", url, "-n", "2", "-r", "1", "-s", "-H", "-D", "me/echo", "-C", "letters"
    )
    assert list(pushed) == ["me/echo"]
    assert list(pushed["me/echo"]) == [
        json.loads(line) for line in (place.evaluation / "results.jsonl").read_text().splitlines()
    ]
    assert "me/echo" in done.stdout
    endpoint.key = "another"  # the endpoint is not asked where nothing is missing
    place.run("--resume", place.evaluation, "-H")
    assert list(pushed) == ["me/echo", "echo_env-results"]
    assert len(endpoint.bodies) == 2


def test_a_push_that_fails_says_why_and_the_rollouts_are_kept(place, endpoint, url, monkeypatch):
    def refuse(self, repo_id):
        raise OSError("401 who are you")

    monkeypatch.setattr(datasets.Dataset, "push_to_hub", refuse)
    done = place.run(
        "echo_env.py", "-b", url, "-n", "2", "-r", "1", "-H", "-D", "me/echo", status=1
    )
    said = done.stderr
    assert "401 who are you" in said
    assert "hf auth login" in said
    assert f"vf-eval --resume {place.evaluation.relative_to(place.folder)} -H -D me/echo" in said
    assert len(place.lines) == 2


def test_arguments_of_the_calls_are_sent_and_token_ids_only_where_told_to(place, endpoint, url):
    given = ["echo_env.py", "-b", url, "-n", "1", "-r", "1"]
    sampling = ["-t", "7", "-T", "0.5", "-S", '{"top_p": 0.9, "extra_body": {"top_k": 3}}']
    place.run(*given, *sampling)
    [body] = endpoint.bodies
    assert {key: body[key] for key in ("max_tokens", "temperature", "top_p", "top_k")} == {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
    }
    assert not {"logprobs", "return_token_ids", "return_tokens_as_token_ids"} & set(body)
    place.run(*given, *sampling, "--tokens", "-C", "trajectory", "-o", "others")
    assert endpoint.bodies[-1]["return_token_ids"] is True
    assert endpoint.bodies[-1]["top_k"] == 3
    [path] = (place.folder / "others").rglob("rollouts.jsonl")
    assert json.loads(path.read_text())["columns"]["trajectory"][0]["tokens"]["completion_ids"] == [
        3,
        4,
    ]


def test_generation_is_bounded_by_its_own_flag(place, endpoint, url):
    # However slow the process is, as many come together as may; one more would come in the time
    # after that.
    endpoint.delay_s, endpoint.meets = 0.1, 2
    place.run("echo_env.py", "-b", url, "-r", "3", "--max-concurrent-generation", "2")
    assert endpoint.most_under_way == 2
    endpoint.meets = 3
    place.run("echo_env.py", "-b", url, "-r", "3", "-c", "3")
    assert endpoint.most_under_way == 3


def test_a_rollout_that_is_not_done_at_its_limit_has_failed(place, endpoint, url):
    endpoint.delay_s = 60.0
    done = place.run(
        "echo_env.py", "-b", url, "-n", "1", "-r", "1", "--rollout-timeout", "1", status=1
    )
    error = "TimeoutError: not done after rollout_timeout_s = 1 s"
    assert error in done.stdout + done.stderr


HANGING = """
    import time
    from pathlib import Path

    from rollout_actors.environments.rubric import Rubric
    from rollout_actors.environments.multi_turn import SingleTurnEnv


    def load_environment():
        def slow(completion, answer):
            Path(f"begun_{answer}").touch()
            time.sleep(600 if answer == "hang" else 0)
            return 1.0

        return SingleTurnEnv(dataset=[{"question": one, "answer": one} for one in ("go", "hang")], rubric=Rubric([slow]))
"""


def test_a_plain_reward_function_that_is_not_done_at_its_limit_has_failed_and_keeps_nobody(
    place, url
):
    (place.folder / "hanging.py").write_text(textwrap.dedent(HANGING))
    done = place.process("hanging.py", "-b", url, "-r", "1", "--scoring-timeout", "1")
    error = (
        "1 x slow, not in its mean: TimeoutError: reward function slow is not done after"
        " scoring_timeout_s = 1 s"
    )
    assert cell(done.stdout, "reward errors").startswith(error)
    assert cell(done.stdout, "given up") == "1 x slow: plain functions that ran past a limit"
    assert "plain function slow was given up" in done.stderr


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_what_a_plain_function_keeps_and_both_say_what_is_true(
    place, url, sign
):
    (place.folder / "hanging.py").write_text(textwrap.dedent(HANGING))
    process = place.start("hanging.py", "-b", url, "-r", "1")
    deadline = time.monotonic() + 60
    while (
        not place.evaluations or len(place.lines) < 1 or not (place.folder / "begun_hang").exists()
    ):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(sign)
    first = ""
    while "again ends at once" not in first:
        first += (line := process.stderr.readline())
        assert line, first
    assert (
        "interrupted: waiting at most 300 s for rollouts to clean up, and at most 10 s for plain"
        " functions that run (slow)" in first
    )
    process.send_signal(sign)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert (
        "interrupted again: ended at once, and what had not cleaned up by now never will; cut off"
        " while they ran: slow" in err
    )
    assert "1 finished rollouts are kept in" in err
    assert "every process" not in err


def test_after_one_signal_a_plain_function_is_waited_for_and_then_cut_off(place, url, monkeypatch):
    monkeypatch.setattr(vf_eval, "PLAIN_S", 0.2)
    released = place.folder / "released"
    hangs = f"""answer == "hang" and os.kill(os.getpid(), signal.SIGINT)
            while answer == "hang" and not Path({str(released)!r}).exists():
                time.sleep(0.01)"""
    interrupts = HANGING.replace("import time", "import os, signal, time").replace(
        'time.sleep(600 if answer == "hang" else 0)', hangs
    )
    (place.folder / "interrupts.py").write_text(textwrap.dedent(interrupts))
    try:
        done = place.run("interrupts.py", "-b", url, "-r", "1", "-c", "1", status=130)
    finally:
        released.touch()
    assert "cut off while they ran, after 0.2 s: slow" in done.stderr
    assert "1 finished rollouts are kept in" in done.stderr


def test_an_endpoint_that_takes_max_completion_tokens_alone_is_sent_the_limit_of_t(
    place, endpoint, url
):
    endpoint.limit = "max_completion_tokens"
    place.run("echo_env.py", "-b", url, "-n", "2", "-r", "1", "-t", "7", "-c", "1")
    assert [body.get("max_completion_tokens") for body in endpoint.bodies] == [None, 7, 7]


def test_no_interleave_scoring_scores_when_all_are_generated(place, endpoint, url):
    for flags, order in (
        ([], ["generated", "scored"] * 3),
        (["--no-interleave-scoring"], ["generated"] * 3 + ["scored"] * 3),
    ):
        log = place.folder / f"log{len(flags)}"
        arguments = ["-n", "3", "-r", "1", "-c", "1", "-a", json.dumps({"log": str(log)})]
        place.run("echo_env.py", "-b", url, *arguments, *flags)
        said = log.read_text().split()
        assert sorted(said) == sorted(order)
        if flags:
            assert said == order
        else:
            assert said.index("scored") < 5


def test_the_only_model_that_is_served_needs_no_name_and_no_key(place, endpoint, url):
    place.run("echo_env.py", "-b", url, "-n", "1", "-r", "1")
    assert endpoint.bodies[0]["model"] == "demo"


@pytest.mark.parametrize(
    ("model", "name"), [("/models/demo", "demo"), ("owner/demo:v2", "owner-demo-v2")]
)
def test_the_evaluations_folder_is_named_after_environment_and_model(
    place, endpoint, url, model, name
):
    endpoint.models = (model,)
    place.run("echo_env.py", "-b", url, "-n", "1", "-r", "1")
    place.run("echo_env.py", "-b", url, "-n", "1", "-r", "1")
    assert {folder.parent.name for folder in place.evaluations} == {f"echo_env--{name}"}
    assert len(place.evaluations) == 2


def test_a_key_is_sent_where_its_variable_is_named(place, endpoint, url, monkeypatch):
    endpoint.key = "secret"
    # of another account: a local endpoint gets it only where it is named
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    refused = place.run("echo_env.py", "-b", url, "-n", "1", "-r", "1", status=2)
    assert "401" in refused.stderr
    assert "-k" in refused.stderr
    monkeypatch.setenv("MINE", "secret")
    place.run("echo_env.py", "-b", url, "-n", "1", "-r", "1", "-k", "MINE")
    monkeypatch.setenv("MINE", "wrong")
    wrong = place.run("echo_env.py", "-b", url, "-n", "1", "-r", "1", "-k", "MINE", status=2)
    assert "the key in MINE is not accepted" in wrong.stderr


def test_verbose_shows_the_first_rollout(place, endpoint, url):
    done = place.run("echo_env.py", "-b", url, "-n", "1", "-r", "1", "-v")
    assert "[user] word 0" in done.stdout
    assert "[assistant] word 0" in done.stdout


def test_the_console_script_is_the_module():
    assert (
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["vf-eval"]
        == "launch.vf_eval.__main__:main"
    )


def test_nothing_heavy_is_imported_to_evaluate():
    code = (
        "import sys, launch.vf_eval.__main__; print(sorted({name.split('.')[0] for name in"
        " sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "openai" in done.stdout
    assert not [
        name
        for name in ("torch", "ray", "vllm", "transformers", "datasets", "hydra")
        if f"'{name}'" in done.stdout
    ]


# What it says where it cannot go on


def test_an_example_environment_is_evaluated_by_its_name(place, endpoint, url):
    endpoint.reply = lambda text: (
        f"<answer>{eval(text.removeprefix('What is ').removesuffix('?'))}</answer>"
    )
    done = place.run("arithmetic", "-b", url, "-n", "3", "-r", "1", "-a", '{"largest": 9}')
    assert cell(done.stdout, "correct").split()[0] == "1.0000"


def test_an_unreachable_endpoint_is_named_with_its_error_before_any_rollout(place):
    done = place.process("echo_env.py", "-m", "demo", "-b", "http://127.0.0.1:9/v1", status=1)
    assert "http://127.0.0.1:9/v1" in done.stderr
    assert "ConnectError" in done.stderr
    assert not (place.folder / "outputs").exists()


def test_a_base_url_that_is_none_of_an_endpoint_is_told(place, url):
    for model, status in ((["-m", "demo"], 1), ([], 2)):
        without = place.run("echo_env.py", *model, "-b", url.removesuffix("/v1"), status=status)
        assert "does -b end in /v1?" in without.stderr
    none = place.run("echo_env.py", "-m", "demo", "-b", "localhost:8000", status=2)
    assert "http://127.0.0.1:8000/v1" in none.stderr


def test_a_page_of_the_web_is_no_endpoint(place):
    app = FastAPI()
    app.get("/{path:path}", response_class=HTMLResponse)(lambda path: "<html>")
    with serving(app) as base:
        done = place.run("echo_env.py", "-m", "demo", "-b", base, status=1)
    assert "answers, but not as the OpenAI API does" in done.stderr
    assert "does -b end in /v1?" in done.stderr


def test_a_model_that_is_not_served_is_told_with_those_that_are(place, endpoint, url):
    wrong = place.run("echo_env.py", "-m", "dmeo", "-b", url, status=2)
    assert "no model 'dmeo'; it serves demo" in wrong.stderr
    endpoint.models = ("a", "b")
    unclear = place.run("echo_env.py", "-b", url, status=2)
    assert "serves a, b; name one with -m" in unclear.stderr


def test_an_endpoint_without_a_list_of_models_is_asked_for_a_token(place, endpoint, url):
    endpoint.models = None
    place.run("echo_env.py", "-m", "demo", "-b", url, "-n", "1", "-r", "1")
    assert endpoint.bodies[0]["max_tokens"] == 1
    assert len(endpoint.bodies) == 2


@pytest.mark.parametrize(
    "flags", [[], ["-k", "MINE"], ["-k", "MINE", "-b", "http://127.0.0.1:9/v1"]]
)
def test_a_key_variable_that_is_missing_is_named(place, flags):
    done = place.run("echo_env.py", "-m", "demo", *flags, status=2)
    assert f"the variable {'MINE' if flags else 'OPENAI_API_KEY'} is not set" in done.stderr
    is_local = "-b" in flags
    assert ("-k: was given, and " in done.stderr and "leave -k out" in done.stderr) == is_local
    assert ("or name an endpoint of your own with -b or OPENAI_BASE_URL" in done.stderr) == (
        not is_local
    )


def test_a_wrong_environment_name_and_wrong_arguments_of_it_are_told(place, url):
    name = place.run("no_such_env", "-b", url, status=2)
    assert "no_such_env" in name.stderr
    assert "arithmetic" in name.stderr
    argument = place.run("echo_env.py", "-b", url, "-a", '{"numb": 2}', status=2)
    assert "numb" in argument.stderr
    assert "num=4" in argument.stderr
    empty = place.run("echo_env.py", "-b", url, "-a", '{"num": 0}', status=2)
    assert "empty" in empty.stderr
    kind = place.run("echo_env.py", "-b", url, "-a", '{"num": "two"}', status=2)
    assert re.search(
        r"ENVIRONMENT: echo_env.py was not loaded: TypeError: 'str' .*\(.*echo_env.py:\d+\); check"
        r" -a and the environment, -v shows",
        kind.stderr,
    )


def test_a_row_that_is_no_example_is_told(place, url):
    path = place.folder / "echo_env.py"
    path.write_text(path.read_text().replace('"question": f"word {i + shift}", ', ""))
    done = place.run("echo_env.py", "-b", url, status=2)
    assert re.search(r"echo_env\.py: .*\bprompt\b.*\bquestion\b", done.stderr), done.stderr


def test_more_examples_than_there_are_is_said(place, endpoint, url):
    done = place.run("echo_env.py", "-b", url, "-n", "9", "-r", "1")
    assert "-n: echo_env.py has 4 examples to evaluate on, not 9" in done.stderr
    assert len(endpoint.bodies) == 4


def test_a_sampling_argument_that_every_call_would_fail_of_is_refused_before_any(
    place, endpoint, url
):
    done = place.run("echo_env.py", "-b", url, "-S", '{"top_k": 3, "stream": true}', status=2)
    assert "-S: top_k is no argument of OpenAI's API" in done.stderr
    assert "-S: stream is not for -S to say" in done.stderr
    assert not endpoint.bodies
    assert not (place.folder / "outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["e", "-a", '{"a": 1,}'],
            (
                "-a/--env-args: is not JSON: Expecting property name enclosed in double quotes at"
                " column 9"
            ),
        ),
        (
            ["e", "-S", '{"a": 1\n "b": 2}'],
            "-S/--sampling-args: is not JSON: Expecting ',' delimiter at line 2, column 2",
        ),
        (["e", "-S", ""], "-S/--sampling-args: is not JSON: Expecting value at column 1"),
        (["e", "-S", "[1]"], "-S/--sampling-args: is list, not an object"),
        (
            ["e", "-n", "0"],
            "-n/--num-examples: must be a whole number from 1 on, or -1 for all, got '0'",
        ),
        (
            ["e", "-r", "many"],
            "-r/--rollouts-per-example: must be a whole number from 1 on, got 'many'",
        ),
        (["e", "-T", "-1"], "-T/--temperature: must be a number from 0 on, got '-1'"),
        (
            ["e", "-c", "-2"],
            "-c/--max-concurrent: must be a whole number from 1 on, or -1 for all, got '-2'",
        ),
        (["e", "-C", " ,"], "-C/--state-columns: names nothing: ' ,'"),
        (
            ["e", "--rollout-timeout", "0"],
            "--rollout-timeout: must be a number of seconds over 0, got '0'",
        ),
        (["e", "--solved-at", "nan"], "--solved-at: must be a number, got 'nan'"),
    ],
)
def test_a_malformed_argument_is_told_with_its_position(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        read_options(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            [],
            (
                r"^ENVIRONMENT: which one .* `vf-eval NAME`: one of .*\barithmetic, .*, or any"
                r" module or \.py file that has load_environment"
            ),
        ),
        (["e", "-D", "name"], "-H"),
        (["e", "-t", "5", "-S", '{"max_tokens": 6}'], "-t: is 5, and max_tokens in -S is 6"),
        (["--resume", "a", "-o", "b"], "-o: an evaluation goes on in its own folder"),
    ],
)
def test_arguments_that_contradict_each_other_are_told(arguments, said):
    with pytest.raises(ConfigError, match=said):
        read_options(arguments)


def test_help_names_the_environments_that_there_are(capsys):
    with pytest.raises(SystemExit):
        read_options(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"one of .*\barithmetic, .*, or any module or \.py file that has load_environment", said
    )


# What it keeps


def test_a_failed_rollout_is_data_and_resume_makes_it_again(place, endpoint, url):
    endpoint.reply = lambda text: 400 if text == "word 1" else text
    done = place.run("echo_env.py", "-b", url, "-n", "3", "-r", "1", "-s")
    assert cell(done.stdout, "errors") == "1, not in the means"
    assert "refused with 400" in done.stdout
    assert [line["reward"] for line in sorted(place.lines, key=lambda line: line["example"])] == [
        1.0,
        0.0,
        1.0,
    ]
    assert "1 of 3 rollouts failed" in done.stderr
    endpoint.reply = str
    endpoint.bodies.clear()
    again = place.run("--resume", place.evaluation)
    assert endpoint.asked == ["word 1"]
    assert cell(again.stdout, "reward").split()[0] == "1.0000"
    assert cell(again.stdout, "errors") == "0"


def test_where_every_rollout_fails_the_status_says_so(place, endpoint, url):
    endpoint.reply = lambda text: 400
    done = place.run("echo_env.py", "-b", url, "-n", "2", "-r", "1", status=1)
    assert cell(done.stdout, "errors") == "2, not in the means"
    assert len(place.lines) == 2


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_finished_rollouts_are_kept_when_it_is_interrupted_and_resume_makes_only_what_is_missing(
    place, endpoint, url, sign
):
    endpoint.answers = 5
    process = place.start("echo_env.py", "-b", url, "-n", "4", "-r", "2")
    deadline = time.monotonic() + 60
    while not place.evaluations or len(place.lines) < 5:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(sign)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    kept = place.lines
    assert len(kept) == 5
    folder = place.evaluation.relative_to(place.folder)
    assert f"5 finished rollouts are kept in {folder}; `vf-eval --resume {folder}` goes on" in err
    endpoint.answers = None
    endpoint.bodies.clear()
    done = place.run("--resume", folder, "-s")
    assert "5 of 8 rollouts are there" in done.stderr
    assert len(endpoint.bodies) == 3
    assert place.lines[:5] == kept
    assert cell(done.stdout, "reward").split()[0] == "1.0000"
    rows = [
        json.loads(line) for line in (place.evaluation / "results.jsonl").read_text().splitlines()
    ]
    assert [row["example_id"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_finished_rollouts_are_kept_when_the_disk_is_full(place, endpoint, url):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))

    done = place.process(
        "echo_env.py", "-b", url, "-n", "4", "-r", "3", "-c", "1", preexec_fn=limit, status=1
    )
    assert "StorageError" in done.stderr
    assert "rollouts.jsonl" in done.stderr
    whole = (place.evaluation / "rollouts.jsonl").read_bytes().count(b"\n")
    assert 0 < whole < 12
    assert f"{whole} finished rollouts are kept" in done.stderr
    endpoint.bodies.clear()
    again = place.run("--resume", place.evaluation)
    assert "was cut off and is removed" in again.stderr
    assert len(endpoint.bodies) == 12 - whole


def test_finished_rollouts_are_kept_when_the_endpoint_goes_and_resume_makes_the_rest(
    place, endpoint
):
    endpoint.answers = 3
    with serving(endpoint.app()) as base:
        process = place.start("echo_env.py", "-b", f"{base}/v1", "-n", "4", "-r", "1", "-c", "1")
        assert eventually(lambda: place.evaluations and len(place.lines) == 3, within_s=60)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert "Traceback" not in err
    assert f"{base}/v1: no answer (ConnectError: " in err
    folder = place.evaluation.relative_to(place.folder)
    assert f"3 finished rollouts are kept in {folder}; `vf-eval --resume {folder}` goes on" in err
    place.run("--resume", folder, "-b", "http://127.0.0.1:9/v1", status=1)
    assert json.loads((folder / "evaluation.json").read_text())["base_url"] == f"{base}/v1", (
        "an endpoint is not noted before it has answered"
    )
    endpoint.answers = None
    endpoint.bodies.clear()
    with serving(endpoint.app()) as base:
        place.run("--resume", folder, "-b", f"{base}/v1")
    assert endpoint.asked == ["word 3"]


@pytest.mark.parametrize("output", ["a_file", "a_file/below"])
def test_results_that_cannot_be_written_are_told_with_the_folder_before_any_rollout(
    place, endpoint, url, output
):
    (place.folder / "a_file").write_text("here")
    done = place.run("echo_env.py", "-b", url, "-o", output, status=1)
    assert re.search(
        rf"cannot write {output}/echo_env--demo/\S+: Not a directory; choose another folder"
        r" with -o",
        done.stderr,
    )
    assert not endpoint.bodies


def evaluated(place, url, *more):
    place.run("echo_env.py", "-b", url, "-n", "2", "-r", "2", "-T", "0.5", *more)
    return place.evaluation


def test_a_broken_results_file_is_refused_with_file_line_and_remedy(place, endpoint, url):
    path = evaluated(place, url) / "rollouts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1].replace('"example_id"', "example_id"), *lines[2:]]))
    before = path.read_bytes()
    done = place.run("--resume", path.parent, status=2)
    assert "rollouts.jsonl:2: line: " in done.stderr
    assert "delete this line, and its rollout is made again" in done.stderr
    assert path.read_bytes() == before
    path.write_text("".join([lines[0], *lines[2:]]))
    endpoint.bodies.clear()
    place.run("--resume", path.parent)
    assert len(endpoint.bodies) == 1


def test_a_results_file_of_something_else_is_refused_as_such(place, endpoint, url):
    path = evaluated(place, url) / "rollouts.jsonl"
    whole = path.read_text()
    path.write_text('{"loss": 1}\n{"loss": 2}\n')
    foreign = place.run("--resume", path.parent, status=2)
    assert (
        "rollouts.jsonl:1: example: field required; none of its lines is a rollout of an evaluation"
        in foreign.stderr
    )
    path.write_text('{"loss": 1}\n{"loss": 2}\n' + whole)
    partly = place.run("--resume", path.parent, status=2)
    assert (
        "rollouts.jsonl:1: example: field required; delete this line and the others that are broken"
        " (2 in all)" in partly.stderr
    )
    path.write_text(whole.replace('"row":"', '"row":"f'))
    other = place.run("--resume", path.parent, status=2)
    assert "or " + str(path) + " is another evaluation's" in other.stderr
    assert "goes on" not in other.stderr, "it would not"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (b'{"environment": ', "evaluation.json: evaluation: Invalid JSON: EOF"),
        (b"a\xff", "evaluation.json: evaluation: Invalid JSON: expected value"),
        (b"[]", "evaluation.json: evaluation: Input should be an object"),
        (b"{}", "evaluation.json: environment: Field required"),
        (b'{"environment": 3}', "environment: Input should be a valid string"),
        (NO_EXAMPLES, "num_examples: Value error, must be 1 or more, or -1 for all, got 0"),
    ],
)
def test_a_broken_evaluation_is_refused_with_its_file_and_remedy(
    place, endpoint, url, written, said
):
    folder = evaluated(place, url)
    (folder / "evaluation.json").write_bytes(written)
    done = place.run("--resume", folder, status=2)
    assert said in done.stderr
    assert "start a new evaluation without --resume" in done.stderr


def test_resume_refuses_another_environment_arguments_model_or_sampling_and_names_what_differs(
    place, endpoint, url
):
    folder = evaluated(place, url)
    endpoint.bodies.clear()
    other = ["-a", '{"num": 9}', "-m", "other", "-T", "0.7", "-t", "8", "-C", "letters"]
    said = place.run("arithmetic", "--resume", folder, *other, status=2).stderr
    assert 'ENVIRONMENT: is "arithmetic" and was "echo_env.py"' in said
    assert "-a: num is 9 and was not said" in said
    assert '-m: is "other" and was "demo"' in said
    assert (
        "temperature is 0.7 and was 0.5; max_tokens is 8 and was not said" in said
        or "max_tokens is 8 and was not said; temperature is 0.7 and was 0.5" in said
    )
    assert "-C: is letters and was" in said
    assert str(folder) in said
    assert not endpoint.bodies
    place.run("echo_env.py", "--resume", folder, "-m", "demo", "-T", "0.5")
    assert not endpoint.bodies


def test_resume_may_ask_for_more_examples_and_rollouts(place, endpoint, url):
    folder = evaluated(place, url)
    endpoint.bodies.clear()
    done = place.run("--resume", folder, "-n", "3", "-r", "3")
    assert sorted(endpoint.asked) == ["word 0", "word 1", "word 2", "word 2", "word 2"]
    assert "9, of 3 examples" in done.stdout


def test_resume_for_fewer_reports_on_these_and_the_evaluation_stays_as_large_as_it_was(
    place, endpoint, url
):
    folder = evaluated(place, url)
    endpoint.bodies.clear()
    done = place.run("--resume", folder, "-n", "1", "-r", "1")
    assert "1, of 1 examples" in done.stdout
    assert "4, of 2 examples" in place.run("--resume", folder).stdout
    place.run("--resume", folder, "-n", "-1", "-r", "1")
    place.run("--resume", folder, "-n", "3")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert (evaluation["num_examples"], evaluation["rollouts_per_example"]) == (-1, 2), (
        "-1 is all of them"
    )


def test_resume_refuses_data_that_have_changed(place, endpoint, url):
    folder = evaluated(place, url)
    path = place.folder / "echo_env.py"
    path.write_text(path.read_text().replace("shift=0", "shift=1"))
    done = place.run("--resume", folder, status=2)
    assert "example 0 (id 0) is not what it was" in done.stderr


def test_resume_of_a_folder_that_is_none_is_told(place):
    done = place.run("--resume", "nowhere", status=2)
    assert "nowhere/evaluation.json cannot be read" in done.stderr
    (place.folder / "evaluation.json").write_text('{"environment": 3}')
    broken = place.run("--resume", ".", status=2)
    assert "evaluation.json" in broken.stderr


def test_rollouts_that_are_compared_are_made_again_together(place, endpoint, url):
    log = place.folder / "log"
    folder = evaluated(place, url, "-a", json.dumps({"compares": True, "log": str(log)}))
    path = folder / "rollouts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join(
            line
            for line in lines
            if not (json.loads(line)["example"] == 1 and json.loads(line)["rollout"] == 0)
        )
    )
    log.unlink()
    endpoint.bodies.clear()
    place.run("--resume", folder)
    assert endpoint.asked == ["word 1", "word 1"]
    assert "compared 2" in log.read_text()


def test_a_state_column_that_no_rollout_has_is_told_and_left_out(place, endpoint, url):
    done = place.run("echo_env.py", "-b", url, "-n", "2", "-r", "1", "-s", "-C", "leters,letters")
    assert "-C: the first rollout has no leters; its state has" in done.stderr
    assert "no rollout has leters" in done.stderr
    assert "letters" in columns_of(place.evaluation / "results.jsonl")
