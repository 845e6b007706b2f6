"""`vf-eval` as a command, against an endpoint on this machine (issue 5, "Datasets and evaluation";
spec: orchestration, CLI integration).
"""

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import datasets
import httpx
import openai
import pytest
from fake_openai import FakeOpenAI
from fake_server import eventually, serving
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from scripted_client import ScriptedClient

from launch.tools.vf_eval import __main__ as vf_eval
from launch.tools.vf_eval import endpoint as endpoint_module
from launch.tools.vf_eval import session
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.loading import load_environment
from shared.errors import UnreachableError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
NOWHERE = "http://127.0.0.1:9/v1"
ECHO = """
    from pathlib import Path

    from rollout_actors.environments.multi_turn import SingleTurnEnv
    from rollout_actors.environments.rubric import Rubric


    def load_environment(num=4, shift=0, compares=False):
        rows = []
        for i in range(num):
            word = f"word {i + shift}"
            info = {"number": i} if i % 2 else {"name": "even"}
            rows.append({"question": word, "answer": word, "info": info})

        class Echo(SingleTurnEnv):
            async def add_model_response(self, state, prompt_messages, response):
                await super().add_model_response(state, prompt_messages, response)
                state["letters"] = len(state["prompt"][-1]["content"])

        def exact(completion, answer):
            return float(completion[-1]["content"] == answer)

        def length(completion):
            return len(completion[-1]["content"])

        def best(states):
            Path("compared").write_text(str(len(states)))
            return [1.0] * len(states)

        rubric = Rubric([best], [1.0]) if compares else Rubric([exact, length], [1.0, 0.0])
        return Echo(dataset=rows, rubric=rubric)
"""
HANGING = """
    import os
    import signal
    import time
    from pathlib import Path

    from rollout_actors.environments.multi_turn import SingleTurnEnv
    from rollout_actors.environments.rubric import Rubric


    def load_environment(interrupts=False, words=("go", "hang")):
        def slow(completion, answer):
            Path(f"begun_{answer}").touch()
            if answer == "hang" and interrupts:
                os.kill(os.getpid(), signal.SIGINT)
            while answer == "hang" and not Path(__file__).with_name("released").exists():
                time.sleep(0.01)
            return 1.0

        rows = [{"question": word, "answer": word} for word in words]
        return SingleTurnEnv(dataset=rows, rubric=Rubric([slow]))
"""


class Shell:
    """A working folder with two environments in it, where the command is run."""

    def __init__(self, folder: Path, capsys, monkeypatch) -> None:
        self.folder = folder
        self._capsys = capsys
        (folder / "echo_env.py").write_text(textwrap.dedent(ECHO))
        (folder / "hanging.py").write_text(textwrap.dedent(HANGING))
        monkeypatch.chdir(folder)
        for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
            monkeypatch.delenv(name, raising=False)

    def start(self, *arguments, **options):
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, "-m", "launch.tools.vf_eval", *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": path, "COLUMNS": "200"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )

    def process(self, *arguments, status=0, **options):
        """Run the command in a process, which must end with this status."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=300)
        return self._ended(out, err, process.returncode, status)

    def run(self, *arguments, status=0):
        """Run the command in this process, which is quicker."""
        self._capsys.readouterr()
        ended = 0
        try:
            vf_eval.main(list(map(str, arguments)))
        except SystemExit as exit_:
            ended = exit_.code
        return self._ended(*self._capsys.readouterr(), ended, status)

    @staticmethod
    def _ended(out, err, ended, status):
        assert ended == status, out + err
        assert "Traceback" not in err
        return subprocess.CompletedProcess([], ended, out, err)

    @property
    def evaluations(self):
        return sorted(path.parent for path in Path().glob("outputs/evals/*/*/evaluation.json"))

    @property
    def evaluation(self):
        (folder,) = self.evaluations
        return folder

    def lines(self, name="rollouts.jsonl"):
        return [json.loads(line) for line in (self.evaluation / name).read_text().splitlines()]

    def has_lines(self, number):
        return bool(self.evaluations) and len(self.lines()) >= number


@pytest.fixture
def shell(tmp_path, capsys, monkeypatch):
    return Shell(tmp_path, capsys, monkeypatch)


@pytest.fixture
def endpoint():
    return FakeOpenAI()


@pytest.fixture
def url(endpoint):
    with serving(endpoint.app()) as base:
        yield f"{base}/v1"


@pytest.fixture
def echo(shell, endpoint, url):
    """Runs the command on `echo_env.py`, by one rollout of each of two examples."""

    def run(*more, status=0):
        return shell.run("echo_env.py", "-b", url, "-n", "2", "-r", "1", *more, status=status)

    return run


@pytest.fixture
def folder(shell, endpoint, echo):
    """An evaluation of two examples with two rollouts each, after which nothing was asked."""
    echo("-r", "2", "-T", "0.5")
    endpoint.bodies.clear()
    return shell.evaluation


def cell(output, name):
    """Return what a table's row says; the first row, where a path begins with the same word."""
    row = next(line for line in output.splitlines() if re.match(rf"\s*{re.escape(name)}\s\s", line))
    return row.split(maxsplit=len(name.split()))[len(name.split())].strip()


