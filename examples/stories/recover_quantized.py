"""A language model in 2-bit weights: rounded, by GPTQ, trained on labels (QAT), or on its own outputs before (QAD).

    python examples/stories/recover_quantized.py

Training goes on from the same trained model, on new texts, on few texts again and again, or on random tokens. Texts
are drawn from a chain, in which the next token follows from the two before it in nine of ten cases. Nothing is
downloaded. Each figure is a mean over the seeds with its standard error.
"""

import argparse
import copy
import statistics
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, set_seed
from transformers.utils import logging

from hf_eff import EffTrainer, EffTrainingArguments
from shared_core.quantization import quantize

TOKENS, LENGTH, HISTORY = 64, 32, 8
QAD = {"distill_teacher": "self", "distill_temperature": 1.0}


def draw(count, seed):
    """Return texts of the chain as training examples."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(TOKENS, (TOKENS, HISTORY), generator=torch.Generator().manual_seed(5))
    text = torch.randint(TOKENS, (count, LENGTH), generator=generator)
    follows = torch.rand(count, LENGTH, generator=generator) < 0.9
    for t in range(2, LENGTH):
        known = table[text[:, t - 1], text[:, t - 2] % HISTORY]
        text[:, t] = torch.where(follows[:, t], known, text[:, t])
    return examples(text)


def examples(text):
    return [{"input_ids": row, "labels": row} for row in text]


def train(model, rows, steps, rate, args, seed, **techniques):
    """Return the model after training."""
    with tempfile.TemporaryDirectory() as folder:
        settings = EffTrainingArguments(
            folder, max_steps=steps, learning_rate=rate, warmup_steps=0.1, lr_scheduler_type="cosine", seed=seed,
            per_device_train_batch_size=args.batch, save_strategy="no", report_to="none", disable_tqdm=True,
            logging_strategy="no", use_cpu=True, **techniques,
        )  # fmt: skip
        trainer = EffTrainer(model, settings, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model


@torch.no_grad()
def loss_of(model, rows):
    """Return the loss on unseen texts."""
    ids = torch.stack([row["input_ids"] for row in rows])
    return float(model.eval()(input_ids=ids, labels=ids).loss)


def results(seed, args):
    """Return the loss of each way for one seed."""
    set_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, num_key_value_heads=2, **sizes))
    train(model, draw(args.steps * args.batch, seed), args.steps, 3e-3, args, seed)
    unseen, calibration = draw(512, 1000 + seed), draw(128, 2000 + seed)
    chosen = {"scheme": f"W{args.bits}A16", "group_size": 32, "skip": ["lm_head"]}
    batches = [{"input_ids": row["input_ids"][None]} for row in calibration]
    found = {"float": loss_of(model, unseen)}
    for name, gptq in {"rounded": None, "GPTQ": {}}.items():
        found[name] = loss_of(quantize(model, chosen, batches, gptq=gptq), unseen)
    random = torch.randint(
        TOKENS, (args.heal_steps * args.batch, LENGTH), generator=torch.Generator().manual_seed(seed)
    )
    texts = {
        "new texts": draw(args.heal_steps * args.batch, 3000 + seed),
        f"{len(calibration)} texts": calibration,
        "random tokens": examples(random),
    }
    qat = {f"qat_{name}": value for name, value in chosen.items()}
    for name, rows in texts.items():
        for way, more in {"QAT": {}, "QAD": QAD}.items():
            healed = train(copy.deepcopy(model), rows, args.heal_steps, args.rate, args, seed, **qat, **more)
            found[f"{way}, {name}"] = loss_of(healed, unseen)
    return found


def cell(values):
    """Return a mean with its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {error:.3f}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=2, help="of a weight")
    parser.add_argument("--batch", type=int, default=8, help="examples a step")
    parser.add_argument("--steps", type=int, default=900, help="of the float model")
    parser.add_argument("--heal_steps", type=int, default=100, help="with rounded weights")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate with rounded weights")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few and short steps: does it run?")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.heal_steps, args.seeds = 8, 2, 2
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # a second thread gains little with models so small
    found = []
    for seed in range(args.seeds):
        found.append(results(seed, args))
        print({name: round(value, 3) for name, value in found[-1].items()}, flush=True)
    print(f"\nW{args.bits}A16 in groups of 32, {args.heal_steps} steps of {args.batch} x {LENGTH} tokens\n")
    print("| weights | loss on unseen texts | minus float |\n|---|---|---|")
    for name in found[0]:
        more = cell([one[name] - one["float"] for one in found]) if name != "float" else ""
        print(f"| {name} | {cell([one[name] for one in found])} | {more} |")
    return found


if __name__ == "__main__":
    main()
