"""GPUs that are too old for the kernels are refused in one line; what torch says of the GPU is replaced here."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gapless import LLM
from gapless.cli.main import app
from gapless.engine.assembly import check_capability, resolve_device
from gapless.errors import ConfigError

REFUSAL = "device 'Tesla T4' has compute capability 7.5, and gapless needs 8.0 (Ampere) or later: use device='cpu'"


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    """A machine with this GPU, as far as torch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 1)])
def test_from_ampere_on(capability: tuple[int, int]) -> None:
    check_capability("a GPU", capability)


@pytest.mark.parametrize("capability", [(3, 7), (6, 1), (7, 0), (7, 9)])
def test_before_ampere(capability: tuple[int, int]) -> None:
    major, minor = capability
    with pytest.raises(ConfigError, match=rf"device 'a GPU' has compute capability {major}\.{minor}, .* needs 8\.0"):
        check_capability("a GPU", capability)


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_an_old_gpu_is_refused_and_the_cpu_beside_it_is_not(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend(monkeypatch, "Tesla T4", (7, 5))
    with pytest.raises(ConfigError) as refusal:
        resolve_device(name)
    assert str(refusal.value) == REFUSAL
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_a_newer_gpu_is_taken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend(monkeypatch, "NVIDIA A100", (8, 0))
    assert resolve_device(name) == torch.device("cuda", 0)


def test_an_old_gpu_is_refused_before_a_model_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, "Tesla T4", (7, 5))
    with pytest.raises(ConfigError, match="Tesla T4"):
        LLM(tmp_path / "no such model")


def test_doctor_says_of_an_old_gpu_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "Tesla T4", (7, 5))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "try cpu     works" in result.stdout
    assert f"try cuda    FAILED: ConfigError: {REFUSAL}" in result.stdout
    assert result.stderr.strip().splitlines()[-1] == f"error: {REFUSAL}"