# What it does


def test_an_evaluation_has_a_progress_bar_a_summary_table_and_a_results_file(shell, endpoint, url):
    endpoint.reply = lambda text: "no" if text == "word 1" else text
    done = shell.run("echo_env", "-m", "demo", "-b", url, "-n", "4", "-r", "2")
    assert "8/8" in done.stderr
    assert "rollout/s" in done.stderr
    # Means of the examples are 1, 0, 1, 1: their standard deviation is 0.5.
    assert cell(done.stdout, "reward").split() == ["0.7500", "0.2500", "0.0000", "1.0000"]
    assert cell(done.stdout, "exact").split()[0] == "0.7500"
    assert cell(done.stdout, "length").split()[0] == "5.0000"
    assert cell(done.stdout, "pass@1").startswith("0.7500")
    facts = {
        "rollouts": "8, of 4 examples",
        "pass@2": "0.7500",
        "errors": "0",
        "truncated": "0",
        "tokens": "80 read, 24 sampled; a rollout 10.0 and 3.0",
    }
    assert {name: cell(done.stdout, name) for name in facts} == facts
    assert re.fullmatch(r"\d+\.\d s", cell(done.stdout, "wall time"))
    assert sorted((line["example"], line["rollout"]) for line in shell.lines()) == [
        (example, rollout) for example in range(4) for rollout in range(2)
    ]
    assert {line["state"]["example_id"] for line in shell.lines()} == {0, 1, 2, 3}


def test_vf_eval_s_produces_identical_schema_via_env_make_dataset(shell, endpoint, url):
    columns = ["timing.total_ms", "letters", "advantage"]
    shell.run("echo_env", "-b", url, "-n", "4", "-r", "2", "-s", "-C", ",".join(columns))
    environment = load_environment("echo_env.py")
    results = environment.evaluate_sync(
        ScriptedClient(lambda call: call.text),
        "demo",
        num_examples=4,
        rollouts_per_example=2,
        use_tqdm=False,
    )
    expected = environment.make_dataset(results, state_columns=columns)
    fields = "answer completion exact example_id id info length prompt reward task"
    assert " ".join(sorted({*expected.column_names} - {*columns})) == fields
    saved = datasets.Dataset.from_json(str(shell.evaluation / "results.jsonl"))
    assert saved.column_names == expected.column_names
    assert [{**row, "timing.total_ms": 0, "task": ""} for row in expected] == [
        {**row, "timing.total_ms": 0, "task": ""} for row in shell.lines("results.jsonl")
    ]
    metadata = json.loads((shell.evaluation / "metadata.json").read_text())
    known = {"avg_reward": 1.0, "num_examples": 4, "rollouts_per_example": 2, "model": "demo"}
    assert {name: metadata[name] for name in known} == known


