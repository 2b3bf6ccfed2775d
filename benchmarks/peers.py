"""The whole run against llm-compressor's: `python benchmarks/peers.py MODEL TEXT.jsonl --peer_python VENV/bin/python`.

Both tools quantize the same model with the same pre-tokenized samples and one thread, each job in a process of its own
that is measured from the start of Python to its end. `msmodelslim eval` then measures the perplexity of both results,
outside of the measured time: a faster run that rounds worse is no faster.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from workload import LENGTH, SAMPLES, Measured, calibration_ids, measure, quant_command, store, write_samples

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


def figures(run: Measured, result: Path, windows: int) -> dict[str, float]:
    """What is compared of one run."""
    found = {key: value for key, value in asdict(run).items() if key != "output"}
    return found | {"perplexity": perplexity(result, windows)} if windows else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, help="JSONL with a text a line")
    parser.add_argument("--peer_python", type=Path, required=True, help="Python of an environment with llmcompressor")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--windows", type=int, default=8, help="windows of text for the perplexity; 0 leaves it out")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS)[:3])
    options = parser.parse_args()
    model, peer_python = options.model.absolute(), options.peer_python.absolute()
    result: dict[str, object] = {"samples": options.samples, "length": LENGTH, "threads": 1, "windows": options.windows}
    jobs: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dataset = write_samples(folder / "samples.jsonl", calibration_ids(model, options.text, options.samples))
        for name in options.jobs:
            job, recipe, out = JOBS[name], folder / f"{name}.yaml", folder / name
            recipe.write_text(recipe_text(job, dataset))
            run = measure(quant_command(model, out, recipe, "--device_id", "0", "--threads", "1"))
            result["ours"] = json.loads((out / "quant_report.json").read_text())["versions"]
            jobs[name] = {"ours": figures(run, out, options.windows)}
            print(name, jobs[name]["ours"], flush=True)
            out = folder / f"{name}-peer"
            script = Path(__file__).with_name("llm_compressor_job.py")
            run = measure([str(part) for part in (peer_python, script, model, dataset, out, job.peer)])
            words = next(line for line in run.output.splitlines() if line.startswith("VERSIONS "))
            result["peer"] = json.loads(words.removeprefix("VERSIONS "))
            jobs[name]["peer"] = figures(run, out, options.windows)
            print(name, jobs[name]["peer"], flush=True)
            store("peers", result | {"jobs": jobs})  # after each job, for it may be stopped
    show(jobs, options.samples)


def show(jobs: dict[str, dict[str, dict[str, float]]], samples: int) -> None:
    """One row a job and measure: ours, llm-compressor's, and its share of ours."""
    table = Table(title=f"{samples} x {LENGTH} tokens, one thread", title_justify="left")
    for heading in ("job", "measure", "msmodelslim", "llm-compressor", "llm-compressor / msmodelslim"):
        table.add_column(heading, justify="left" if heading in ("job", "measure") else "right")
    for name, pair in jobs.items():
        for key, ours in pair["ours"].items():
            peer = pair["peer"][key]
            table.add_row(name, key, f"{ours:.2f}", f"{peer:.2f}", f"{peer / ours:.3f}")
        table.add_section()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
