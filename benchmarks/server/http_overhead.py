"""What HTTP costs: many streams through ``gapless serve`` against the same requests offline through ``LLM.generate``.

First the library runs all requests, in this process, and lets go of the device; then a server with the same options
gets them as streams, ``--streams`` at a time, from clients in processes of their own: when one ends the next begins.
By default there are as many requests as streams, all sent at once. Every token is a byte that has text, and so an event
of its stream. Both run ``--rounds`` times after a short warm-up, with prompts that are new in each round, and the ratio
is that of the medians of tokens a second. A client at its limit measures itself: how busy the busiest was is told, and
above 85 % there should be more ``--client-processes``. Meanwhile ``/health`` is asked ten times a second, and the
slowest answer told.

    python benchmarks/server/http_overhead.py --model llama-3.1-8b --device cuda --out http_overhead.json
    OMP_NUM_THREADS=1 python benchmarks/server/http_overhead.py --streams 16 --rounds 2

Needs the packages of ``gapless[server]``; where nothing can be installed, unpacked wheels in ``PYTHONPATH`` will do.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from health_probe import HealthProbe
from server_process import ServerProcess, raise_descriptor_limit
from soak_report import health_figures

from gapless.bench.serving.arrivals import LoadLevel
from gapless.bench.serving.http_client import HttpClient, Origin
from gapless.bench.serving.load import run_level
from gapless.bench.serving.prompts import ServingRequest, serving_request

_LEAD_S = 0.5
_TIMEOUT_S = 1200.0
_BUSY_CLIENT = 0.85
_PRINTABLE = tuple(range(32, 127))
_WARM_UP_TOKENS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one client process has seen; times are those of the machine's monotonic clock."""

    start_s: float
    end_s: float
    output_tokens: int
    failures: dict[str, int]
    first_failure: str
    client_busy: float
    ttft_s: list[float]


def run_share(origin: Origin, requests: Sequence[ServingRequest], streams: int, start_s: float) -> Share:
    """Keep ``streams`` requests running from a moment of the monotonic clock on; runs in a client process."""

    async def run() -> Share:
        async with HttpClient(replace(origin, prefix="/v1"), connect_timeout_s=120) as client:
            await asyncio.sleep(max(0.0, start_s - time.perf_counter()))
            level = LoadLevel(kind="concurrency", value=streams)
            done = await run_level(client, level, requests, seed=0, timeout_s=_TIMEOUT_S)
        failed = [record for record in done.records if not record.is_complete]
        return Share(
            start_s=min(record.sent_s for record in done.records),
            end_s=max(record.ended_s for record in done.records),
            output_tokens=sum(record.output_tokens for record in done.records if record.is_complete),
            failures=dict(Counter(record.failure or "" for record in failed)),
            first_failure=failed[0].detail if failed else "",
            client_busy=done.client_busy,
            ttft_s=[record.ttft_s for record in done.records if record.ttft_s is not None],
        )

    return asyncio.run(run())


def requests_of(args: argparse.Namespace, number: int) -> list[dict[str, Any]]:
    """The requests of a round, prompts and sampling options; the first rounds warm up. No two prompts begin alike."""
    draw = random.Random(args.seed + 1_000_003 * number)
    new_tokens = args.new_tokens if number >= args.warm_up else min(_WARM_UP_TOKENS, args.new_tokens)
    spread = round(args.spread * new_tokens)
    return [
        {
            "prompt": draw.choices(_PRINTABLE, k=args.prompt_tokens),
            "max_tokens": draw.randint(new_tokens - spread, new_tokens + spread),
            "temperature": 0.0,
            "ignore_eos": True,
            "allowed_token_ids": list(_PRINTABLE),
        }
        for _ in range(args.requests)
    ]


