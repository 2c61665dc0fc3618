"""Runs and comparisons with chosen figures, for tests of what is made of them."""

from collections.abc import Sequence

from gapless.bench.comparison import Comparison
from gapless.bench.figures import RequestFigures, RunFigures, StepFigures
from gapless.bench.plan import Plan
from gapless.bench.workloads import Lengths, Workload, synthetic_workload
from gapless.config import EngineConfig

READ_BYTES_PER_S = 1e9


def made_workload(requests: int = 2) -> Workload:
    return synthetic_workload(requests=requests, prompt=Lengths(mean=4), new=Lengths(mean=3), vocab_size=50)


def made_run(
    depth: int,
    seconds: float,
    *,
    repeat: int = 1,
    busy: float = 0.9,
    host_s: float = 0.001,
    token_ids: Sequence[Sequence[int]] = ((1, 2, 3), (4, 5, 6)),
    ended_by_length: bool = True,
    preemptions: int = 0,
    digest: str = "same",
    workload: str | None = None,
) -> RunFigures:
    """A run of 10 steps, idle for enqueueing whenever it is idle."""
    requests = tuple(
        RequestFigures(
            num_prompt_tokens=4,
            num_tokens=len(ids),
            ttft_s=0.1 * (index + 1),
            tpot_s=0.01,
            end_to_end_s=seconds,
            itl_s=(0.01, 0.02),
            ended_by_length=ended_by_length,
        )
        for index, ids in enumerate(token_ids)
    )
    steps = StepFigures(
        periods_s=tuple([seconds / 10] * 9),
        host_s={"schedule": 5 * host_s, "enqueue": 5 * host_s, "wait": 1.0},
        decode_host_s=host_s,
        idle_s={"enqueue": (1 - busy) * seconds, "apply": 0.0},
        read_bytes=int(0.5 * READ_BYTES_PER_S),
        decode_steps=10,
        decode_read_bytes=int(0.4 * READ_BYTES_PER_S),
        decode_elapsed_s=0.8,
        num_steps=10,
    )
    return RunFigures(
        depth=depth,
        repeat=repeat,
        workload=workload or made_workload(len(token_ids)).name,
        seconds=seconds,
        num_steps=10,
        busy_s=busy * seconds,
        window_s=seconds,
        preemptions=preemptions,
        steps_digest=digest,
        requests=requests,
        token_ids=tuple(map(tuple, token_ids)),
        steps=steps,
        start_s=0.5,
    )


def made_comparison(*runs: RunFigures) -> Comparison:
    """A comparison of these runs, all of one workload."""
    workload = made_workload(len(runs[0].token_ids))
    depths = tuple(dict.fromkeys(run.depth for run in runs))
    plan = Plan(
        model="a model",
        config=EngineConfig(device="cpu"),
        depths=depths,
        workloads=(workload,),
        repeats=len(runs) // len(depths),
    )
    return Comparison(
        plan=plan,
        runs=runs,
        least_bytes={workload.name: int(0.25 * READ_BYTES_PER_S)},
        read_bytes_per_s=READ_BYTES_PER_S,
    )
