"""A submit that is cancelled in the very turn of the loop in which the engine accepts it."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fixtures.engine_clients import ClientInLoop, is_idle, until
from fixtures.served_models import chain, table_checkpoint
from gapless import EngineConfig, SamplingParams


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientInLoop]:
    folder = table_checkpoint(tmp_path_factory.mktemp("model"), chain("S", "S"), max_position_embeddings=32_768)
    with ClientInLoop(folder, EngineConfig(device="cpu", num_blocks=2100)) as client:
        yield client


@pytest.mark.parametrize("n", [1, 3])
def test_c54_a_request_that_is_left_as_it_is_accepted_ends(served: ClientInLoop, n: int) -> None:
    async def everything() -> None:
        client, loop = served.client, asyncio.get_running_loop()
        errors: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda loop, context: errors.append(context))
        prompt = await client.prepare_prompt("S")
        # Far more steps than the wait below has time for: it must not be idle because it has ended.
        params = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0, n=n)
        task = asyncio.create_task(client.submit(prompt, params))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.3)  # the engine's answer is in the socket now, and nobody has read it
        loop.call_soon(task.cancel)  # runs right before the socket is read
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(client, is_idle, 2.0)
        assert client.num_live == 0
        assert errors == []

    served.run(everything())