def test_vf_eval_s_and_hf_pushes_use_a_single_centralized_dataset_construction_path_with_consistent_sanitation(
    shell, endpoint, echo, monkeypatch
):
    pushed = {}
    monkeypatch.setattr(
        datasets.Dataset,
        "push_to_hub",
        lambda self, repo_id, **rest: pushed.update({repo_id: self}),
    )
    done = echo("-s", "-H", "-D", "me/echo", "-C", "letters")
    assert list(pushed) == ["me/echo"]
    assert list(pushed["me/echo"]) == shell.lines("results.jsonl")
    assert "me/echo" in done.stdout
    endpoint.key = "another"  # the endpoint is not asked where nothing is missing
    shell.run("--resume", shell.evaluation, "-H")
    assert list(pushed) == ["me/echo", "echo_env-results"]
    assert len(endpoint.bodies) == 2


def test_a_push_that_fails_says_why_and_the_rollouts_are_kept(shell, echo, monkeypatch):
    def refuse(self, repo_id):
        raise OSError("401 who are you")

    monkeypatch.setattr(datasets.Dataset, "push_to_hub", refuse)
    error = echo("-H", "-D", "me/echo", status=1).stderr
    assert "401 who are you" in error
    assert f"vf-eval --resume {shell.evaluation} -H -D me/echo" in error
    assert len(shell.lines()) == 2


def test_arguments_of_the_calls_are_sent_and_token_ids_only_where_told_to(shell, endpoint, echo):
    sampling = ["-t", "7", "-T", "0.5", "-S", '{"top_p": 0.9, "extra_body": {"top_k": 3}}']
    sent = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3}
    echo("-n", "1", *sampling)
    (body,) = endpoint.bodies
    assert {key: body[key] for key in sent} == sent
    assert not {"logprobs", "return_token_ids", "return_tokens_as_token_ids"} & set(body)
    echo("-n", "1", *sampling, "--tokens", "-C", "trajectory", "-o", "others")
    assert endpoint.bodies[-1]["return_token_ids"] is True
    assert endpoint.bodies[-1]["top_k"] == 3
    (path,) = (shell.folder / "others").rglob("rollouts.jsonl")
    (step,) = json.loads(path.read_text())["state"]["trajectory"]
    assert step["tokens"]["completion_ids"] == [3, 4]


def test_flags_of_concurrency_and_of_time_are_those_of_generate(echo, monkeypatch):
    calls = []
    generate = Environment.generate

    async def noted(self, *arguments, **options):
        calls.append(options)
        return await generate(self, *arguments, **options)

    monkeypatch.setattr(Environment, "generate", noted)
    limits = ["-c", "3", "--max-concurrent-generation", "2", "--max-concurrent-scoring", "4"]
    times = ["--rollout-timeout", "600", "--scoring-timeout", "300"]
    echo()
    echo(*limits, *times, "--no-interleave-scoring")
    names = {
        "max_concurrent": (32, 3),
        "max_concurrent_generation": (None, 2),
        "max_concurrent_scoring": (None, 4),
        "interleave_scoring": (True, False),
        "rollout_timeout_s": (None, 600.0),
        "scoring_timeout_s": (None, 300.0),
    }
    assert {name: tuple(options[name] for options in calls) for name in names} == names


def test_a_plain_reward_function_that_is_not_done_at_its_limit_has_failed_and_keeps_nobody(
    shell, url
):
    hangs = ("-r", "1", "--scoring-timeout", "1", "-a", '{"words": ["hang"]}')
    done = shell.process("hanging.py", "-b", url, *hangs, status=1)
    assert cell(done.stdout, "reward errors").startswith(
        "1 x slow, not in its mean: TimeoutError: reward function slow is not done after"
        " scoring_timeout_s = 1 s"
    )
    assert cell(done.stdout, "given up").startswith("1 x slow: ")
    assert "plain function slow was given up" in done.stderr


