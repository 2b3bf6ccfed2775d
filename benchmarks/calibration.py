"""What calibration costs on top of the plain forward: `python benchmarks/calibration.py MODEL TEXT.jsonl`.

Runs W8A8 static on 128 samples of 512 tokens with one thread, then transformers' own forward of the same decoder layers
on the same samples in the same type, then a matrix multiplication, whose rate gives the floor.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from workload import LENGTH, SAMPLES, calibration_ids, measure, one_thread_env, quant_command, store, write_samples

RECIPE = """\
apiversion: modelslim_v1
metadata: {{config_id: benchmark}}
spec:
  process:
    - type: linear_quant
      qconfig:
        act: {{dtype: int8, scope: per_tensor, symmetric: true, method: minmax}}
        weight: {{dtype: int8, scope: per_channel, symmetric: true, method: minmax}}
  save: [{{type: compressed_tensors}}]
  dataset: {dataset}
"""


def plain_forward(model_path: Path, dataset: Path) -> dict[str, float]:
    """Seconds of transformers' own decoder forward over the samples, and of one large matrix multiplication."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).eval()
    rows = [torch.tensor([json.loads(line)["input_ids"]]) for line in dataset.read_text().splitlines()]
    with torch.inference_mode():
        model.model(input_ids=rows[0], use_cache=False)
        start = time.perf_counter()
        for row in rows:
            model.model(input_ids=row, use_cache=False)
        forward_s = time.perf_counter() - start
        side = 2048
        a, b = (torch.randn(side, side).bfloat16() for _ in range(2))
        best = min(_seconds(lambda: torch.nn.functional.linear(a, b)) for _ in range(8))
    config = model.config
    width, inner = config.hidden_size, config.intermediate_size
    kv = config.num_key_value_heads * width // config.num_attention_heads
    a_token = config.num_hidden_layers * (
        2 * (2 * width * width + 2 * width * kv + 3 * width * inner) + 4 * width * LENGTH
    )
    floor_s = SAMPLES * LENGTH * a_token / (2 * side**3 / best)
    return {"forward_s": forward_s, "floor_s": floor_s}


def _seconds(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, help="JSONL with a text a line")
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        print(json.dumps(plain_forward(options.model, options.plain)))
        return
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_samples(Path(folder) / "samples.jsonl", calibration_ids(options.model, options.text))
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(RECIPE.format(dataset=dataset))
        out = Path(folder) / "out"
        run = measure(quant_command(options.model, out, recipe, "--device_id", "0", "--threads", "1"))
        report = json.loads((out / "quant_report.json").read_text())
        command = [sys.executable, __file__, str(options.model), str(options.text), "--plain", str(dataset)]
        plain = json.loads(subprocess.run(command, env=one_thread_env(), check=True, capture_output=True).stdout)
    phases: dict[str, float] = {}
    for layer in report["layers"]:
        for phase, seconds in layer["seconds"].items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    calibration_s = sum(phases.get(phase, 0.0) for phase in ("load", "inputs", "forward"))
    rows = {
        "floor: matrix multiplication alone": plain["floor_s"],
        "transformers' forward of the layers": plain["forward_s"],
        "our calibration pass": calibration_s,
        **{f"  {phase}": seconds for phase, seconds in phases.items()},
        **{f"whole run: {phase}": seconds for phase, seconds in report["seconds"].items()},
        "whole process (wall)": run.wall_s,
    }
    table = Table(title=f"W8A8 static, {SAMPLES} x {LENGTH} tokens, one thread", title_justify="left")
    for heading in ("phase", "seconds", "of the floor", "of transformers' forward"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for name, seconds in rows.items():
        table.add_row(
            name, f"{seconds:.2f}", f"{seconds / plain['floor_s']:.2f}", f"{seconds / plain['forward_s']:.2f}"
        )
    Console().print(table)
    print(f"peak memory {run.peak_rss_mib:.0f} MiB resident, {run.peak_pss_mib:.0f} MiB proportional")
    store("calibration", {"seconds": rows, "peak_rss_mib": run.peak_rss_mib, "peak_pss_mib": run.peak_pss_mib})


if __name__ == "__main__":
    main()
