"""The same work for every benchmark: model, calibration samples, windows, child processes that are measured.

A benchmark reports ratios within one run, so it needs no quiet machine, only an equally noisy one throughout.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SAMPLES, LENGTH = 128, 512


def one_thread_env(threads: int = 1) -> dict[str, str]:
    """Environment of a child with that many threads and no network."""
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def calibration_ids(model: Path, text: Path, samples: int = SAMPLES, length: int = LENGTH) -> list[list[int]]:
    """`samples` lists of exactly `length` token ids, cut from the shuffled documents of a JSONL file."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    documents = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    random.Random(0).shuffle(documents)
    found: list[list[int]] = []
    buffer: list[int] = []
    for document in documents:
        buffer += tokenizer(document + "\n\n", add_special_tokens=False)["input_ids"]
        while len(buffer) >= length and len(found) < samples:
            found.append(buffer[:length])
            buffer = buffer[length:]
    if len(found) < samples:
        raise SystemExit(f"{text}: {len(found)} samples of {length} tokens, {samples} needed; give a larger --text")
    return found


def write_samples(path: Path, ids: list[list[int]]) -> Path:
    """Pre-tokenized samples as a data set that a recipe can name."""
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))
    return path


@dataclass
class Measured:
    """One child process: wall and CPU seconds, peak memory of its tree (proportional and resident), its output."""

    wall_s: float
    cpu_s: float
    peak_pss_mib: float
    peak_rss_mib: float
    output: str


def measure(command: list[str], threads: int = 1) -> Measured:
    """Run a command to its end; SystemExit with its output when it fails."""
    before = os.times()
    start = time.perf_counter()
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=one_thread_env(threads), cwd=ROOT
    )
    peak = {"Pss": 0, "Rss": 0}
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(child.pid, peak, stop))
    watcher.start()
    output, _ = child.communicate()
    wall = time.perf_counter() - start
    stop.set()
    watcher.join()
    after = os.times()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}\n{output}\nexit code {child.returncode}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Measured(wall, cpu, peak["Pss"] / 1024, peak["Rss"] / 1024, output)


def _watch(root: int, peak: dict[str, int], stop: threading.Event) -> None:
    while not stop.wait(0.5):  # reading the maps takes time from the measured work
        sums = dict.fromkeys(peak, 0)
        for process in _tree(root):
            try:
                lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue  # it ended meanwhile
            for line in lines:
                key, _, value = line.partition(":")
                if key in sums:
                    sums[key] += int(value.split()[0])
        for key, value_kib in sums.items():
            peak[key] = max(peak[key], value_kib)


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        process = todo.pop()
        found.append(process)
        todo += children.get(process, [])
    return found


def quant_command(model: Path, save: Path, recipe: Path, *more: str) -> list[str]:
    """The tool as its user calls it."""
    paths = ["--model_path", str(model), "--save_path", str(save), "--config_path", str(recipe), "--overwrite"]
    return [sys.executable, "-m", "msmodelslim", "quant", *paths, "--device", "cpu", *more]


def store(name: str, result: dict[str, object]) -> None:
    """Keep a benchmark's numbers as JSON and say where."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nstored in {path.relative_to(ROOT)}")
