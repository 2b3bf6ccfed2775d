"""vLLM serves a compressed-tensors result as transformers computes it; runs in vLLM's own environment.

    python tests/serving/serve_vllm.py SOURCE RESULT      (`make test-serving` prepares everything)

Next-token distributions of a few prompts are compared: the result in vLLM with the same directory in transformers
(which must agree closely: the engine reads what was written) and with the source in vLLM (what quantization costs).
"""

import argparse
import os
import sys
import time
from pathlib import Path

# Engine and worker in this process, no network; set before vllm is imported.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
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
SAME_MODEL_KL = 1e-3  # two implementations of the same bfloat16 arithmetic; measured ones lie near 1e-5
QUANTIZED_KL = 0.1


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


def divergence(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL(expected ‖ found) a prompt, in nats."""
    return (expected.exp() * (expected - found)).sum(dim=-1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    torch.cpu._init_amx()  # vLLM's attention uses AMX without asking the kernel for it first
    texts = prompts(options.source)
    start = time.perf_counter()
    source, result = served(options.source, texts), served(options.result, texts)
    seconds = time.perf_counter() - start
    same = divergence(computed(options.result, texts), result)
    cost = divergence(source, result)
    agree = int((source.argmax(dim=-1) == result.argmax(dim=-1)).sum())
    print(f"{PROMPTS} prompts of {PROMPT_LENGTH} tokens, {seconds:.1f} s in vLLM")
    print(f"result, vLLM against transformers: largest KL {same.max():.2e} (limit {SAME_MODEL_KL})")
    print(f"vLLM, result against source: mean KL {cost.mean():.2e} (limit {QUANTIZED_KL}), largest {cost.max():.2e}")
    print(f"vLLM, result and source choose the same next token for {agree} of {PROMPTS}")
    passed = bool(same.max() < SAME_MODEL_KL and cost.mean() < QUANTIZED_KL)
    print(f"{int(passed)} passed, {int(not passed)} failed")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
