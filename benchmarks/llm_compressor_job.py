"""One llm-compressor run, as its documentation has it: `python llm_compressor_job.py MODEL SAMPLES.jsonl OUT METHOD`.

Runs in an environment of its own, so it imports nothing of msmodelslim. Model type, sequential pipeline, damping and
act-order are llm-compressor's defaults.
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

HEAD = ["lm_head"]
INT4_GROUPS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
SMOOTH = {"smoothing_strength": 0.8}
METHODS = {
    "smoothquant_w8a8": lambda: [
        SmoothQuantModifier(**SMOOTH),
        QuantizationModifier(targets="Linear", scheme="W8A8", ignore=HEAD),
    ],
    "smoothquant_gptq_w8a8": lambda: [
        SmoothQuantModifier(**SMOOTH),
        GPTQModifier(targets="Linear", scheme="W8A8", ignore=HEAD),
    ],
    "gptq_w4a16": lambda: [
        GPTQModifier(config_groups={"all": {"targets": ["Linear"], "weights": INT4_GROUPS}}, ignore=HEAD)
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("samples", type=Path, help='JSONL, one {"input_ids": [...]} a line, all of one length')
    parser.add_argument("out", type=Path)
    parser.add_argument("method", choices=METHODS)
    options = parser.parse_args()
    ids = [json.loads(line)["input_ids"] for line in options.samples.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    oneshot(
        model=model,
        dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}),
        recipe=METHODS[options.method](),
        max_seq_length=len(ids[0]),
        num_calibration_samples=len(ids),
    )
    model.save_pretrained(options.out, save_compressed=True)
    AutoTokenizer.from_pretrained(options.model).save_pretrained(options.out)
    packages = ("llmcompressor", "compressed-tensors", "transformers", "torch")
    print("VERSIONS " + json.dumps({name: version(name) for name in packages}))


if __name__ == "__main__":
    main()
