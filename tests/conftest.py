"""Fixtures of the whole session: one Ray cluster, one demo checkpoint and three engines."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from started_processes import SESSION, StartedProcesses

from rollout_actors.warm import warm_python

if TYPE_CHECKING:
    from engine_support import EnginePool
    from rank_support import RankProcesses

# Nothing is ever fetched, and Ray leaves the environment of its workers alone.
os.environ["HF_HUB_OFFLINE"] = "1"
# Threads that spin while they wait for each other cost more than they bring beside engines on the
# same two cores.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
# One warm server for all engines of this process's tests, in a folder of its own; the path is short
# because a socket lives in it.
os.environ[warm_python.FOLDER] = f"/tmp/rmwarm-{os.getpid()}"
# The session's mark in the environment of all that it starts, with that of its workers.
os.environ.setdefault(SESSION, str(os.getpid()))
# Ray's own processes look at the machine every few seconds, which nobody asks for here: a tenth of
# a core for each cluster.
os.environ |= {
    "REPORTER_UPDATE_INTERVAL_MS": "600000",
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "600",
    "AUTOSCALER_UPDATE_INTERVAL_S": "600",
    # Nor does it start a worker for each of a cluster's CPUs before anybody asks for one.
    "RAY_prestart_worker_first_driver": "0",
}
# The pool reports every failed call itself.
os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
# A worker beside others has one core.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
# Under nohup the tested commands would ignore SIGHUP as well; a handler is not inherited.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
# What collecting thousands of tests makes is not garbage.
gc.disable()


_STARTED = pytest.StashKey[StartedProcesses]()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker's are counted by who started it
        config.stash[_STARTED] = StartedProcesses()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Write how many processes were started, and failed tests also to `scripts/stages.sh`."""
    if started := config.stash[_STARTED].stop():
        terminalreporter.write_line(
            "started: " + ", ".join(f"{number} {kind}" for kind, number in sorted(started.items()))
        )
    if path := os.environ.get("FAILED_TESTS"):
        stats = terminalreporter.stats
        failed = [*stats.get("failed", []), *stats.get("error", [])]
        with Path(path).open("a", encoding="utf-8") as file:
            for report in failed:
                errors = [line for line in report.longreprtext.splitlines() if line[:2] == "E "]
                file.write("\n".join([report.nodeid, *errors[:3]]) + "\n")


