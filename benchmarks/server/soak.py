"""A server under good and bad clients for as long as you like: does it keep its word, and does it give everything back?

A real ``gapless serve`` is met by good clients, whose answers are known and compared token by token, and by unfriendly
ones: they leave at random moments, are killed, send nonsense, read and write slowly. Every few seconds the memory and
descriptors of both processes and the engine's counters are read; ``/health`` is asked ten times a second by a process
of its own. In the end everybody leaves, and everything must be as it was at the start. What is checked, and the bounds,
is in ``soak_report.py``; the exit code is 1 if a check fails.

    OMP_NUM_THREADS=1 python benchmarks/server/soak.py --minutes 30 --out server_soak.json --picture server_soak.png
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from good_requests import GoodRequest, draw_requests, learn, send
from health_probe import HealthProbe
from server_process import ServerProcess, metrics_of, raise_descriptor_limit, total, usage_of
from soak_report import Sample, Soak, checks_of, draw_soak, report
from unfriendly_clients import CLIENTS, MisansweredError

from gapless.bench.report import check_writable
from gapless.bench.serving.http_client import HttpClient, HttpError

_GOOD_SHARE = 0.5
_STUCK_AFTER_S = 120.0
_IDLE_WITHIN_S = 60.0
_DESCRIPTORS = 8192
_KEPT_FAULTS = 20


@dataclass(kw_only=True, slots=True)
class Tally:
    """What the clients have seen."""

    runs: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, what: str) -> None:
        """Note something that must not happen."""
        self.outcomes["faults"] += 1
        if len(self.faults) < _KEPT_FAULTS:
            self.faults.append(what[:1000])


async def client(
    http: HttpClient, port: int, draw: random.Random, known: Sequence[GoodRequest], tally: Tally, end_s: float
) -> None:
    """One client after the other until the time is over."""
    names = list(CLIENTS)
    # Half of the slow ones: they do little for the time they take.
    weights = [0.5 if name in ("sends slowly", "is killed") else 1.0 for name in names]
    while time.perf_counter() < end_s:
        good = draw.choice(known)
        name = "good" if draw.random() < _GOOD_SHARE else draw.choices(names, weights)[0]
        tally.runs[name] += 1
        try:
            async with asyncio.timeout(_STUCK_AFTER_S):
                if name == "good":
                    result = await send(http, good, stream=draw.random() < 0.7)
                    tally.outcomes[result.outcome] += 1
                    if result.outcome == "wrong":
                        tally.fault(result.detail)
                else:
                    await CLIENTS[name](port, draw, good)
        except TimeoutError:
            tally.fault(f"hangs: {name}")
        except (HttpError, MisansweredError, OSError) as error:
            tally.fault(f"{name}: {type(error).__name__}: {error}")
        await asyncio.sleep(draw.expovariate(20))


async def sample(http: HttpClient, server: ServerProcess, pids: dict[str, int], start_s: float) -> Sample:
    """What is held and counted now."""
    metrics = await metrics_of(http)
    api, engine = usage_of(pids["api"]), usage_of(pids["engine"])
    return Sample(
        at_s=round(time.perf_counter() - start_s, 1),
        api_anonymous_mib=round(api.anonymous_mib, 2),
        api_resident_mib=round(api.resident_mib, 2),
        api_descriptors=api.descriptors,
        api_threads=api.threads,
        engine_anonymous_mib=round(engine.anonymous_mib, 2),
        engine_resident_mib=round(engine.resident_mib, 2),
        engine_descriptors=engine.descriptors,
        engine_threads=engine.threads,
        running=int(metrics["requests_running"]),
        waiting=int(metrics["requests_waiting"]),
        used_blocks=int(total(metrics, "kv_cache_blocks", "used")),
        all_blocks=int(total(metrics, "kv_cache_blocks")),
        http_requests=int(metrics["http_requests_in_progress"]),
        connections=int(metrics["http_connections"]),
        requests=int(total(metrics, "http_requests_total", 'method="POST"')),
        server_errors=int(total(metrics, "http_requests_total", 'status="5')),
        tokens=int(metrics["generation_tokens_total"]),
        aborted=int(metrics["aborted_total"]),
        preempted=int(metrics["preemptions_total"]),
    )


async def until_idle(http: HttpClient, server: ServerProcess, pids: dict[str, int], start_s: float) -> Sample:
    """Wait until nothing runs or is connected but this benchmark's own; returns the state then, or after a minute."""
    deadline_s = time.perf_counter() + _IDLE_WITHIN_S
    while True:
        found = await sample(http, server, pids, start_s)
        busy = found.running + found.waiting + found.used_blocks + found.http_requests
        if (not busy and found.connections <= 2) or time.perf_counter() > deadline_s:
            return found
        await asyncio.sleep(0.2)