def test_a_second_signal_ends_what_a_plain_function_keeps_and_both_say_what_is_true(shell, url):
    process = shell.start("hanging.py", "-b", url, "-r", "1")
    begun = shell.folder / "begun_hang"
    assert eventually(lambda: begun.exists() and shell.has_lines(1), within_s=240)
    process.send_signal(signal.SIGINT)
    first = ""
    while "again ends at once" not in first:
        first += (line := process.stderr.readline())
        assert line, first
    assert re.search(r"interrupted: .* 300 s .*clean.* 10 s .*\(slow\)", first)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert re.search("interrupted again: .*cut off.*: slow", err)
    assert "1 finished rollouts are kept in" in err
    assert "every process" not in err


def test_after_one_signal_a_plain_function_is_waited_for_and_then_cut_off(shell, url, monkeypatch):
    monkeypatch.setattr(session, "PLAIN_S", 0.2)
    interrupts = ["-a", '{"interrupts": true}']
    try:
        done = shell.run("hanging.py", "-b", url, "-r", "1", "-c", "1", *interrupts, status=130)
    finally:
        (shell.folder / "released").touch()
    assert re.search(r" 0\.2 s, .*cut off: slow", done.stderr)
    assert "1 finished rollouts are kept in" in done.stderr


def test_an_endpoint_that_takes_max_completion_tokens_alone_is_sent_the_limit_of_t(endpoint, echo):
    endpoint.limit = "max_completion_tokens"
    echo("-t", "7", "-c", "1")
    assert [body.get("max_completion_tokens") for body in endpoint.bodies] == [None, 7, 7]


@pytest.mark.parametrize(
    ("model", "name"), [("/models/demo", "demo"), ("owner/demo:v2", "owner--demo-v2")]
)
def test_each_evaluation_has_a_folder_named_after_environment_and_model(
    shell, endpoint, echo, model, name
):
    endpoint.models = (model,)
    echo()
    echo()
    assert [path.parent.name for path in shell.evaluations] == [f"echo_env--{name}"] * 2


def test_a_key_is_sent_where_its_variable_is_named(endpoint, echo, monkeypatch):
    endpoint.key = "secret"
    # of another account: a local endpoint gets it only where it is named
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    refused = echo(status=2).stderr
    assert "401" in refused
    assert "-k" in refused
    monkeypatch.setenv("MINE", "secret")
    echo("-k", "MINE")
    monkeypatch.setenv("MINE", "wrong")
    assert "the key in MINE " in echo("-k", "MINE", status=2).stderr


def test_verbose_shows_the_first_rollout(echo):
    shown = echo("-v").stdout
    assert "[user] word 0" in shown
    assert "[assistant] word 0" in shown


def test_the_console_script_is_the_module():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["vf-eval"] == "launch.tools.vf_eval.__main__:main"


def test_nothing_heavy_is_imported_to_evaluate():
    code = "import sys, launch.tools.vf_eval.session; print(*{name.split('.')[0] for name in sys.modules})"
    imported = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()
    assert "openai" in imported
    assert not {"torch", "ray", "vllm", "transformers", "datasets", "hydra"} & set(imported)


# What it says where it cannot go on


