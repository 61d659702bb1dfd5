"""Greedy tokens of vLLM, by its own environment's Python: ``vllm_tokens.py JOB``, a JSON file that gets the answer.

On CPUs vLLM multiplies experts in int8 with AMX alone. Elsewhere torch does it here, on what vLLM has loaded. Its
kernel of FP8 for CPUs looks for a scale of each token, also where the file has one for all; it gets that.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


def multiply_experts_in_torch() -> None:
    """Have vLLM's experts in W8A8 multiplied by torch: loading, routing and all else stay vLLM's."""
    import torch
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt8
    from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_int8 as experts,
    )

    def product(x, codes, scale):
        step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return (x / step).round() @ codes.float().T * step * scale.T

    def apply(self, layer, x, topk_weights, topk_ids, *_, **__):
        made = torch.zeros_like(x)
        for expert in topk_ids.unique().tolist():
            tokens, places = torch.where(topk_ids == expert)
            gate, up = product(x[tokens], layer.w13_weight[expert], layer.w13_weight_scale[expert]).chunk(2, -1)
            hidden = torch.nn.functional.silu(gate) * up
            hidden = product(hidden, layer.w2_weight[expert], layer.w2_weight_scale[expert])
            made.index_add_(0, tokens, hidden * topk_weights[tokens, places, None].to(x.dtype))
        return made

    method = experts.CompressedTensorsW8A8Int8MoEMethod
    experts.select_int8_moe_backend = lambda **_: (Int8MoeBackend.CPU, CPUExpertsInt8)
    method.process_weights_after_loading = lambda self, layer: None
    method.apply = apply
    method.is_monolithic = False


def give_each_token_the_fixed_scale() -> None:
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel as Kernel

    multiply = Kernel.apply_scaled_mm

    def apply(self, *, A, As, **others):
        return multiply(self, A=A, As=As.reshape(1, 1).expand(len(A), 1) if As.numel() == 1 else As, **others)

    Kernel.apply_scaled_mm = apply


def main(file: Path) -> None:
    import torch
    from vllm import LLM, SamplingParams

    job = json.loads(file.read_text())
    if job["dtype"] != "bfloat16":  # vLLM 0.32 takes its AMX kernels for int8 all the same, and they fail
        torch.cpu._is_amx_tile_supported = lambda: False
    if not torch.cpu._is_amx_tile_supported():
        multiply_experts_in_torch()
    give_each_token_the_fixed_scale()
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
