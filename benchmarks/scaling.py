"""What more ranks bring: `python benchmarks/scaling.py MODEL TEXT.jsonl [--ranks 1 2]`.

Quantizes MODEL to W8A8 static on 128 samples of 512 tokens, one thread a rank, on each number of ranks, and sets whole
runs, calibration phases and collectives against one rank's. From what one rank's work and one collective cost here it
projects larger jobs.
"""

import argparse
import hashlib
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from calibration import RECIPE
from rich.console import Console
from rich.table import Table
from workload import LENGTH, SAMPLES, Measured, calibration_ids, measure, quant_command, store, write_samples

#: layers, parameters of a layer that all ranks share, its linears
PROJECTED = {"70 B dense": (80, 856e6, 7), "671 B MoE (shared part 17 B)": (61, 280e6, 9)}
PROJECTED_RANKS = (8, 64, 512)
PROJECTED_SAMPLES = 512


def run_on(ranks: int, model: Path, recipe: Path, out: Path) -> tuple[Measured, dict[str, Any], str]:
    """One run: what it took, its report, and one hash over its files."""
    ids = [str(rank) for rank in range(ranks)]
    found = measure(quant_command(model, out, recipe, "--threads", "1", "--device_id", *ids))
    report = json.loads((out / "quant_report.json").read_text())
    digest = hashlib.sha256()
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.name != "quant_report.json":
            digest.update(path.name.encode() + path.read_bytes())
    return found, report, digest.hexdigest()


def phase(report: dict[str, Any], *names: str) -> float:
    """Seconds of these phases over all layers."""
    return sum(layer["seconds"].get(name, 0.0) for layer in report["layers"] for name in names)


def scaling(model: Path, text: Path, ranks: list[int], folder: Path) -> dict[str, Any]:
    dataset = write_samples(folder / "samples.jsonl", calibration_ids(model, text))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(dataset=dataset))
    table = Table(title=f"W8A8 static, {SAMPLES} x {LENGTH} tokens, one thread a rank", title_justify="left")
    for heading in (
        "ranks",
        "whole run s",
        "speed-up",
        "calibration s",
        "speed-up",
        "collectives a layer",
        "bytes",
        "ms",
    ):
        table.add_column(heading, justify="right")
    rows: list[dict[str, Any]] = []
    for count in ranks:
        found, report, digest = run_on(count, model, recipe, folder / f"out{count}")
        layers = report["layers"]
        traffic = {
            key: sum(layer["collectives"][key] for layer in layers) / len(layers) for key in layers[0]["collectives"]
        }
        rows.append(
            {
                "ranks": count,
                "wall_s": found.wall_s,
                "cpu_s": found.cpu_s,
                "pss_mib": found.peak_pss_mib,
                "calibration_s": phase(report, "load", "inputs", "forward"),
                "rounding_s": phase(report, "linear_quant"),
                "collectives_a_layer": traffic,
                "sha256": digest,
                "tokens": report["data"]["tokens"],
                "parameters": report["model"]["quantized_parameters"],
            }
        )
        first, row = rows[0], rows[-1]
        table.add_row(
            str(count),
            f"{row['wall_s']:.1f}",
            f"{first['wall_s'] / row['wall_s']:.2f}",
            f"{row['calibration_s']:.1f}",
            f"{first['calibration_s'] / row['calibration_s']:.2f}",
            f"{traffic['collectives']:.0f}",
            f"{traffic['sent_bytes']:.0f}",
            f"{1000 * traffic['seconds']:.1f}",
        )
    Console(width=120).print(table)
    same = len({row["sha256"] for row in rows}) == 1
    print("the files of all runs are " + ("the same bytes" if same else "NOT THE SAME"))
    return {"rows": rows, "same_bytes": same, "projection": projection(rows)}


def projection(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds of a layer on many ranks, from the cost of a token, of a parameter and of a collective measured here."""
    one, several = rows[0], rows[-1]
    if several["ranks"] == 1:
        return []
    a_token_parameter_s = one["calibration_s"] / one["tokens"] / one["parameters"]
    a_parameter_s = one["rounding_s"] / one["parameters"]
    traffic = several["collectives_a_layer"]
    a_call_s = traffic["seconds"] / traffic["collectives"]
    table = Table(title="projected from these costs", title_justify="left")
    for heading in ("model", "ranks", "forward s/layer", "rounding", "collectives", "speed-up", "of ideal"):
        table.add_column(heading, justify="right")
    found = []
    tokens = PROJECTED_SAMPLES * LENGTH
    for name, (_, parameters, _) in PROJECTED.items():
        alone_s = tokens * parameters * a_token_parameter_s + parameters * a_parameter_s
        for ranks in PROJECTED_RANKS:
            share = math.ceil(PROJECTED_SAMPLES / ranks) / PROJECTED_SAMPLES
            forward_s = share * tokens * parameters * a_token_parameter_s
            collective_s = traffic["collectives"] * a_call_s * math.log2(ranks)
            total_s = forward_s + parameters * a_parameter_s + collective_s
            row = {
                "model": name,
                "ranks": ranks,
                "forward_s": forward_s,
                "rounding_s": parameters * a_parameter_s,
                "collectives_s": collective_s,
                "speed_up": alone_s / total_s,
                "of_ideal": alone_s / total_s / ranks,
            }
            found.append(row)
            table.add_row(
                name,
                str(ranks),
                f"{forward_s:.1f}",
                f"{row['rounding_s']:.1f}",
                f"{collective_s:.3f}",
                f"{row['speed_up']:.1f}",
                f"{row['of_ideal']:.0%}",
            )
    Console(width=120).print(table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, help="JSONL with a text a line")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = scaling(options.model, options.text, options.ranks, Path(name))
    store("scaling", result)


if __name__ == "__main__":
    main()
