"""vLLM serves compressed-tensors results as transformers computes them; runs in vLLM's own environment.

    python tests/serving/serve_vllm.py SOURCE RESULT...      (`make test-serving` prepares everything)

Next-token distributions of a few prompts are compared, as KL divergence in nats: each result in vLLM with the same
directory in transformers, and with the source in vLLM. Where only weights are quantized both engines compute the same
function and differ by bfloat16 rounding alone. Where activations are, they choose slightly different scales
(transformers divides the largest value by 127.5, vLLM by 127), so they are two samples of the same rounding noise.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

# Engine and worker in this process, no network; set before vllm is imported.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

TEXT = Path(__file__).parents[2] / "msmodelslim" / "lab_calib" / "eval.txt"
PROMPTS = 8
PROMPT_LENGTH = 48
#: weights only: how much more the engines may differ on a result than they do on the source
SAME_FUNCTION_RATIO = 5
#: activations too: how much more they may differ than the quantization itself costs; two independent samples give 2
SAME_NOISE_RATIO = 5
#: a scale that the engine reads wrongly costs several nats
QUANTIZED_KL = 1.0


def prompts(model: Path) -> list[list[int]]:
    """Token windows spread over the held-out text."""
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT.read_text(encoding="utf-8")).ids
    step = (len(ids) - PROMPT_LENGTH) // PROMPTS
    return [ids[start : start + PROMPT_LENGTH] for start in range(0, step * PROMPTS, step)]


def served(model: Path, texts: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of the next token in vLLM, float64 [prompt, vocabulary]."""
    engine = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=PROMPT_LENGTH + 16,
        max_num_batched_tokens=PROMPT_LENGTH + 16,
        max_logprobs=-1,
    )
    settings = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": ids} for ids in texts], settings, use_tqdm=False)
    rows = []
    for given in answers:
        found = given.outputs[0].logprobs[0]
        rows.append([found[token].logprob for token in range(len(found))])
    return torch.tensor(rows, dtype=torch.float64)


def computed(model: Path, texts: list[list[int]]) -> torch.Tensor:
    """The same in transformers."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    with torch.inference_mode():
        logits = [loaded(input_ids=torch.tensor([ids])).logits[0, -1] for ids in texts]
    return torch.log_softmax(torch.stack(logits).double(), dim=-1)


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """KL(expected ‖ found), the mean over the prompts, in nats."""
    return float((expected.exp() * (expected - found)).sum(dim=-1).mean())


def quantizes_activations(result: Path) -> bool:
    """True when some group of the result's config quantizes inputs."""
    block = json.loads((result / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    return any(group.get("input_activations") for group in block["config_groups"].values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    options = parser.parse_args()
    torch.cpu._init_amx()  # vLLM's attention uses AMX without asking the kernel for it first
    texts = prompts(options.source)
    source = served(options.source, texts)
    noise = divergence(computed(options.source, texts), source)
    print(f"{PROMPTS} prompts of {PROMPT_LENGTH} tokens; source, transformers against vLLM: KL {noise:.2e}")
    failed = 0
    for path in options.results:
        start = time.perf_counter()
        result = served(path, texts)
        seconds = time.perf_counter() - start
        cost = divergence(source, result)
        same = divergence(computed(path, texts), result)
        limit = SAME_NOISE_RATIO * cost if quantizes_activations(path) else SAME_FUNCTION_RATIO * noise
        agree = int((source.argmax(dim=-1) == result.argmax(dim=-1)).sum())
        passed = same < limit and cost < QUANTIZED_KL
        failed += not passed
        print(f"{path}: {'passed' if passed else 'FAILED'}, {seconds:.1f} s in vLLM")
        print(f"  transformers against vLLM: KL {same:.2e}, limit {limit:.2e}")
        print(f"  vLLM, source against it:   KL {cost:.2e}, limit {QUANTIZED_KL}; same token for {agree} of {PROMPTS}")
    print(f"{len(options.results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
