import pytest

from launch.checks.host import compiler_problems, vllm_import
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
