"""The main job on a real model: quantize SmolLM2-135M to W8A8, load the result with transformers, compare the two.

    python examples/demo.py [--work_dir .cache] [--quant_type w8a8] [--device cpu] [--device_id 0 1]

Prints one table: size, perplexity on held-out text, a generated sentence, and what the quantization run itself took.
`make demo` installs what this needs and runs it.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")

import smollm2
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import msmodelslim

TEXT = Path(msmodelslim.__file__).parent / "lab_calib" / "eval.txt"
QUESTION = "What is the capital of France? Answer in one sentence."
WINDOWS = 32
WINDOW_LENGTH = 512
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Report:
    """One model as a user meets it.

    Args:
        size_mib: weight files on disk.
        perplexity: on held-out text, by transformers.
        seconds: of the perplexity run.
        sentence: greedy answer to the question.
    """

    size_mib: float
    perplexity: float
    seconds: float
    sentence: str


def windows(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token windows spread evenly over the held-out text."""
    ids = tokenizer(TEXT.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    step = len(ids) // WINDOW_LENGTH / WINDOWS
    starts = [int(index * step) * WINDOW_LENGTH for index in range(WINDOWS)]
    return [ids[start : start + WINDOW_LENGTH] for start in starts]


def perplexity(model: PreTrainedModel, texts: list[list[int]]) -> float:
    """exp of the mean negative log-likelihood of each token given those before it in its window."""
    total = 0.0
    for ids in texts:
        tokens = torch.tensor([ids])
        logits = model(input_ids=tokens).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
    return math.exp(total / sum(len(ids) - 1 for ids in texts))


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """The model's greedy answer to the question."""
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(output[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def measure(directory: Path) -> Report:
    """Load a directory with transformers alone, as any user of it would, and measure it."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    with torch.inference_mode():
        start = time.perf_counter()
        found = perplexity(model, windows(tokenizer))
        seconds = time.perf_counter() - start
        sentence = answer(model, tokenizer)
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return Report(size / MEBIBYTE, found, seconds, sentence)


def quantize(model: Path, result: Path, quant_type: str, device: str, device_ids: list[int]) -> tuple[float, float]:
    """Run `msmodelslim quant`; returns (wall seconds with start-up, peak memory in MiB as its report has it)."""
    command = [sys.executable, "-m", "msmodelslim", "quant", "--model_path", str(model), "--save_path", str(result)]
    command += ["--quant_type", quant_type, "--tag", "transformers", "--yes", "--overwrite", "--device", device]
    if device_ids:
        command += ["--device_id", *map(str, device_ids)]
    print("$", "msmodelslim", *command[3:], flush=True)
    start = time.perf_counter()
    done = subprocess.run(command)
    if done.returncode:
        sys.exit(done.returncode)  # the command has said why
    seconds = time.perf_counter() - start
    return seconds, json.loads((result / "quant_report.json").read_text())["peak_memory_mib"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work_dir", type=Path, default=Path(".cache"))
    parser.add_argument("--quant_type", default="w8a8")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--device_id", type=int, nargs="*", default=[0, 1])
    options = parser.parse_args()
    source = options.work_dir / "smollm2"
    result = options.work_dir / f"smollm2-{options.quant_type}"
    smollm2.make(source)
    seconds, peak_mib = quantize(source, result, options.quant_type, options.device, options.device_id)
    before, after = measure(source), measure(result)

    table = Table(title=f"SmolLM2-135M-Instruct, {options.quant_type}, loaded with transformers")
    for column in ("", "bfloat16", options.quant_type):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("weights on disk", f"{before.size_mib:.1f} MiB", f"{after.size_mib:.1f} MiB")
    ratio = after.perplexity / before.perplexity
    table.add_row(
        f"perplexity, {WINDOWS} x {WINDOW_LENGTH}",
        f"{before.perplexity:.3f}",
        f"{after.perplexity:.3f} ({ratio:.4f} x)",
    )
    table.add_row("  seconds it took", f"{before.seconds:.1f}", f"{after.seconds:.1f}")
    table.add_row("seconds to quantize", "", f"{seconds:.1f}")
    table.add_row("  peak memory", "", f"{peak_mib:.0f} MiB")
    table.add_row(f"“{QUESTION}”", before.sentence, after.sentence)
    Console().print(table)


if __name__ == "__main__":
    main()