def test_an_unreachable_endpoint_is_named_with_its_error_before_any_rollout(shell):
    done = shell.run("echo_env.py", "-m", "demo", "-b", NOWHERE, status=1)
    assert NOWHERE in done.stderr
    assert "ConnectError" in done.stderr
    assert not (shell.folder / "outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["-m", "demo", "-b", "{base}"], 1, r"does -b end in /v1\?"),
        (["-b", "{base}"], 2, r"has no list of models \(does -b end in /v1\?\); name a"),
        (["-m", "demo", "-b", "localhost:8000"], 2, r"http://127\.0\.0\.1:8000/v1"),
        (
            ["-m", "demo", "-b", "http://me:hunter2@127.0.0.1:8000/v1"],
            2,
            r"--header, which are not",
        ),
        (["-m", "demo", "-b", "http://127.0.0.1:8000/v1?api_key=hunter2"], 2, r"a password or a"),
        (["-m", "dmeo"], 2, r"no model 'dmeo'; it serves demo, other"),
        ([], 2, r"serves demo, other; name a model with -m"),
        (["-a", '{"numb": 2}'], 2, r"numb.*num=4"),
        (["-a", '{"num": 0}'], 2, r"empty"),
        (["-S", '{"top_k": 3}'], 2, r"-S: top_k is not an argument of OpenAI's API"),
        (
            ["-a", '{"num": "two"}'],
            2,
            r"ENVIRONMENT: echo_env.py was not loaded: TypeError: 'str' .*\(.*echo_env.py:\d+\); ch",
        ),
    ],
)
def test_a_wrong_address_model_or_argument_of_the_environment_is_told(
    endpoint, url, echo, arguments, status, message
):
    endpoint.models = ("demo", "other")
    base = url.removesuffix("/v1")
    arguments = [argument.replace("{base}", base) for argument in arguments]
    error = echo(*arguments, status=status).stderr
    assert re.search(message, error, re.DOTALL), error
    assert "hunter2" not in error
    assert not endpoint.asked, "no rollout was begun"


def test_a_server_that_still_starts_is_waited_for_and_that_is_said(monkeypatch, capsys):
    monkeypatch.setattr(endpoint_module, "START_PAUSE_S", 0.0)
    listed = {"object": "list", "data": [{"id": "demo", "object": "model", "created": 0}]}
    answers = [httpx.Response(503, json={"detail": "loading"})] * 3 + [
        httpx.Response(200, json=listed)
    ]
    transport = httpx.MockTransport(lambda request: answers.pop(0))
    client = openai.AsyncOpenAI(
        api_key="none",
        base_url="http://starting/v1",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=transport),
    )
    endpoint = endpoint_module.Endpoint("http://starting/v1", "none", "KEY")
    assert asyncio.run(endpoint_module.find_model(client, endpoint, None, "chat")) == "demo"
    assert capsys.readouterr().err.count("answers 503") == 1
    # Within a limit.
    monkeypatch.setattr(endpoint_module, "START_S", 0.0)
    answers += [httpx.Response(503, json={"detail": "loading"})] * 3
    with pytest.raises(UnreachableError, match=r"no answer .*503"):
        asyncio.run(endpoint_module.find_model(client, endpoint, None, "chat"))


def test_a_wrong_environment_name_is_told_with_those_that_there_are(shell, url):
    error = shell.run("no_such_env", "-b", url, status=2).stderr
    assert re.search(r"no_such_env.*arithmetic", error, re.DOTALL), error


def test_a_page_of_the_web_is_no_endpoint(shell):
    app = FastAPI()
    app.get("/{path:path}", response_class=HTMLResponse)(lambda path: "<html>")
    with serving(app) as base:
        done = shell.run("echo_env.py", "-m", "demo", "-b", base, status=1)
    assert re.search("answers, .*OpenAI API", done.stderr)
    assert "does -b end in /v1?" in done.stderr


def test_an_endpoint_without_a_list_of_models_is_asked_for_a_token(endpoint, echo):
    endpoint.models = None
    echo("-m", "demo")
    assert endpoint.bodies[0]["max_tokens"] == 1
    assert len(endpoint.bodies) == 3


def test_a_state_column_that_no_rollout_has_is_told_and_left_out(shell, echo):
    done = echo("-s", "-C", "leters,letters")
    assert re.search(r"-C: .* no leters; .*\bletters\b", done.stderr)
    assert "letters" in shell.lines("results.jsonl")[0]


# What it keeps


