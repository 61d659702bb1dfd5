"""Greedy tokens of vLLM, by its own environment's Python: ``vllm_tokens.py JOB``, a JSON file that gets the answer."""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


def main(file: Path) -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(file.read_text())
    engine = LLM(
        job["folder"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    seconds = []
    for _ in range(job["repeats"]):
        start = time.process_time()
        found = engine.generate(prompts, greedy, use_tqdm=False)
        seconds.append(time.process_time() - start)
    answers = []
    for answer in found:
        (text,) = answer.outputs
        chosen = [step[token].logprob for token, step in zip(text.token_ids, text.logprobs, strict=True)]
        answers.append({"tokens": list(text.token_ids), "logprobs": chosen})
    file.write_text(json.dumps({"answers": answers, "seconds": min(seconds)}))


if __name__ == "__main__":  # vLLM may start processes that import this again
    main(Path(sys.argv[1]))
