"""What one steady decode step costs the host: schedule, write, enqueue and apply, with no device work at all.

The engine's real loop, scheduler, ring and step buffers run over queues that do nothing, so every step gives the
same healthy tokens and every wait is over at once. Prints one JSON line for each case::

    python benchmarks/host_cost.py --json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gapless.engine.admission import AdmissionLimits
from gapless.engine.block_pool import BlockPool
from gapless.engine.engine import Engine
from gapless.engine.prefix_cache import PrefixCache
from gapless.engine.request import EngineRequest
from gapless.engine.results import RequestUpdate
from gapless.engine.scheduler import Scheduler, SchedulerLimits
from gapless.errors import EngineDeadError
from gapless.layers.forward_inputs import ForwardInputs
from gapless.pipeline.device_step import DeviceStep
from gapless.pipeline.ring import Ring
from gapless.pipeline.step_buffers import BufferLimits
from gapless.pipeline.streams.protocol import Event, Stream
from gapless.sampling.sampler import Sampler
from gapless.sampling_params import SamplingParams

BLOCK_SIZE = 16
VOCAB_SIZE = 128_256


class NullEvent:
    """Always reached."""

    def synchronize(self) -> None:
        """Return at once."""


class NullStream:
    """Drops all work."""

    def submit(self, work: Callable[[], None]) -> None:
        """Drop it."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Drop it."""

    def record(self, event: Event) -> None:
        """Nothing to mark."""

    def wait(self, event: Event) -> None:
        """Nothing to wait for."""


class NullQueues:
    """A device that takes no time and whose tokens are whatever its memory holds."""

    device = torch.device("cpu")

    def stream(self, name: str) -> Stream:
        """Make a stream."""
        return NullStream()

    def event(self) -> Event:
        """Make an event."""
        return NullEvent()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Ones: read as a step's output, they are healthy rows."""
        return torch.ones(num_bytes, dtype=torch.uint8)

    def elapsed_s(self, start: Event, end: Event) -> float:
        """No device time."""
        return 0.0

    def close(self) -> None:
        """Nothing to end."""


class NullModel:
    """Never called: its stream drops the work."""

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Give no logits."""
        return torch.empty(0, VOCAB_SIZE)


class Ignore:
    """Nobody listens."""

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        """Drop the news."""

    def engine_died(self, error: EngineDeadError) -> None:
        """Fail the benchmark."""
        raise error


def build(rows: int, token_budget: int, depth: int, context: int) -> Engine:
    """An engine with room for ``rows`` requests of ``context`` tokens."""
    device = torch.device("cpu")
    max_blocks = -(-context // BLOCK_SIZE)
    num_blocks = rows * max_blocks
    max_changes = token_budget + rows + 4096
    device_step = DeviceStep(
        model=NullModel(),
        sampler=Sampler(max_rows=rows, device=device),
        max_rows=rows,
        max_blocks_per_row=max_blocks,
        block_size=BLOCK_SIZE,
        device=device,
    )
    ring = Ring(
        queues=NullQueues(),
        depth=depth,
        limits=BufferLimits(max_tokens=token_budget, max_rows=rows, max_changes=max_changes, max_masked=rows),
        device_step=device_step,
    )
    scheduler = Scheduler(
        SchedulerLimits(
            max_rows=rows,
            token_budget=token_budget,
            chunk_size=token_budget,
            block_size=BLOCK_SIZE,
            max_changes=max_changes,
            prefix_caching=True,
        ),
        BlockPool(num_blocks, PrefixCache()),
    )
    limits = AdmissionLimits(
        vocab_size=VOCAB_SIZE, max_model_len=context, kv_capacity=num_blocks * BLOCK_SIZE, max_waiting=rows
    )
    return Engine(scheduler=scheduler, ring=ring, sink=Ignore(), limits=limits, step_timeout_s=60)


def measure(rows: int, token_budget: int, depth: int, steps: int) -> dict[str, object]:
    """Milliseconds of host time a step over ``steps`` steps in steady decode, as the median of ten parts."""
    prompt = 64
    engine = build(rows, token_budget, depth, context=prompt + steps + 1024)
    params = SamplingParams(temperature=0.0, max_tokens=steps + 900)
    requests = [
        EngineRequest(
            prompt_token_ids=[(row * 7 + i) % VOCAB_SIZE for i in range(prompt)], params=params, streams=False
        )
        for row in range(rows)
    ]
    engine.submit(requests, lambda ids: None)
    for _ in range(rows * prompt // token_budget + 100):
        engine.run_once()
    assert engine.counters().running == rows
    part = max(steps // 10, 1)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(part):
            engine.run_once()
        times.append((time.perf_counter() - start) / part * 1e3)
    return {
        "rows": rows,
        "token_budget": token_budget,
        "depth": depth,
        "steps": part * 10,
        "ms_per_step": round(statistics.median(times), 4),
        "ms_per_step_best": round(min(times), 4),
        "ms_per_step_worst": round(max(times), 4),
    }


def main() -> None:
    """Measure each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON line a case")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--token-budget", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    for rows in args.rows:
        for budget in args.token_budget:
            case = measure(rows, budget, args.depth, args.steps)
            if args.json:
                print(json.dumps(case), flush=True)
            else:
                print(f"{rows:4d} rows, budget {budget:6d}: {case['ms_per_step']} ms a step", flush=True)


if __name__ == "__main__":
    main()
