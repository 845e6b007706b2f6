import gc
import importlib
import sys

import pytest

from launch.checks import host
from launch.checks.host import compiler_problems, hidden, uncollected, vllm_import
from shared.weight_sync.transports import Device
from tests.fixtures.config_changes import load

PIPELINE = "stage2_ab.channel_b.enable_pipeline"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["actors", "colocate"])
def test_a_vllm_that_is_installed_and_cannot_be_imported_is_a_problem(mode, tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    error = "module 'cutlass' has no attribute 'CUDA_VERSION'"
    (tmp_path / "vllm" / "__init__.py").write_text(f'raise AttributeError("{error}")')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = load({"rollout_matching.vllm": {"mode": mode}, PIPELINE: mode == "actors"})
    with vllm_import(config.rollout_matching, 300.0) as problems:
        (problem,) = problems()
    assert problem.startswith(f"installation: vLLM cannot be imported (AttributeError: {error})")


@pytest.mark.slow
def test_an_import_of_vllm_is_tried_again_after_a_failure_or_a_change(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)  # where the other process finds this module first
    tried = tmp_path / "tried"
    module = tmp_path / "rollout_actors" / "engine" / "vllm_engine.py"
    module.parent.mkdir(parents=True)
    for folder in (module.parent, module.parent.parent):
        (folder / "__init__.py").touch()
    config = load({})

    def problems(source):
        module.write_text(f"open({str(tried)!r}, 'a').write('.')\n{source}")
        with vllm_import(config.rollout_matching, 300.0) as problems:
            return len(list(problems()))

    assert problems("raise OSError") == 1
    assert [problems(""), problems("")] == [0, 0]
    assert tried.read_text() == ".."
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "another")
    assert [problems("raise OSError"), problems("raise OSError")] == [1, 1]
    assert tried.read_text() == "...."


def test_a_change_of_packages_own_code_or_machine_changes_the_key_of_a_kept_import(
    tmp_path, monkeypatch
):
    packages, own, user = (tmp_path / name for name in ("packages", "own", "user"))
    for folder in (packages, own):
        folder.mkdir()
    (packages / "removed").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr("site.getsitepackages", lambda: [str(packages), str(tmp_path / "missing")])
    monkeypatch.setattr("site.getusersitepackages", lambda: str(user))
    keys = [host.installation_state([own]), host.installation_state([own])]
    assert len({*keys}) == 1
    for module in (packages / "new.py", own / "engine.py", user / "new.py"):
        module.parent.mkdir(exist_ok=True)
        module.touch()
        keys.append(host.installation_state([own]))
    monkeypatch.setattr("platform.uname", lambda: "another machine")
    keys.append(host.installation_state([own]))
    assert len({*keys}) == 5


def test_a_hidden_package_is_found_again_afterwards_and_an_imported_one_is_not_hidden(tmp_path):
    (tmp_path / "out_of_sight.py").touch()
    sys.path.insert(0, str(tmp_path))
    try:
        with hidden("out_of_sight"), pytest.raises(ModuleNotFoundError):
            importlib.import_module("out_of_sight")
        module = importlib.import_module("out_of_sight")
        with hidden("out_of_sight"):
            assert importlib.import_module("out_of_sight") is module
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("out_of_sight", None)


def test_the_garbage_collector_is_off_only_while_packages_are_imported():
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), uncollected():
        importlib.import_module("no_such_package")
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled(), "as it was"
    finally:
        gc.enable()


def test_a_run_without_engines_of_its_own_imports_no_vllm(monkeypatch):
    monkeypatch.setattr("subprocess.Popen", pytest.fail)
    config = load({"rollout_matching.rollout_backend": "hf", PIPELINE: False})
    with vllm_import(config.rollout_matching, 300.0) as problems:
        assert list(problems()) == []


@pytest.mark.parametrize(
    ("device", "variable", "program"),
    [(Device.CPU, "CXX", "g++"), (Device.CUDA, "CC", "gcc"), (Device.CUDA, "CC", "clang")],
)
def test_compiled_blocks_need_a_compiler(device, variable, program, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    model = load({"model.compile_blocks": True}).model
    (problem,) = compiler_problems(model, device)
    assert problem.startswith("model.compile_blocks: true needs the compiler g")
    assert f"environment variable {variable}, " in problem
    assert not list(compiler_problems(load({}).model, device))
    (tmp_path / program).touch(mode=0o755)
    assert not list(compiler_problems(model, device))
    monkeypatch.setenv(variable, "other")
    (problem,) = compiler_problems(model, device)
    assert "the compiler other, which is not installed" in problem
