"""Grammars that callers bring for an answer, each compiled in a process apart before the engine has
it: some take minutes.

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

from rollout_actors.server.service import RefusalError

MAX_CHARS = 100_000
"""Largest size of all grammars of a call, as JSON."""
COMPILE_S = 5.0
"""Limit of compiling one grammar, which vLLM gives to regular expressions too."""
START_S = 120.0
"""Limit of starting the process, whose imports take long beside those of others."""
TURN_S = START_S + 60.0
"""Limit of a call's wait for the calls before it, the start of the process included."""
NUM_KNOWN = 1000
"""Grammars that are remembered to have passed."""


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

    @property
    def key(self) -> bytes:
        return hashlib.sha256(f"{self.kind}\0{self.text}".encode(errors="surrogatepass")).digest()


Compile = Callable[[Grammar], object]


@dataclass(frozen=True, slots=True)
class XgrammarSpec:
    """Makes what compiles as the engine of this model does, in the process that calls it."""

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
                    begin=one["begin"], schema=json.dumps(one["schema"]), end=one["end"]
                )
                for one in tag["structures"]
            ]
            return compiler.compile_structural_tag(items, tag["triggers"])

        by_kind: dict[GrammarKind, Callable[[str], object]] = {
            GrammarKind.JSON_SCHEMA: compiler.compile_json_schema,
            GrammarKind.REGEX: compiler.compile_regex,
            GrammarKind.EBNF: compiler.compile_grammar,
            GrammarKind.LARK: compiler.compile_lark,
            GrammarKind.STRUCTURAL_TAG: compile_tag,
        }
        return lambda grammar: by_kind[grammar.kind](grammar.text)


class GrammarTrial:
    """Compiles one grammar at a time in a process of its own, which starts with the first one and
    is ended where one takes too long.

    (That of a `ProcessPoolExecutor` would stay when the server is killed: it holds both ends of its
    pipe.)
    """

    def __init__(
        self, make_compile: Callable[[], Compile], *, compile_s: float = COMPILE_S
    ) -> None:
        """`make_compile` is called in the process, and travels there, so it is picklable."""
        self._make_compile, self._compile_s = make_compile, compile_s
        # One thread, and not of those that others wait for: calls stand in line here.
        self._line = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._known: dict[bytes, RefusalError | None] = {}
        """What became of grammars, the newest last; None: it has passed."""

    async def require(self, grammars: Iterable[Grammar]) -> None:
        """Raises RefusalError for a grammar that takes too long. What is no grammar at all passes:
        vLLM says what is wrong with it.
        """
        for grammar in grammars:
            if grammar.key not in self._known:
                try:
                    async with asyncio.timeout(TURN_S):
                        refusal = await asyncio.get_running_loop().run_in_executor(
                            self._line, self._try, grammar
                        )
                except TimeoutError as error:
                    raise RefusalError(
                        503,
                        f"the grammars of other calls are being compiled for {TURN_S:g} s; ask"
                        " again",
                    ) from error
                self._known[grammar.key] = refusal
                while len(self._known) > NUM_KNOWN:
                    del self._known[next(iter(self._known))]
            else:
                refusal = self._known[grammar.key]
            if refusal is not None:
                raise RefusalError(refusal.status, str(refusal))

    def _try(self, grammar: Grammar) -> RefusalError | None:
        """Return why the grammar is refused; None: it passes. Raises RefusalError where that cannot
        be told now.
        """
        pipe = self._connected()
        try:
            pipe.send(grammar)
            has_ended = pipe.poll(self._compile_s) and pipe.recv() is None
        except (EOFError, OSError):  # its process has died of it
            has_ended = False
        if not has_ended:
            self._end()
            return RefusalError(
                400,
                f"the {grammar.kind} of this call takes more than {self._compile_s:g} s or too much"
                " memory to compile; send a simpler one",
            )
        return None

    def _connected(self) -> Connection:
        if self._pipe is not None and self._process is not None and self._process.is_alive():
            return self._pipe
        context = multiprocessing.get_context("spawn")
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(
            target=_compile_all,
            args=(its_end, self._make_compile, self._compile_s),
            name="grammars",
            daemon=True,
        )
        self._process.start()
        its_end.close()
        try:
            is_ready = self._pipe.poll(START_S) and self._pipe.recv() is None
        except (EOFError, OSError):
            is_ready = False
        if not is_ready:
            self._end()
            raise RefusalError(
                503,
                "the process that compiles grammars did not start; see the server's output, or send"
                " no grammar",
            )
        return self._pipe

    def _end(self) -> None:
        assert self._process is not None
        assert self._pipe is not None
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._process = self._pipe = None


def _compile_all(pipe: Connection, make_compile: Callable[[], Compile], compile_s: float) -> None:
    """Be the process: answer None when it is ready, and for each grammar. It ends with the one that
    started it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    compile_one = make_compile()
    pipe.send(None)
    while True:
        try:
            grammar = pipe.recv()
        except EOFError:
            return
        # Whoever would end it may have been killed. The system does, and so whatever this process
        # is busy with.
        signal.setitimer(signal.ITIMER_REAL, 2 * compile_s)
        # whatever is wrong with a grammar vLLM finds, too, and tells its caller
        with suppress(Exception):
            compile_one(grammar)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send(None)
