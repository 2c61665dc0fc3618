"""``gapless bench serve`` beside NVIDIA's AIPerf: the same request bodies to the same server, in turns.

Both tools run closed loops; which comes first changes from round to round. A file with the bodies that gapless makes is
what AIPerf replays, so that prompts and options are the same, byte for byte. AIPerf needs an environment of its own::

    python -m venv /tmp/aiperf && /tmp/aiperf/bin/pip install aiperf==0.13.0
    python benchmarks/server/crosscheck_aiperf.py --aiperf /tmp/aiperf/bin/aiperf --tokenizer FOLDER --json found.json

``FOLDER`` holds any tokenizer: AIPerf wants one to start, and takes all counts from the server's usage.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from server_process import SERVE, ServerProcess, metrics_of, total

import gapless
from gapless.bench.report import write_report
from gapless.bench.serving.http_client import HttpClient, HttpError
from gapless.bench.serving.options import ServingOptions

SERVERS = {
    "smollm2": ["smollm2", "--max-model-len", "2048"],
    "tiny-llama": ["tiny-llama", "--load-format", "dummy"],
}
PROMPT_WORDS, NEW_TOKENS, WARM_UP = 64, 32, 2
LATENCIES = ("ttft", "tpot", "itl", "end_to_end")
# AIPerf's names for the same quantities.
THEIRS = {
    "ttft": "time_to_first_token",
    "tpot": "inter_token_latency",
    "itl": "inter_chunk_latency",
    "end_to_end": "request_latency",
}
# The server's histograms of them, from acceptance on.
SERVERS_OWN = {
    "ttft": "time_to_first_token_seconds",
    "tpot": "time_per_output_token_seconds",
    "last_text": "request_duration_seconds",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run of either tool."""

    url: str
    model: str
    concurrency: int
    requests: int
    seed: int


def run_ours(case: Case, folder: Path) -> dict[str, Any]:
    """Run ``gapless bench serve``."""
    found = folder / "ours.json"
    options = f"--url {case.url} --endpoint chat --concurrency {case.concurrency} --requests {case.requests}"
    options += f" --prompt-tokens {PROMPT_WORDS} --new-tokens {NEW_TOKENS} --warm-up {WARM_UP} --seed {case.seed} -q"
    arguments = ["bench", "serve", *options.split(), "--json", str(found)]
    _run([*SERVE[:-1], *arguments])
    level = json.loads(found.read_text())["levels"][0]
    figures = {f"{name}_{point}_ms": level[name][f"{point}_s"] * 1e3 for name in LATENCIES for point in ("p50", "p99")}
    last_text = [r["ttft_s"] + r["tpot_s"] * (r["output_tokens"] - 1) for r in level["records"]]
    figures["last_text_p50_ms"] = statistics.median(last_text) * 1e3
    figures["mean_ms"] = {name: level[name]["mean_s"] * 1e3 for name in LATENCIES}
    figures["mean_ms"]["last_text"] = statistics.mean(last_text) * 1e3
    names = ("requests_per_s", "output_tokens_per_s", "prompt_tokens", "output_tokens", "completed", "client_busy")
    figures |= {name: level[name] for name in names}
    # As AIPerf counts it: until the last text.
    figures["in_flight"] = sum(last_text) / level["seconds"]
    return figures | {"command": _shown(["gapless", *arguments])}


def run_aiperf(case: Case, folder: Path, aiperf: str, tokenizer: Path) -> dict[str, Any]:
    """Run AIPerf over the same bodies."""
    bodies, found = folder / "bodies.jsonl", folder / "aiperf"
    made = ServingOptions(
        url=case.url,
        concurrencies=(case.concurrency,),
        endpoint="chat",
        prompt_tokens=PROMPT_WORDS,
        new_tokens=NEW_TOKENS,
        seed=case.seed,
    ).make_requests(1, case.requests, case.model)
    bodies.write_bytes(b"\n".join(request.body for request in made) + b"\n")
    options = f"-m {case.model} -u {case.url} --endpoint-type chat --streaming --custom-dataset-type raw-payload"
    options += f" --request-count {case.requests} --warmup-request-count {WARM_UP} --concurrency {case.concurrency}"
    options += " --dataset-sampling-strategy sequential --use-server-token-count --no-server-metrics --no-gpu-telemetry"
    options += f" --ui none --workers-max 1 --record-processors 1 --tokenizer {tokenizer}"
    command = [aiperf, "profile", *options.split(), "--input-file", str(bodies), "--output-artifact-dir", str(found)]
    _run(command)
    summary = json.loads((found / "profile_export_aiperf.json").read_text())
    figures = {
        f"{name}_{point}_ms": summary[theirs][point]
        for name, theirs in THEIRS.items()
        if theirs in summary
        for point in ("p50", "p99")
    }
    figures["last_text_p50_ms"] = figures["end_to_end_p50_ms"]
    figures["mean_ms"] = {name: summary[theirs]["avg"] for name, theirs in THEIRS.items()}
    figures["mean_ms"]["last_text"] = figures["mean_ms"]["end_to_end"]
    figures |= {
        "requests_per_s": summary["request_throughput"]["avg"],
        "output_tokens_per_s": summary["output_token_throughput"]["avg"],
        "prompt_tokens": summary["input_sequence_length"]["sum"],
        "output_tokens": summary["output_sequence_length"]["sum"],
        "completed": summary["request_latency"]["count"],
        "in_flight": summary["request_throughput"]["avg"] * summary["request_latency"]["avg"] / 1e3,
    }
    return figures | {"command": _shown(command)}


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def _shown(command: list[str]) -> str:
    return " ".join(part if not part.startswith("/") else Path(part).name for part in command)


