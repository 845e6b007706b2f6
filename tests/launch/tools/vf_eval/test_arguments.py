"""The command line of `vf-eval`, its endpoint's address and key, and a saved evaluation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.tools.vf_eval.arguments import check_sampling, read_options
from launch.tools.vf_eval.endpoint import find_endpoint
from launch.tools.vf_eval.record import EvaluationSettings, read_evaluation
from shared.errors import ConfigError, RecordError

ENVIRONMENTS = r"one of .*\barithmetic, .*, or a module or \.py file with load_environment"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-a", '{"a": 1, "b": }'], "-a/--env-args: is not JSON: Expecting value at column 15"),
        (
            ["-S", '{"a": 1\n "b": 2}'],
            "-S/--sampling-args: is not JSON: Expecting ',' delimiter at line 2, column 2",
        ),
        (["-S", ""], "-S/--sampling-args: is not JSON: Expecting value at column 1"),
        (["-S", "[1]"], "-S/--sampling-args: is list, not an object"),
        (
            ["-n", "0"],
            "-n/--num-examples: must be an integer of at least 1, or -1 for all, got '0'",
        ),
        (["-r", "many"], "-r/--rollouts-per-example: must be an integer of at least 1, got 'many'"),
        (["-T", "-1"], "-T/--temperature: must be a number of at least 0, got '-1'"),
        (["-c", "-2"], "-c/--max-concurrent: must be an integer of at least 1, or -1 for all, got"),
        (["-C", " ,"], "-C/--state-columns: has no name: ' ,'"),
        (["--rollout-timeout", "0"], "--rollout-timeout: must be a number of seconds over 0, got"),
        (["--header", "Name"], "--header: must be like 'Name: value', got 'Name'"),
        (["--solved-at", "nan"], "--solved-at: must be a number, got 'nan'"),
    ],
)
def test_a_malformed_argument_is_told_with_its_position(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        read_options(["e", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], rf"^ENVIRONMENT: is missing; .* `vf-eval NAME`: {ENVIRONMENTS}"),
        (["e", "-D", "name"], "-H"),
        (["e", "-t", "5", "-S", '{"max_tokens": 6}'], "-t: is 5, but max_tokens in -S is 6"),
        (["--resume", "a", "-o", "b"], "-o: .*; leave out -o or --resume"),
    ],
)
def test_arguments_that_contradict_each_other_are_told(arguments, message):
    with pytest.raises(ConfigError, match=message):
        read_options(arguments)


def test_commands_of_the_verifiers_package_are_read():
    options = read_options(
        ["e", "-n", "5", "-r", "3", "-s", "-f", "10", "-N", "--header", "A: b:c", "--header", "D:"]
    )
    assert options.headers == {"A": "b:c", "D": ""}
    assert (options.save, options.interleave_scoring) == (True, False)


def test_help_names_the_environments_that_there_are(capsys):
    with pytest.raises(SystemExit):
        read_options(["--help"])
    assert re.search(ENVIRONMENTS, " ".join(capsys.readouterr().out.split()))


@pytest.mark.parametrize(
    ("sampling", "message_type", "sent"),
    [
        (
            {"seed": 3, "timeout": 20, "n": 1, "logprobs": True, "extra_body": {"top_k": 3}},
            "chat",
            {"seed": 3, "timeout": 20, "n": 1, "logprobs": True, "extra_body": {"top_k": 3}},
        ),
        ({"logprobs": True}, "completion", {"logprobs": 1}),
        ({"logprobs": 5}, "completion", {"logprobs": 5}),
    ],
)
def test_arguments_of_the_api_are_sent_and_a_completion_s_log_probabilities_by_their_number(
    sampling, message_type, sent
):
    assert check_sampling(sampling, message_type) == sent


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (
            {"top_k": 3},
            "top_k is not an argument of OpenAI's API (did you mean top_p?); additional",
        ),
        ({"min_p": 0.1}, """extra_body: -S '{"extra_body": {"min_p": 0.1}}'"""),
        ({"self": 1}, "self is not an argument"),
        ({"model": "other"}, "cannot set model: -m sets it"),
        ({"messages": []}, "cannot set messages: the environment sets them"),
        ({"tools": []}, "cannot set tools: the environment provides them"),
        ({"stream": True}, "cannot set stream: a rollout needs whole answers"),
        ({"n": 2}, "n is 2, but a rollout takes one answer; leave it out, and set the rollouts"),
        ({"extra_body": 3}, "extra_body is 3, not an object"),
    ],
)
def test_what_every_call_would_fail_of_is_refused_with_where_it_belongs(sampling, message):
    with pytest.raises(ConfigError) as caught:
        check_sampling({"temperature": 0.5} | sampling, "chat")
    (problem,) = caught.value.problems
    assert message in problem


NEEDS_A_KEY = "is not set, and https://api.openai.com/v1 needs a key"
ANOTHER = "or name another variable with -k, or give your own endpoint with -b or"


@pytest.mark.parametrize(
    ("url", "variable", "parts"),
    [
        (None, None, ("variable OPENAI_API_KEY", NEEDS_A_KEY, "`export OPENAI_API_KEY=", ANOTHER)),
        (None, "MINE", ("variable MINE", NEEDS_A_KEY, "`export MINE=", ANOTHER)),
        (
            "http://127.0.0.1:9/v1",
            "MINE",
            ("-k: the variable MINE is not set; leave -k out, or `export MINE=",),
        ),
    ],
)
def test_a_key_variable_that_is_missing_is_named(url, variable, parts):
    with pytest.raises(ConfigError) as caught:
        find_endpoint(url, variable, {})
    message = str(caught.value)
    assert [part for part in parts if part not in message] == []
    assert ("leave -k out" in message) == (url is not None)


SAVED = EvaluationSettings.from_options(read_options(["echo", "-m", "demo", "-T", "0.5"]))


def test_resume_refuses_other_settings_and_names_what_differs():
    repeated = read_options(["echo", "--resume", "a", "-m", "demo", "-T", "0.5", "-n", "7"])
    assert SAVED.resumed(repeated, Path("a")).num_examples == 7
    other = ["-a", '{"num": 9, "seed": null}', "-m", "other", "-T", "0.7", "-t", "8"]
    other += ["-C", "letters"]
    with pytest.raises(ConfigError) as caught:
        SAVED.resumed(read_options(["arithmetic", "--resume", "a", *other]), Path("a"))
    *differences, remedy = caught.value.problems
    assert remedy.startswith("a: ") and "--resume" in remedy
    sampling = '{"max_tokens": 8, "temperature": 0.7}', '{"temperature": 0.5}'
    expected = [
        ("ENVIRONMENT", '"arithmetic"', '"echo"'),
        ("-a", '{"num": 9, "seed": null}', "{}"),
        ("-m", '"other"', '"demo"'),
        ("-t, -T, -S, --tokens", *sampling),
        ("-C", "letters", ""),
    ]
    for line, (key, now, before) in zip(differences, expected, strict=True):
        assert line.startswith(f"{key}: is {now}, ") and line.endswith(f" was {before}")


@pytest.mark.parametrize(
    ("content", "field", "problem"),
    [
        (b'{"environment": ', "evaluation", "Invalid JSON: EOF"),
        (b"a\xff", "evaluation", "Invalid JSON: expected value"),
        (b"[]", "evaluation", "Input should be an object"),
        (b"{}", "environment", "Field required"),
        (b'{"environment": 3}', "environment", "Input should be a valid string"),
    ],
)
def test_a_broken_evaluation_is_refused_with_its_file_and_remedy(tmp_path, content, field, problem):
    SAVED.write(tmp_path)
    assert read_evaluation(tmp_path) == SAVED
    path = tmp_path / "evaluation.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=re.escape(f"{path}: {field}: {problem}")) as caught:
        read_evaluation(tmp_path)
    assert str(caught.value).endswith("start a new evaluation without --resume")


def test_resume_of_a_folder_that_is_none_is_told():
    with pytest.raises(ConfigError, match=r"--resume: nowhere/evaluation\.json .*read"):
        read_evaluation(Path("nowhere"))
