"""Trial of grammars that callers bring, in a process apart: some take minutes to compile.

vLLM reads a grammar in the thread that answers everybody, and compiles it in a few threads of the
engine's process, without a limit that holds for every kind.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from rollout_actors.server.service import RefusalError

MAX_CHARS = 100_000
"""Largest size of all grammars of a call, as JSON."""
COMPILE_S = 5.0
"""Limit of compiling one grammar, as vLLM's for regular expressions."""
START_S = 120.0
"""Limit of starting the process, whose imports are slow beside other processes'."""
TURN_S = START_S + 60.0
"""Limit of a call's wait for those before it, the start of the process included."""
NUM_KNOWN = 1000
"""Grammars whose outcome is remembered."""


class GrammarKind(StrEnum):
    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"
    EBNF = "EBNF grammar"
    LARK = "Lark grammar"
    STRUCTURAL_TAG = "structural tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    kind: GrammarKind
    text: str


Compile = Callable[[Grammar], bool]
"""Returns False for a grammar that no answer can begin. May raise anything."""


@dataclass(frozen=True, slots=True)
class XgrammarSpec:
    """Makes the compiler of the engine of this model, in the process that calls it."""

    model_path: str
    vocab_size: int

    def __call__(self) -> Compile:
        import xgrammar
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self.vocab_size),
            cache_enabled=False,
        )

        def compile_tag(text: str) -> object:
            tag = json.loads(text)
            if "structures" not in tag:
                return compiler.compile_structural_tag(text)
            items = [
                xgrammar.StructuralTagItem(
                    begin=item["begin"], schema=json.dumps(item["schema"]), end=item["end"]
                )
                for item in tag["structures"]
            ]
            return compiler.compile_structural_tag(items, tag["triggers"])

        by_kind: dict[GrammarKind, Callable[[str], Any]] = {
            GrammarKind.JSON_SCHEMA: compiler.compile_json_schema,
            GrammarKind.REGEX: compiler.compile_regex,
            GrammarKind.EBNF: compiler.compile_grammar,
            GrammarKind.LARK: compiler.compile_lark,
            GrammarKind.STRUCTURAL_TAG: compile_tag,
        }

        def compile_one(grammar: Grammar) -> bool:
            matcher = xgrammar.GrammarMatcher(by_kind[grammar.kind](grammar.text))
            allowed = xgrammar.allocate_token_bitmask(1, self.vocab_size)
            matcher.fill_next_token_bitmask(allowed)
            return bool(allowed.any())

        return compile_one


class GrammarTrial:
    """Compiles one grammar at a time in a process, which starts with the first one.

    The process is ended when a grammar takes too long.
    """

    # No `ProcessPoolExecutor`: its process holds both ends of its pipe, and would stay when the
    # server is killed.

    def __init__(
        self, make_compile: Callable[[], Compile], *, compile_s: float = COMPILE_S
    ) -> None:
        """`make_compile` is picklable and called in the process."""
        self._make_compile = make_compile
        self._compile_s = compile_s
        # Calls stand in line here, and not in a thread that other work waits for.
        self._line = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._outcomes: dict[bytes, str] = {}
        """By digest, the newest last; empty: it has passed."""

    async def require(self, grammars: Iterable[Grammar]) -> None:
        """Raise RefusalError for a grammar that takes too long; what is none at all passes."""
        for grammar in grammars:
            text = f"{grammar.kind}\0{grammar.text}".encode(errors="surrogatepass")
            key = hashlib.sha256(text).digest()
            if key not in self._outcomes:
                loop = asyncio.get_running_loop()
                try:
                    async with asyncio.timeout(TURN_S):
                        outcome = await loop.run_in_executor(self._line, self._try, grammar)
                except TimeoutError as error:
                    why = f"the grammars of other calls are being compiled for {TURN_S:g} s"
                    raise RefusalError(503, f"{why}; ask again") from error
                self._outcomes[key] = outcome
                while len(self._outcomes) > NUM_KNOWN:
                    del self._outcomes[next(iter(self._outcomes))]
            if problem := self._outcomes[key]:
                raise RefusalError(400, problem)

    def _try(self, grammar: Grammar) -> str:
        """Return why the grammar is refused; empty: it passes.

        Raises RefusalError where that cannot be told now.
        """
        pipe = self._connected()
        try:
            pipe.send(grammar)
            allows = pipe.recv() if pipe.poll(self._compile_s) else None
        except (EOFError, OSError):  # its process has died of it
            allows = None
        if allows is not None:
            # Of one that allows nothing vLLM would sample a token and then fail.
            return "" if allows else f"the {grammar.kind} of this call allows no answer; correct it"
        self._end()
        limit = f"{self._compile_s:g} s or too much memory"
        why = f"the {grammar.kind} of this call takes more than {limit} to compile"
        return f"{why}; send a simpler one"

    def _connected(self) -> Connection:
        if self._pipe is not None and self._process is not None and self._process.is_alive():
            return self._pipe
        context = multiprocessing.get_context("spawn")
        self._pipe, its_end = context.Pipe()
        arguments = (its_end, self._make_compile, self._compile_s)
        self._process = context.Process(target=_compile_all, args=arguments, daemon=True)
        self._process.start()
        its_end.close()
        try:
            is_ready = self._pipe.poll(START_S) and self._pipe.recv() is None
        except (EOFError, OSError):
            is_ready = False
        if not is_ready:
            self._end()
            why = "the process that compiles grammars did not start; see the server's output"
            raise RefusalError(503, f"{why}, or send no grammar")
        return self._pipe

    def _end(self) -> None:
        assert self._process is not None
        assert self._pipe is not None
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._process = None
        self._pipe = None


def _compile_all(pipe: Connection, make_compile: Callable[[], Compile], compile_s: float) -> None:
    """Answer None when ready and, until the process that started this one has ended, for each
    grammar whether it allows an answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    compile_one = make_compile()
    pipe.send(None)
    while True:
        try:
            grammar = pipe.recv()
        except EOFError:
            return
        # The server that would end this process may have been killed. The system then does, and
        # whatever this process is busy with.
        signal.setitimer(signal.ITIMER_REAL, 2 * compile_s)
        allows = True
        # vLLM finds whatever is wrong with a grammar, too, and tells its caller.
        with suppress(Exception):
            allows = compile_one(grammar)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send(allows)