def ratios(pairs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Ours over AIPerf's of the same round: median, least and most of the rounds, for each figure that both have."""
    names = [key for key, value in pairs[0]["gapless"].items() if isinstance(value, int | float)]
    shared = [key for key in names if pairs[0]["aiperf"].get(key)]
    found = {key: [pair["gapless"][key] / pair["aiperf"][key] for pair in pairs] for key in shared}
    return {key: _spread(values) for key, values in found.items()}


def over_server(pairs: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """What each tool saw over what the server's histograms say of the same run, which other load cannot blur."""

    def of(tool: str, name: str) -> dict[str, float]:
        runs = [pair[tool] for pair in pairs]
        return _spread([run["mean_ms"][name] / run["server_mean_ms"][name] for run in runs])

    return {tool: {name: of(tool, name) for name in SERVERS_OWN} for tool in ("gapless", "aiperf")}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def with_server_means(process: ServerProcess, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a tool; adds the means of the server's own histograms over the same requests and the warm-up."""

    async def read() -> dict[str, float]:
        async with HttpClient(process.origin) as client:
            return await metrics_of(client)

    before = asyncio.run(read())
    figures = run()
    after = asyncio.run(read())

    def mean_ms(name: str) -> float:
        seconds, count = (total(after, f"{name}_{part}") - total(before, f"{name}_{part}") for part in ("sum", "count"))
        return seconds / count * 1e3

    return figures | {"server_mean_ms": {name: mean_ms(metric) for name, metric in SERVERS_OWN.items()}}


def wait_for(process: ServerProcess) -> None:
    """Wait until a server takes requests; one that is only just listening may reset a connection."""
    while True:
        try:
            return asyncio.run(process.wait_until_ready())
        except HttpError:
            time.sleep(0.2)


def main() -> None:
    """Run all rounds; the file is written after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aiperf", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--model", nargs="+", choices=list(SERVERS), default=list(SERVERS))
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    version = subprocess.run([arguments.aiperf, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    environment = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": _shown([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "aiperf": version,
        "gapless": gapless.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "load_average_at_start": os.getloadavg()[0],
    }
    options = ["--device", "cpu", "--no-enable-prefix-caching", "--no-access-log"]
    cases: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for round_ in range(arguments.rounds):
            for model in arguments.model:
                with ServerProcess([*SERVERS[model], *options], folder / "server.log", threads=1) as process:
                    wait_for(process)
                    for concurrency in (1, 4, 16):
                        case = Case(
                            url=f"http://127.0.0.1:{process.port}",
                            model=model,
                            concurrency=concurrency,
                            requests=arguments.requests,
                            seed=round_,
                        )
                        tools = {
                            "gapless": lambda case=case: run_ours(case, folder),
                            "aiperf": lambda case=case: run_aiperf(case, folder, arguments.aiperf, arguments.tokenizer),
                        }
                        order = list(tools) if round_ % 2 == 0 else list(tools)[::-1]
                        pair = {"first": order[0]} | {name: with_server_means(process, tools[name]) for name in order}
                        cases.setdefault(f"{model}, {concurrency} at once", []).append(pair)
                        print(round_, model, concurrency, json.dumps(ratios([pair])), flush=True)
            levels = {
                name: {"ratios": ratios(pairs), "mean_over_servers_own": over_server(pairs), "rounds": pairs}
                for name, pairs in cases.items()
            }
            write_report(arguments.json, {"environment": environment, "server_options": options, "levels": levels})


if __name__ == "__main__":
    main()
