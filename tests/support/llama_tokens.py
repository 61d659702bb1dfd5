"""Greedy tokens of llama.cpp, by its environment's Python: ``llama_tokens.py JOB``, a file that gets the answer."""

import json
import sys
import time
from pathlib import Path

import numpy as np


def main(file: Path) -> None:
    from llama_cpp import Llama

    job = json.loads(file.read_text())
    engine = Llama(job["folder"], n_ctx=64, n_batch=64, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)

    def answer(prompt: list[int]) -> dict[str, list[float]]:
        engine.reset()
        tokens, logprobs, read = [], [], prompt
        for _ in range(job["tokens"]):
            engine.eval(read)
            logits = np.asarray(engine.scores[engine.n_tokens - 1], np.float64)
            tokens.append(int(logits.argmax()))
            logprobs.append(float(-np.log(np.exp(logits - logits.max()).sum())))
            read = tokens[-1:]
        return {"tokens": tokens, "logprobs": logprobs}

    seconds = []
    for _ in range(job["repeats"]):
        start = time.process_time()
        answers = [answer(prompt) for prompt in job["prompts"]]
        seconds.append(time.process_time() - start)
    file.write_text(json.dumps({"answers": answers, "seconds": min(seconds)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
