"""Grammars of callers are tried in a process apart: one that takes too long is refused, and keeps
nobody else.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from hostile_grammars import HostileSpec

from rollout_actors.server import grammars
from rollout_actors.server.grammars import Grammar, GrammarKind, GrammarTrial, XgrammarSpec
from rollout_actors.server.service import RefusalError

pytestmark = pytest.mark.slow


def regex(text):
    return Grammar(GrammarKind.REGEX, text)


def test_one_that_takes_too_long_or_kills_its_process_is_refused_and_the_next_is_tried_in_a_new_one(
    tmp_path,
):
    trial = GrammarTrial(HostileSpec(tmp_path / "compiled"), compile_s=0.5)
    too_long = (
        "the regular expression of this call takes more than 0.5 s or too much memory to compile;"
        " send a simpler"
    )

    async def calls():
        for text in ("endless", "deadly", "endless"):  # of the third the answer is known
            with pytest.raises(RefusalError, match=too_long) as caught:
                await trial.require([regex(text)])
            assert caught.value.status == 400
        await trial.require([regex("a"), regex("b")])
        await trial.require([regex("wrong")])  # which vLLM says

    asyncio.run(calls())
    assert (tmp_path / "compiled").read_text().split() == ["endless", "deadly", "a", "b", "wrong"]


def test_one_that_has_passed_is_not_tried_again_unless_it_is_of_another_kind(tmp_path):
    trial = GrammarTrial(HostileSpec(tmp_path / "compiled"))
    for _ in range(3):
        asyncio.run(trial.require([regex("a")]))
    asyncio.run(trial.require([Grammar(GrammarKind.EBNF, "a")]))
    assert (tmp_path / "compiled").read_text().split() == ["a", "a"]


def test_one_that_allows_no_answer_is_refused(tmp_path):
    trial = GrammarTrial(HostileSpec(tmp_path / "compiled"))
    for _ in range(2):
        with pytest.raises(RefusalError, match="allows no answer; correct it") as caught:
            asyncio.run(trial.require([regex("nothing")]))
        assert caught.value.status == 400


def test_whoever_brings_none_does_not_wait_and_whoever_waits_too_long_is_told(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(grammars, "TURN_S", 0.2)
    trial = GrammarTrial(HostileSpec(tmp_path / "compiled"), compile_s=5.0)

    async def calls():
        trial._line.submit(trial._try, regex("a")).result()  # so that its process is there
        endless, behind = (
            asyncio.create_task(trial.require([regex(text)])) for text in ("endless", "b")
        )
        await trial.require([])
        assert not endless.done()
        outcomes = await asyncio.gather(endless, behind, return_exceptions=True)
        return [error.status for error in outcomes if isinstance(error, RefusalError)]

    assert asyncio.run(calls()) == [503, 503]


@pytest.mark.long
def test_of_the_engines_own_kinds_one_that_compiles_too_long_is_refused_and_usual_ones_are_not(
    demo_checkpoint,
):
    config = json.loads((demo_checkpoint / "config.json").read_text())
    # A fifth of the usual limit: how long the hostile one takes depends on the machine.
    spec = XgrammarSpec(str(demo_checkpoint), config["text_config"]["vocab_size"])
    trial = GrammarTrial(spec, compile_s=1.0)
    usual = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"enum": [1, 2, 3]}},
        "required": ["name"],
    }
    schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(usual))
    asyncio.run(trial.require([schema, regex("[a-z]+"), Grammar(GrammarKind.EBNF, 'root ::= "a"')]))
    hostile = {"type": "object", "properties": {f"p{number}": {} for number in range(7000)}}
    with pytest.raises(RefusalError, match="the JSON schema of this call takes more than 1 s"):
        asyncio.run(trial.require([Grammar(GrammarKind.JSON_SCHEMA, json.dumps(hostile))]))
    nothing = Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "#"}')
    with pytest.raises(RefusalError, match="the JSON schema of this call allows no answer"):
        asyncio.run(trial.require([nothing]))
