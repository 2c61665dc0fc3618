"""Options that depend on the device and on who asks."""

import pytest

from gapless import LLM, AsyncLLM
from gapless.config import EngineConfig
from gapless.errors import ConfigError


def test_the_token_budget_is_the_devices_unless_it_is_given() -> None:
    assert EngineConfig().for_device("cuda").step_tokens == 8192
    assert EngineConfig().for_device("cpu").step_tokens == 2048
    assert EngineConfig(token_budget=100).for_device("cuda").step_tokens == 100
    assert EngineConfig().for_streams().for_device("cuda").step_tokens == 2048
    assert EngineConfig(token_budget=100).for_streams().step_tokens == 100


def test_a_chunk_is_at_most_the_budget() -> None:
    assert EngineConfig(chunk_size=50).for_device("cpu").chunk_tokens == 50
    assert EngineConfig(chunk_size=5000).for_device("cpu").chunk_tokens == 2048
    assert EngineConfig().for_device("cuda").chunk_tokens == 8192


@pytest.mark.parametrize("budget", [0, -1, True, 1.5, (1 << 20) + 1])
def test_an_impossible_token_budget_is_refused_by_name(budget: object) -> None:
    with pytest.raises(ConfigError, match="token_budget="):
        EngineConfig(token_budget=budget)  # type: ignore[arg-type]


def test_streams_have_the_smaller_budget_whatever_the_device() -> None:
    options = {"load_format": "dummy", "device": "cpu", "num_blocks": 16}
    with LLM("tiny-llama", **options) as llm:  # type: ignore[arg-type]
        assert llm.config.token_budget is None
    streaming = AsyncLLM("tiny-llama", **options)  # type: ignore[arg-type]
    try:
        assert streaming.config.token_budget == 2048
    finally:
        streaming.close()
    with_own = AsyncLLM("tiny-llama", token_budget=64, **options)  # type: ignore[arg-type]
    try:
        assert with_own.config.token_budget == 64
    finally:
        with_own.close()
