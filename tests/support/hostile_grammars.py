"""Grammars that do to the process which compiles them what their text says."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from rollout_actors.server.grammars import Compile, Grammar


@dataclass(frozen=True)
class HostileSpec:
    """Travels to that process. What was compiled is written into `file`, a line each."""

    file: Path

    def __call__(self) -> Compile:
        def compile_one(grammar: Grammar) -> None:
            with self.file.open("a") as file:
                file.write(f"{grammar.text}\n")
            match grammar.text:
                case "endless":
                    threading.Event().wait()
                case "deadly":
                    os._exit(1)
                case "wrong":
                    raise ValueError("no grammar")

        return compile_one
