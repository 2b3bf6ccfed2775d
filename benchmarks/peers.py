"""The whole run against llm-compressor's: `python benchmarks/peers.py MODEL TEXT.jsonl --peer_python VENV/bin/python`.

Both tools quantize the same model with the same pre-tokenized samples, each job in a process of its own, measured from
the start of Python to its end: on one core (one thread), and on two (two ranks of one thread; two threads for
llm-compressor). `msmodelslim eval` then measures the perplexity of each result, outside of the measured time: a faster
run that rounds worse is no faster. What was measured before with the same samples is kept, so runs can be done apart.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from workload import LENGTH, RESULTS, SAMPLES, calibration_ids, measure, quant_command, store, write_samples

SMOOTH = "{type: smooth_quant, alpha: 0.8}"
W8A8 = """{type: linear_quant, qconfig: {
  act: {dtype: int8, scope: per_token, symmetric: true, method: minmax},
  weight: {dtype: int8, scope: per_channel, symmetric: true, method: %s}}}"""
W4A16 = """{type: linear_quant, propagate_error: %s, qconfig: {
  weight: {dtype: int4, scope: per_group, symmetric: true, method: gptq, ext: {group_size: 64}}}}"""


@dataclass(frozen=True)
class Job:
    """One comparison: its method in llm_compressor_job.py, and our steps."""

    peer: str
    steps: tuple[str, ...]


JOBS = {
    "smoothquant_w8a8": Job("smoothquant_w8a8", (SMOOTH, W8A8 % "minmax")),
    "gptq_w4a16": Job("gptq_w4a16", (W4A16 % "false",)),
    "smoothquant_gptq_w8a8": Job("smoothquant_gptq_w8a8", (SMOOTH, W8A8 % "gptq")),
    # llm-compressor always calibrates a layer on the outputs of the quantized layers before it
    "gptq_w4a16_propagated": Job("gptq_w4a16", (W4A16 % "true",)),
}
#: measured runs: (whose, cores)
RUNS = {"ours": ("ours", 1), "ours_2": ("ours", 2), "peer": ("peer", 1), "peer_2": ("peer", 2)}


def recipe_text(job: Job, dataset: Path) -> str:
    """Our recipe, on that data."""
    steps = "".join(f"    - {step}\n".replace("\n  ", "\n        ") for step in job.steps)
    ends = f"  save: [{{type: compressed_tensors}}]\n  dataset: {dataset}\n"
    return f"apiversion: modelslim_v1\nspec:\n  process:\n{steps}{ends}"


def perplexity(result: Path, windows: int) -> float:
    """Perplexity of a result on the built-in text."""
    command = [sys.executable, "-m", "msmodelslim", "eval", str(result), "--device", "cpu", "--threads", "1"]
    output = measure([*command, "--windows", str(windows)]).output
    row = next(line for line in output.splitlines() if line.startswith("│ perplexity"))
    return float(row.split("│")[2])


def digest(result: Path) -> str:
    """One hash of all weights of a result."""
    found = hashlib.sha256()
    for path in sorted(result.glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def one_run(run: str, name: str, folder: Path, options: argparse.Namespace, dataset: Path) -> dict[str, Any]:
    """Measure one run of one job; what is compared of it, and the versions it ran with."""
    whose, cores = RUNS[run]
    out = folder / f"{name}-{run}"
    if whose == "ours":
        recipe = folder / f"{name}.yaml"
        recipe.write_text(recipe_text(JOBS[name], dataset))
        ranks = [str(rank) for rank in range(cores)]
        measured = measure(quant_command(options.model, out, recipe, "--device_id", *ranks, "--threads", "1"))
        versions = json.loads((out / "quant_report.json").read_text())["versions"]
    else:
        script = Path(__file__).with_name("llm_compressor_job.py")
        words = (options.peer_python, script, options.model, dataset, out, JOBS[name].peer)
        measured = measure([str(word) for word in words], threads=cores)
        line = next(line for line in measured.output.splitlines() if line.startswith("VERSIONS "))
        versions = json.loads(line.removeprefix("VERSIONS "))
    found = {key: value for key, value in asdict(measured).items() if key != "output"}
    if options.windows:
        found["perplexity"] = perplexity(out, options.windows)
    return found | {"weights": digest(out), "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=lambda text: Path(text).absolute())
    parser.add_argument("text", type=Path, help="JSONL with a text a line")
    parser.add_argument(
        "--peer_python", type=lambda text: Path(text).absolute(), help="Python of an environment with llmcompressor"
    )
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--windows", type=int, default=8, help="windows of text for the perplexity; 0 leaves it out")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="_2: on two cores")
    options = parser.parse_args()
    if options.peer_python is None and any(RUNS[run][0] == "peer" for run in options.runs):
        parser.error("give --peer_python, or --runs ours ours_2")
    facts = {"samples": options.samples, "length": LENGTH, "windows": options.windows}
    jobs = earlier(facts)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dataset = write_samples(folder / "samples.jsonl", calibration_ids(options.model, options.text, options.samples))
        peers: dict[tuple[str, str], dict[str, Any]] = {}
        for name in options.jobs:
            for run in options.runs:
                same = (JOBS[name].peer, run)
                found = peers.get(same) or one_run(run, name, folder, options, dataset)
                if RUNS[run][0] == "peer":
                    peers[same] = found
                jobs.setdefault(name, {})[run] = found
                print(name, run, found, flush=True)
                store("peers", facts | {"jobs": jobs})  # after each run, for it may be stopped
    show(jobs, options.samples)


def earlier(facts: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Runs that were measured before with the same samples."""
    path = RESULTS / "peers.json"
    before = json.loads(path.read_text()) if path.is_file() else {}
    return before["jobs"] if before and {key: before.get(key) for key in facts} == facts else {}


def show(jobs: dict[str, dict[str, dict[str, Any]]], samples: int) -> None:
    """One row a job and measure: each run, and our share of llm-compressor's on as many cores."""
    table = Table(title=f"{samples} x {LENGTH} tokens", title_justify="left")
    for heading in ("job", "measure", "ours", "llm-compressor", "share", "ours, 2 ranks", "llm-c., 2 threads", "share"):
        table.add_column(heading, justify="left" if heading in ("job", "measure") else "right")
    for name, runs in jobs.items():
        for key in ("cpu_s", "wall_s", "peak_pss_mib", "peak_rss_mib", "perplexity"):
            row = [name, key]
            for ours, peer in (("ours", "peer"), ("ours_2", "peer_2")):
                pair = [runs.get(run, {}).get(key) for run in (ours, peer)]
                row += ["" if value is None else f"{value:.2f}" for value in pair]
                row.append("" if None in pair else f"{pair[0] / pair[1]:.3f}")
            table.add_row(*row)
        table.add_section()
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
