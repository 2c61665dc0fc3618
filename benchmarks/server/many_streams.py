"""So many streams at once, and the memory that thousands of requests leave behind.

First some rounds of ``--streams`` connections that are all open before the first answer is read to its end: each
stream must end with the right answer, or be refused with 429 and a time to wait. Then ``--requests`` unique short
prompts with log-probs, one in ten of which is left in the middle. Before, between and after, both processes must hold
the same number of descriptors, and the second part may not cost either of them more than a few MiB. That holds after a
warm-up: on a CPU, oneDNN keeps what it has compiled for each shape of a product, up to a limit of its own.

The limit of open files is raised for this process and the server, as far as the system allows; the report says to what.

    OMP_NUM_THREADS=1 python benchmarks/server/many_streams.py --out server_streams.json
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from good_requests import GoodRequest, draw_requests, learn, send
from health_probe import HealthProbe
from server_process import ProcessUsage, ServerProcess, metrics_of, raise_descriptor_limit, total, usage_of
from soak_report import HEALTH_WITHIN_MS, Check, at_most, equals, health_figures

from gapless.bench.report import check_writable, environment
from gapless.bench.serving.http_client import HttpClient, HttpError

# A kilobyte a request. A server that forgets to let go of a request keeps about a hundred.
_GAIN_MIB = 5.0
_GROUPS = 10
_AT_ONCE = 64
_IDLE_WITHIN_S = 60.0


async def idle_usage(http: HttpClient, server: ServerProcess) -> dict[str, ProcessUsage]:
    """What both processes hold once nothing runs and nobody else is connected."""
    deadline_s = time.perf_counter() + _IDLE_WITHIN_S
    while True:
        metrics = await metrics_of(http)
        busy = metrics["requests_running"] + metrics["requests_waiting"] + metrics["http_requests_in_progress"]
        used = total(metrics, "kv_cache_blocks", "used")
        if busy == used == 0 and metrics["http_connections"] <= 2:
            return {name: usage_of(pid) for name, pid in server.pids.items()}
        if time.perf_counter() > deadline_s:
            raise SystemExit(f"the server does not become idle: {metrics}")
        await asyncio.sleep(0.2)


async def one_round(server: ServerProcess, known: Sequence[GoodRequest], streams: int) -> dict[str, Any]:
    """All streams at once; what came of them, and the most descriptors that the API process held."""
    outcomes: Counter[str] = Counter()
    first_fault = ""
    pid, most, ended = server.process.pid, 0, asyncio.Event()

    async def stream(number: int) -> None:
        nonlocal first_fault
        try:
            result = await send(http, known[number % len(known)], stream=True)
            outcome, detail = result.outcome, result.detail
        except HttpError as error:
            outcome, detail = "broken", str(error)
        outcomes[outcome] += 1
        if outcome not in ("right", "refused for load"):
            first_fault = first_fault or detail[:1000]

    async def watch() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, usage_of(pid).descriptors)
            await asyncio.sleep(0.05)

    began_s = time.perf_counter()
    async with HttpClient(server.origin, connect_timeout_s=120) as http:
        watching = asyncio.create_task(watch())
        await asyncio.gather(*map(stream, range(streams)))
        ended.set()
        await watching
    return {
        "outcomes": dict(outcomes),
        "first_fault": first_fault,
        "seconds": round(time.perf_counter() - began_s, 2),
        "most_descriptors_of_the_api_process": most,
    }


async def one_group(server: ServerProcess, count: int, draw: random.Random) -> None:
    """Unique short prompts with log-probs; every tenth client leaves after the first piece of its answer."""

    async def ask(http: HttpClient, number: int) -> None:
        body = {
            "prompt": [draw.randrange(256) for _ in range(draw.randint(4, 24))],
            "max_tokens": 8,
            "temperature": 1.0,
            "logprobs": 3,
            "ignore_eos": True,
            "stream": number % 10 == 0,
        }
        async with http.request("POST", "/v1/completions", json.dumps(body).encode()) as response:
            if response.status != 200:
                raise SystemExit(f"{body} is answered with {response.status}")
            async for _ in response.pieces():
                if number % 10 == 0:
                    return

    waiting = iter(range(count))

    async def worker(http: HttpClient) -> None:
        for number in waiting:
            await ask(http, number)

    async with HttpClient(server.origin) as http:
        await asyncio.gather(*(worker(http) for _ in range(_AT_ONCE)))


async def measure(args: argparse.Namespace, log: Path) -> dict[str, Any]:
    """The whole run, without its verdict."""
    draw = random.Random(args.seed)
    arguments = [args.model, "--load-format", args.load_format, "--device", args.device, *args.options]
    with ServerProcess(arguments, log, threads=args.threads) as server:
        await server.wait_until_ready()
        async with HttpClient(server.origin) as own:
            requests = draw_requests(
                40, seed=args.seed, max_tokens=args.max_tokens, printable=args.load_format == "dummy"
            )
            async with HttpClient(server.origin) as learner:
                known = await learn(learner, requests)
            with HealthProbe(server.port) as probe:
                while not probe.answers:
                    await asyncio.sleep(0.05)
                states = {"start": await idle_usage(own, server)}
                rounds = []
                for number in range(1, args.rounds + 1):
                    rounds.append(await one_round(server, known, args.streams))
                    states[f"after round {number}"] = await idle_usage(own, server)
                    print(rounds[-1], flush=True)
                await one_group(server, args.warm_up, draw)
                for number in range(_GROUPS + 1):
                    states[f"after {number * args.requests // _GROUPS} requests"] = await idle_usage(own, server)
                    if number < _GROUPS:
                        await one_group(server, args.requests // _GROUPS, draw)
                metrics = await metrics_of(own)
        exit_code = await asyncio.to_thread(server.end)
    return {
        "server": " ".join(["gapless serve", *server.arguments]),
        "rounds": rounds,
        "states": {
            name: {process: asdict(usage) for process, usage in state.items()} for name, state in states.items()
        },
        "health": health_figures(probe.answers),
        "health_failures": sum(answer.status != 200 for answer in probe.answers),
        "server_errors": int(total(metrics, "http_requests_total", 'status="5')),
        "traces_in_log": log.read_text(errors="replace").count("Traceback"),
        "exit_code": exit_code,
    }


def checks_of(found: dict[str, Any], streams: int) -> list[Check]:
    """Every promise."""
    checks = []
    for number, each in enumerate(found["rounds"], 1):
        answered = each["outcomes"].get("right", 0) + each["outcomes"].get("refused for load", 0)
        checks.append(equals(f"streams of round {number} that were right or refused with 429", answered, streams))
    states = list(found["states"].values())
    names = list(found["states"])
    after_rounds, warmed_up = states[len(found["rounds"])], states[len(found["rounds"]) + 1]
    for process in ("api", "engine"):
        for name, state in zip(names[1:], states[1:], strict=True):
            descriptors = state[process]["descriptors"]
            if descriptors != states[0][process]["descriptors"] or state is after_rounds or state is states[-1]:
                wanted = states[0][process]["descriptors"]
                checks.append(equals(f"descriptors of the {process} process {name}", descriptors, wanted))
        gained = states[-1][process]["anonymous_mib"] - warmed_up[process]["anonymous_mib"]
        checks.append(at_most(f"MiB that the requests cost the {process} process", round(gained, 2), _GAIN_MIB))
    return [
        *checks,
        equals("answers with 5xx", found["server_errors"], 0),
        equals("answers of /health other than 200", found["health_failures"], 0),
        at_most("ms to the slowest answer of /health", found["health"]["max_ms"], HEALTH_WITHIN_MS),
        equals("traces in the log", found["traces_in_log"], 0),
        equals("exit code after SIGTERM", found["exit_code"], 0),
    ]


def main() -> int:
    """Run, tell, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1500, help="at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=5000, help="of the second part")
    parser.add_argument("--warm-up", type=int, default=3000, help="requests before those; see the note on memory")
    parser.add_argument("--max-tokens", type=int, default=16, help="of a stream")
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="dummy")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the engine's computations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "options",
        nargs="*",
        default=["--num-blocks", "2048", "--max-rows", "32", "--token-budget", "64", "--no-enable-prefix-caching"],
        help="further options of gapless serve, after --",
    )
    args = parser.parse_args()
    if args.out is not None:
        check_writable(args.out, "--out")
    limit = raise_descriptor_limit(2 * args.streams + 1000)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(args, Path(folder) / "log"))
    checks = checks_of(found, args.streams)
    for check in checks:
        print(check)
    if args.out:
        device = torch.device("cuda" if args.device == "cuda" else "cpu")
        verdict = {"holds": all(check.holds for check in checks), "checks": [asdict(check) for check in checks]}
        content = {"environment": environment(device), "descriptor_limit": limit, **verdict, **found}
        args.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(check.holds for check in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
