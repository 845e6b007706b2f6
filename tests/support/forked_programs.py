"""Programs of a few lines, each a process of its own to its very end, forked from one that has imported what they need: that takes longer than they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVER = """
import asyncio, json, os, signal, sys, threading, time
sys.path.insert(0, "tests/support")
from environment_support import Talk, rows
from rollout_actors.environments.lifecycle import cleanup, teardown
from scripted_client import ScriptedClient, chat_response

print("ready", flush=True)
for line in sys.stdin:
    if not os.fork():
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
asked = json.loads(line)
for number, path in enumerate((os.devnull, *asked["files"])):
    os.dup2(os.open(path, os.O_WRONLY if number else os.O_RDONLY), number)
print(os.getpid(), flush=True)
exec(compile(asked["code"], "<string>", "exec"))
"""


@cache
def _server() -> subprocess.Popen[str]:
    """Ends with this process, whose end of its input it reads."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n", "it has said on stderr why not"
    return server


def ran(code: str, *, signal_at: str | None = None, sign: signal.Signals = signal.SIGTERM) -> tuple[list[str], int, str]:
    """Lines that it wrote, how it ended, and what it complained of; it gets the signal when it has written `signal_at`."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        said, complaints = Path(folder, "said"), Path(folder, "complaints")
        os.mkfifo(said)
        complaints.touch()
        server.stdin.write(json.dumps({"code": code, "files": [str(said), str(complaints)]}) + "\n")
        server.stdin.flush()
        with said.open() as pipe:
            process, lines = int(pipe.readline()), []
            too_late = threading.Timer(120, os.kill, (process, signal.SIGKILL))
            too_late.start()
            try:
                for line in pipe:
                    lines.append(line.strip())
                    if lines[-1] == signal_at:
                        os.kill(process, sign)
            finally:
                too_late.cancel()
        return lines, int(server.stdout.readline()), complaints.read_text()