def test_a_failed_rollout_is_data_and_resume_makes_it_again(shell, endpoint, echo):
    endpoint.reply = lambda text: 400 if text == "word 1" else text
    done = echo("-n", "3", "-s")
    assert cell(done.stdout, "errors") == "1, not in the means"
    assert "refused with 400" in done.stdout
    assert {line["example"]: line["state"]["reward"] for line in shell.lines()} == {
        0: 1.0,
        1: 0.0,
        2: 1.0,
    }
    assert "1 of 3 rollouts failed" in done.stderr
    endpoint.reply = str
    endpoint.bodies.clear()
    again = shell.run("--resume", shell.evaluation)
    assert endpoint.asked == ["word 1"]
    assert cell(again.stdout, "reward").split()[0] == "1.0000"
    assert cell(again.stdout, "errors") == "0"


def test_where_every_rollout_fails_the_status_says_so(shell, endpoint, echo):
    endpoint.reply = lambda text: 400
    assert cell(echo(status=1).stdout, "errors") == "2, not in the means"
    assert len(shell.lines()) == 2


def test_finished_rollouts_are_kept_when_it_is_interrupted_and_resume_makes_only_what_is_missing(
    shell, endpoint, url
):
    endpoint.answers = 5
    process = shell.start("echo_env.py", "-b", url, "-n", "4", "-r", "2")
    assert eventually(lambda: shell.has_lines(5), within_s=240)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    kept = shell.lines()
    assert len(kept) == 5
    folder = shell.evaluation
    assert f"5 finished rollouts are kept in {folder}; `vf-eval --resume {folder}` continues" in err
    endpoint.answers = None
    endpoint.bodies.clear()
    done = shell.run("--resume", folder, "-s")
    assert "5 of 8 rollouts are finished" in done.stderr
    assert len(endpoint.bodies) == 3
    assert shell.lines()[:5] == kept
    assert cell(done.stdout, "reward").split()[0] == "1.0000"
    examples = [row["example_id"] for row in shell.lines("results.jsonl")]
    assert examples == [0, 0, 1, 1, 2, 2, 3, 3]


def test_finished_rollouts_are_kept_when_the_disk_is_full(shell, endpoint, url):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))

    arguments = ["echo_env.py", "-b", url, "-n", "4", "-r", "3", "-c", "1"]
    done = shell.process(*arguments, preexec_fn=limit, status=1)
    assert "StorageError" in done.stderr
    assert "rollouts.jsonl" in done.stderr
    whole = (shell.evaluation / "rollouts.jsonl").read_bytes().count(b"\n")
    assert 0 < whole < 12
    assert f"{whole} finished rollouts are kept" in done.stderr
    endpoint.bodies.clear()
    again = shell.run("--resume", shell.evaluation)
    assert re.search(r"rollouts\.jsonl .*incomplete .* repeated", again.stderr)
    assert len(endpoint.bodies) == 12 - whole


def test_finished_rollouts_are_kept_when_the_endpoint_goes_and_resume_makes_the_rest(
    shell, endpoint
):
    endpoint.answers = 3
    with serving(endpoint.app()) as base:
        process = shell.start("echo_env.py", "-b", f"{base}/v1", "-n", "4", "-r", "1", "-c", "1")
        assert eventually(lambda: shell.has_lines(3), within_s=240)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert "Traceback" not in err
    assert f"{base}/v1: no answer (ConnectError: " in err
    folder = shell.evaluation
    assert f"3 finished rollouts are kept in {folder}; `vf-eval --resume {folder}` continues" in err
    shell.run("--resume", folder, "-b", NOWHERE, status=1)
    noted = json.loads((folder / "evaluation.json").read_text())["base_url"]
    assert noted == f"{base}/v1", "an endpoint is not noted before it has answered"
    endpoint.answers = None
    endpoint.bodies.clear()
    with serving(endpoint.app()) as base:
        shell.run("--resume", folder, "-b", f"{base}/v1")
    assert endpoint.asked == ["word 3"]


def test_results_that_cannot_be_written_are_told_with_the_folder_before_any_rollout(
    shell, endpoint, echo
):
    output = "a_file/below"
    (shell.folder / "a_file").write_text("here")
    error = echo("-o", output, status=1).stderr
    assert re.search(rf"cannot write {output}/echo_env--demo/\S+: .*Not a directory.*; ", error)
    assert "another folder" in error
    assert not endpoint.bodies


