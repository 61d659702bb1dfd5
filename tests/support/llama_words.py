"""Texts as llama.cpp's tokens, by its environment's Python: ``llama_words.py JOB``, a file that gets the answer."""

import json
import sys
from pathlib import Path


def main(file: Path) -> None:
    from llama_cpp import Llama

    job = json.loads(file.read_text())
    engine = Llama(job["folder"], vocab_only=True, verbose=False)
    answers = [engine.tokenize(text.encode(), add_bos=False, special=True) for text in job["texts"]]
    file.write_text(json.dumps({"answers": answers}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