async def soak(args: argparse.Namespace, log: Path) -> Soak:
    """The whole run."""
    arguments = [args.model, "--load-format", args.load_format, "--device", args.device, *args.options]
    tally = Tally()
    draw = random.Random(args.seed)
    with ServerProcess(arguments, log, threads=args.threads) as server:
        await server.wait_until_ready()
        pids = server.pids
        async with HttpClient(server.origin) as own:
            async with HttpClient(server.origin) as learner:
                requests = draw_requests(
                    args.requests, seed=args.seed, max_tokens=args.max_tokens, printable=args.load_format == "dummy"
                )
                known = await learn(learner, requests)
            with HealthProbe(server.port) as probe:
                while not probe.answers:
                    await asyncio.sleep(0.05)
                start_s = time.perf_counter()
                first = await until_idle(own, server, pids, start_s)
                samples = [first]
                end_s = start_s + args.minutes * 60
                async with HttpClient(server.origin) as http, asyncio.TaskGroup() as group:
                    for number in range(args.clients):
                        group.create_task(
                            client(http, server.port, random.Random(draw.random() + number), known, tally, end_s)
                        )
                    while time.perf_counter() < end_s:
                        await asyncio.sleep(min(args.every, max(0.0, end_s - time.perf_counter())))
                        samples.append(await sample(own, server, pids, start_s))
                        if args.verbose:
                            print(samples[-1], dict(tally.outcomes), flush=True)
                last = await until_idle(own, server, pids, start_s)
                seconds = time.perf_counter() - start_s
        exit_code = await asyncio.to_thread(server.end)
    return Soak(
        server=" ".join(["gapless serve", *server.arguments]),
        seconds=round(seconds, 1),
        known=len(known),
        runs=dict(sorted(tally.runs.items())),
        outcomes=dict(tally.outcomes),
        faults=tally.faults,
        first=first,
        last=last,
        samples=samples,
        health=list(probe.answers),
        exit_code=exit_code,
        traces_in_log=log.read_text(errors="replace").count("Traceback"),
    )


def main() -> int:
    """Run, tell, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="dummy")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="cpu")
    parser.add_argument("--clients", type=int, default=40, help="at once")
    parser.add_argument("--requests", type=int, default=40, help="different good requests")
    parser.add_argument("--max-tokens", type=int, default=200, help="of a good request")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--threads", type=int, default=1, help="of the engine's computations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--log", type=Path, help="keep the server's log here")
    parser.add_argument(
        "options",
        nargs="*",
        default=["--num-blocks", "192", "--max-rows", "16", "--max-waiting", "24", "--token-budget", "64"],
        help="further options of gapless serve, after --; the default makes it refuse, preempt and cut prompts",
    )
    args = parser.parse_args()
    for option, path in (("--out", args.out), ("--picture", args.picture)):
        if path is not None:
            check_writable(path, option)
    raise_descriptor_limit(_DESCRIPTORS)
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(soak(args, args.log or Path(folder) / "log"))
    checks = checks_of(result)
    for check in checks:
        print(check)
    print(json.dumps({"runs": result.runs, "outcomes": result.outcomes, "faults": result.faults}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report(result, checks, args.device), indent=1) + "\n")
    if args.picture:
        draw_soak(result, args.picture)
    return 0 if all(check.holds for check in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