def test_resume_may_ask_for_more_examples_and_rollouts(shell, endpoint, folder):
    done = shell.run("--resume", folder, "-n", "3", "-r", "3")
    assert sorted(endpoint.asked) == ["word 0", "word 1", "word 2", "word 2", "word 2"]
    assert "9, of 3 examples" in done.stdout


def test_resume_refuses_data_that_have_changed(shell, folder):
    path = shell.folder / "echo_env.py"
    path.write_text(path.read_text().replace("shift=0", "shift=1"))
    error = shell.run("--resume", folder, status=2).stderr
    assert "example 0 has changed" in error
    assert f"or {folder / 'rollouts.jsonl'} belongs to another evaluation" in error
    assert "goes on" not in error, "it would not"


def test_rollouts_that_are_compared_are_made_again_together(shell, endpoint, echo):
    echo("-r", "2", "-a", '{"compares": true}')
    path = shell.evaluation / "rollouts.jsonl"
    lines = [json.dumps(line) for line in shell.lines() if line["example"] == 0 or line["rollout"]]
    assert len(lines) == 3
    path.write_text("\n".join(lines) + "\n")
    compared = shell.folder / "compared"
    compared.unlink()
    endpoint.bodies.clear()
    shell.run("--resume", shell.evaluation)
    assert endpoint.asked == ["word 1", "word 1"]
    assert compared.read_text() == "2"


def test_headers_are_sent_with_every_call_and_are_not_kept(shell):
    fake = FakeOpenAI(models=["org/demo"], key="secret")
    with serving(fake.app()) as url:
        endpoint = ("-b", f"{url}/v1", "-n", 1, "-r", 1)
        assert "no key was sent" in shell.run("echo_env", *endpoint, status=2).stderr
        shell.run("echo_env", *endpoint, "--header", "Authorization: Bearer secret")
    (folder,) = shell.folder.glob("outputs/evals/echo_env--org--demo/*")
    assert [path for path in folder.iterdir() if "secret" in path.read_text()] == []


def test_a_secret_of_the_arguments_is_in_no_file_and_has_to_be_given_again(shell, url):
    (shell.folder / "keyed.py").write_text(
        "from echo_env import load_environment as load\n\n\n"
        "def load_environment(api_key):\n    return load(num=int(api_key.strip('LEAK-')))\n"
    )
    key = ["-a", json.dumps({"api_key": "LEAK-2"})]
    headers = ["-S", json.dumps({"extra_headers": {"Authorization": "Bearer LEAK-3"}})]
    done = shell.run("keyed.py", "-b", url, "-n", "2", "-r", "1", "-s", *key, *headers)
    written = [path.read_text() for path in shell.evaluation.iterdir() if path.suffix != ".partial"]
    assert len(written) >= 4
    assert not [text for text in (*written, done.stdout, done.stderr) if "LEAK" in text]
    for missing, lost in ((headers, "-a: api_key"), (key, "-S: extra_headers.Authorization")):
        refused = shell.run("--resume", shell.evaluation, *missing, status=2).stderr
        assert f"{lost} is a secret" in refused
    again = shell.run("--resume", shell.evaluation, "-r", "2", *key, *headers)
    assert "LEAK" not in again.stdout + again.stderr
    assert len(shell.lines()) == 4


def test_a_row_that_is_no_example_is_told(shell, echo):
    path = shell.folder / "echo_env.py"
    path.write_text(path.read_text().replace('"question": word, ', ""))
    error = echo(status=2).stderr
    assert re.search(r"echo_env\.py: .*\bprompt\b.*\bquestion\b", error), error


def test_more_examples_than_there_are_is_said(endpoint, echo):
    done = echo("-n", "9")
    assert re.search(r"-n: .* 4 examples .* 9; ", done.stderr)
    assert len(endpoint.bodies) == 4