def pytest_collection_finish() -> None:
    gc.enable()
    # Hypothesis draws constants of every module of ours that a process has happened to import, so a
    # test's examples would depend on the tests before it.
    if providers := sys.modules.get("hypothesis.internal.conjecture.providers"):
        providers.is_local_module_file = lambda _: False  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _modules_are_looked_for_where_they_were() -> Iterator[None]:
    """Forget folders that environments' files added: the next test's module is another."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def _hidden_secrets_end_with_the_test() -> Iterator[None]:
    """Forget the secrets that a test hides, which would be masked in messages of the others."""

    def hidden() -> set[str]:
        secrets = sys.modules.get("shared.config.secrets")
        return set() if secrets is None else secrets._hidden

    before = set(hidden())
    yield
    hidden().intersection_update(before)


@pytest.fixture(autouse=True)
def _the_process_is_left_as_it_was() -> Iterator[None]:
    """Fail where a test leaves a setting behind that others in its worker would find."""
    before = gc.get_threshold(), gc.isenabled(), Path.cwd()
    yield
    assert (gc.get_threshold(), gc.isenabled(), Path.cwd()) == before, (
        "this test, or a fixture of it, leaves the collector or the working folder changed"
    )


@pytest.fixture(autouse=True)
def _the_process_outlives_its_parent() -> Iterator[None]:
    """Undo what an actor does that a test makes in this process: tests may run in the background,
    behind a shell that has ended.
    """
    yield
    if (protocols := sys.modules.get("shared.protocols")) is not None:
        ctypes.CDLL(None).prctl(protocols.PR_SET_PDEATHSIG, 0)


@pytest.fixture(scope="session", autouse=True)
def _warm_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep the server that forks the engines of a session that has any, by a connection."""
    if not any(item.get_closest_marker("engine") for item in request.session.items):
        yield
        return
    from engine_support import small_settings

    from rollout_actors.engine.settings import engine_environment

    settings = small_settings(Path("any"))
    folder = Path(os.environ[warm_python.FOLDER])
    with warm_python.connect(folder, os.environ | engine_environment(settings)):
        yield


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankProcesses]:
    """Two learner ranks' processes, for one job after the other."""
    from rank_support import RankProcesses

    processes = RankProcesses(2)
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Start a cluster of this session's own, which believes that it has 8 CPUs."""
    import ray

    from launch.processes.ray_connection import patient_start

    folder = tempfile.mkdtemp(prefix="rm", dir="/tmp")  # short, because sockets live in it
    # An actor with a `runtime_env` would find the tests' modules too, but never a waiting process.
    modules = [str(Path(__file__).parent / name) for name in ("fakes", "fixtures")]
    with pytest.MonkeyPatch.context() as environment, patient_start():
        environment.setenv("PYTHONPATH", os.pathsep.join(modules), prepend=os.pathsep)
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            _system_config={"metrics_report_interval_ms": 1000},
        )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def _fake_actors(ray_cluster: None) -> Iterator[list[Any]]:
    import ray
    from fake_actors import create_fake_actor

    actors = [create_fake_actor(name) for name in ("actor-0", "actor-1")]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def fake_actors(_fake_actors: list[Any]) -> Iterator[list[Any]]:
    """`FakeActor`s actor-0 and actor-1 without troubles; other tests share them, so end none."""
    import ray

    ray.get([actor.become.remote() for actor in _fake_actors])
    yield _fake_actors
    ray.get([actor.become.remote() for actor in _fake_actors])


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with its random weights: tokenizer, processor and all."""
    from launch.tools.demo.model import make_demo_model
    from shared.prompts import DEFAULT_USER_PROMPT

    folder = tmp_path_factory.mktemp("demo") / "model"
    make_demo_model(folder, seed=17, prompt=DEFAULT_USER_PROMPT)
    return folder


@pytest.fixture(scope="session")
def demo_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The language model of the demo of environments, with its random weights."""
    from launch.tools.demo.language_model import make_demo_lm

    folder = tmp_path_factory.mktemp("lm") / "model"
    make_demo_lm(folder, seed=17)
    return folder


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few of the demo's scenes: `train.jsonl` and `val.jsonl` with their images."""
    return _few_scenes(tmp_path_factory, "boxes")


@pytest.fixture(scope="session")
def polygon_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same kind of scenes, with an outline polygon for every odd digit."""
    return _few_scenes(tmp_path_factory, "mixed")


def _few_scenes(tmp_path_factory: pytest.TempPathFactory, geometry: str) -> Path:
    from launch.tools.demo.scenes import DemoGeometry, make_demo_data

    folder = tmp_path_factory.mktemp("demo") / "data"
    make_demo_data(folder, seed=17, num_train=64, num_val=16, geometry=DemoGeometry(geometry))
    return folder


@pytest.fixture(scope="session")
def warm_checkpoint(
    demo_checkpoint: Path, demo_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The demo's model after some steps of channel A on those few scenes.

    It writes objects, not yet in the right places. One worker makes it for all.
    """
    from config_support import configuration
    from learner_support import make_learner

    from shared.schedule import RunSchedule

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "warm"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            run_dir = tmp_path_factory.mktemp("warming")
            config = configuration(
                demo_checkpoint,
                demo_data,
                run_dir,
                stage2_ab__schedule__warmup_steps=25,
                global_max_length=512,
                training__max_steps=25,
                training__effective_batch_size=16,
                training__learning_rate=2e-3,
                training__lr_warmup_steps=3,
            )
            learner = make_learner(config)
            for plan in RunSchedule(config).plans():
                learner.next_requests(plan)
                learner.finish_step()
            learner.publisher.checkpoint(run_dir / "checkpoint").write()
            (run_dir / "checkpoint").rename(folder)
    return folder


@pytest.fixture(scope="session")
def engine_pool(ray_cluster: None, demo_checkpoint: Path) -> Iterator[EnginePool]:
    """Three actors with real engines. Version and weights are the last test's: sync first."""
    from engine_support import TIMEOUTS, EnginePool, create_actor, small_settings

    from launch.processes.fleet import Fleet
    from launch.processes.rollout_client import RolloutClient
    from launch.processes.rounds import RoundSize

    names = [f"actor-{i}" for i in range(3)]
    settings = small_settings(demo_checkpoint)
    actors = {name: create_actor(name, settings, i) for i, name in enumerate(names)}
    pool = RolloutClient(Fleet(list(actors.values()), names, TIMEOUTS), RoundSize(8))
    pool.start()
    yield EnginePool(actors, pool)
    pool.close()