def offline(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rounds through the library; the device is free afterwards."""
    import torch

    from gapless import LLM, SamplingParams

    rounds = []
    with LLM(
        args.model,
        load_format=args.load_format,
        device=args.device,
        max_rows=args.streams,
        max_model_len=args.context,
        token_budget=args.token_budget,
        num_blocks=args.num_blocks,
        enable_prefix_caching=False,
        timeline=True,
    ) as llm:
        for number in range(args.warm_up + args.rounds):
            bodies = requests_of(args, number)
            prompts = [{"prompt_token_ids": body.pop("prompt")} for body in bodies]
            params = [SamplingParams(**body) for body in bodies]
            began_s = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began_s
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            rounds.append({"seconds": round(seconds, 4), "tokens": tokens, "tokens_per_s": round(tokens / seconds, 1)})
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return rounds[args.warm_up :]


async def online(args: argparse.Namespace, log: Path) -> dict[str, Any]:
    """All rounds through a server with the same options."""
    options = {
        "--load-format": args.load_format,
        "--device": args.device,
        "--max-rows": args.streams,
        "--max-model-len": args.context,
        "--token-budget": args.token_budget,
        "--num-blocks": args.num_blocks,
    }
    arguments = [
        args.model,
        *(str(each) for option in options.items() for each in option),
        "--no-enable-prefix-caching",
    ]
    with ServerProcess(arguments, log) as server:
        await server.wait_until_ready()
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.client_processes, mp_context=context) as pool:
            rounds = [
                await asyncio.to_thread(one_round, args, server.origin, pool, number)
                for number in range(args.warm_up + args.rounds)
            ]
        exit_code = await asyncio.to_thread(server.end)
    return {
        "server": " ".join(["gapless serve", *server.arguments]),
        "rounds": rounds[args.warm_up :],
        "exit_code": exit_code,
    }


def one_round(args: argparse.Namespace, origin: Origin, pool: ProcessPoolExecutor, number: int) -> dict[str, Any]:
    """One round, spread over the client processes."""
    bodies, count = requests_of(args, number), args.client_processes
    requests = [serving_request("completions", body.pop("prompt"), None, body) for body in bodies]
    start_s = time.perf_counter() + (_LEAD_S if number else 10 * _LEAD_S)  # the first time processes start
    futures = [
        pool.submit(run_share, origin, requests[place::count], len(range(place, args.streams, count)), start_s)
        for place in range(count)
    ]
    with HealthProbe(origin.port) as probe:
        shares = [future.result() for future in futures]
    failures = sum((Counter(share.failures) for share in shares), Counter[str]())
    if failures:
        raise SystemExit(f"{dict(failures)}: {next(share.first_failure for share in shares if share.first_failure)}")
    seconds = max(share.end_s for share in shares) - min(share.start_s for share in shares)
    tokens = sum(share.output_tokens for share in shares)
    return {
        "seconds": round(seconds, 4),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "health": health_figures(probe.answers),
        "health_failures": sum(answer.status != 200 for answer in probe.answers),
        "busiest_client": round(max(share.client_busy for share in shares), 3),
        "median_ttft_s": round(statistics.median(t for share in shares for t in share.ttft_s), 4),
    }


def main() -> int:
    """Run offline, then online, and tell the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="dummy")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--spread", type=float, default=0.0, help="new tokens vary by this share, up and down")
    parser.add_argument("--requests", type=int, help="of a round; default: one for each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="short rounds; at least 1")
    parser.add_argument("--client-processes", type=int, help="default: 4 with a GPU, 1 without")
    parser.add_argument("--token-budget", type=int, default=2048, help="of both; the server's default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.client_processes = args.client_processes or (4 if args.device == "cuda" else 1)
    if not 0 <= args.spread < 1:
        parser.error("--spread must be at least 0 and below 1")
    args.requests = args.requests or args.streams
    args.context = args.prompt_tokens + args.new_tokens + round(args.spread * args.new_tokens)
    args.num_blocks = args.streams * (-(-args.context // 16) + 1)
    raise_descriptor_limit(4 * args.streams + 1000)

    import torch

    from gapless.bench.report import check_writable, environment

    if args.out is not None:
        check_writable(args.out, "--out")
    library = offline(args)
    print(f"offline: {[each['tokens_per_s'] for each in library]} tokens/s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        served = asyncio.run(online(args, Path(folder) / "log"))
    rates = [statistics.median(each["tokens_per_s"] for each in rounds) for rounds in (library, served["rounds"])]
    busiest = max(each["busiest_client"] for each in served["rounds"])
    print(f"HTTP:    {[each['tokens_per_s'] for each in served['rounds']]} tokens/s, busiest client {busiest:.0%}")
    print(f"slowest /health: {max(each['health']['max_ms'] for each in served['rounds']):.0f} ms")
    print(f"HTTP / offline: {rates[1] / rates[0]:.4f} with {args.streams} streams of {args.model}")
    if busiest > _BUSY_CLIENT:
        print("a client was at its limit: use more --client-processes")
    if args.out:
        workload = {name: value for name, value in vars(args).items() if name != "out"}
        content = {
            "environment": environment(torch.device(args.device)),
            "workload": workload,
            "ratio": round(rates[1] / rates[0], 4),
            "offline": library,
            "http": served,
        }
        args.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
