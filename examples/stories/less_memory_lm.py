"""A language model distilled in less memory: the same data and steps, plain and with one more flag a row.

    python examples/stories/less_memory_lm.py
    python examples/stories/less_memory_lm.py --model distilgpt2 --teacher gpt2 --dataset Salesforce/wikitext \\
        --config wikitext-2-raw-v1

Weights, gradients and optimizer are counted on the tensors of the run; activations are the most that one step held,
measured while it ran, chunks of logits and copies of weights included. Without arguments nothing is downloaded: both
models have random weights, the teacher is trained first, and the texts are Python's own standard library.
"""

import argparse
import sys
import time
from pathlib import Path

import story_texts
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PrinterCallback, set_seed
from transformers.utils import logging

from hf_eff import EffTrainer, EffTrainingArguments
from shared_core.activation_checkpointing import measure_peak

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))
import stdlib_fragments

CHUNKED = {"distill_chunked": True, "distill_budget_mib": 4.0}
RECOMPUTED = {"checkpointing_policy": "budget:0.5"}
BF16 = {"primary_weights_kind": "stochastic_rounding", "distill_teacher_dtype": "bfloat16"}
ROWS = {
    "plain": {},
    "packed activations": {"activations_pack": "bf16"},
    "chunked loss": CHUNKED,
    "... and half recomputed": CHUNKED | RECOMPUTED,
    "... and bf16 weights": CHUNKED | RECOMPUTED | BF16,
}
MEASURED = 5  # a step after those on which a budget is planned


class MeasuredTrainer(EffTrainer):
    """Measures what one step holds."""

    activations = gradients = 0

    def training_step(self, model, *arguments, **options):
        if self.state.global_step != MEASURED:
            return super().training_step(model, *arguments, **options)
        with measure_peak(model) as peak:
            loss = super().training_step(model, *arguments, **options)
        self.activations = peak.activations / 2**20
        self.gradients = size_of(parameter.grad for parameter in model.parameters())
        return loss


def load(args, vocabulary=8000):
    """Return a tokenizer and the blocks of tokens to train and to evaluate on."""
    if args.dataset:
        found = load_dataset(args.dataset, args.config)
        texts = {name: list(found[name]["text"]) for name in ("train", "test")}
    else:
        splits = stdlib_fragments.load_fragments().splits
        texts = {name: [fragment.text for fragment in splits[name]] for name in ("train", "test")}
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        tokenizer = stdlib_fragments.train_tokenizer(texts["train"], vocabulary, args.length)
    blocks = {}
    for name, some in texts.items():
        ids = torch.tensor([token for tokens in tokenizer(some)["input_ids"] for token in tokens])
        whole = ids[: len(ids) // args.length * args.length].reshape(-1, args.length)[: args.steps * args.batch]
        blocks[name] = [{"input_ids": block, "labels": block} for block in whole]
    return tokenizer, blocks["train"], blocks["test"][:128]


def model_of(name, tokenizer, args, width, layers):
    """Return the named model, or a small one with random weights."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name)
    set_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=3 * width, max_position_embeddings=args.length,
        initializer_range=width**-0.5, bos_token_id=None, eos_token_id=None,
    ))  # fmt: skip


def train(folder, model, data, args, **techniques):
    """Return the trainer after training, and its steps per second."""
    _, blocks, _ = data
    set_seed(0)
    settings = EffTrainingArguments(
        str(folder), max_steps=args.steps, learning_rate=args.rate, warmup_steps=0.1, report_to="none",
        per_device_train_batch_size=args.batch, per_device_eval_batch_size=args.batch, save_strategy="no",
        logging_steps=25, disable_tqdm=True, dataloader_pin_memory=torch.cuda.is_available(), **techniques,
    )  # fmt: skip
    trainer = MeasuredTrainer(model, settings, train_dataset=blocks, eval_dataset=data[2])
    trainer.remove_callback(PrinterCallback)
    clock = time.perf_counter if settings.device.type == "cuda" else time.process_time  # CPUs may be shared
    start = clock()
    trainer.train()
    return trainer, args.steps / (clock() - start)


def size_of(tensors):
    """Return the MiB of these tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20


def row(name, trainer, rate, teacher):
    """Return what a run held at most, in MiB, its speed, and its loss on the test texts."""
    parameters, states = list(trainer.model.parameters()), trainer.optimizer.optimizer.state.values()
    held = {
        "weights, with the teacher's": size_of(parameters) + teacher,
        "gradients": trainer.gradients,
        "optimizer": size_of(value for state in states for value in state.values() if torch.is_tensor(value)),
        "activations": trainer.activations,
    }
    return name, held, rate, trainer.evaluate()["eval_loss"]


def flags_of(techniques):
    """Return techniques as flags."""
    return " ".join(f"--{flag} {str(value).lower()}" for flag, value in techniques.items())


def main(argv=None, runs=ROWS):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub id of the student; none: a small one with random weights")
    parser.add_argument("--teacher", help="folder or Hub id of the teacher, of the same tokenizer")
    parser.add_argument("--dataset", help="Hub id or folder of texts; none: Python's own standard library")
    parser.add_argument("--config", help="of the data set")
    parser.add_argument("--length", type=int, default=128, help="tokens of an example")
    parser.add_argument("--batch", type=int, default=8, help="examples a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--out", default="runs/less_memory", help="folder of the runs")
    parser.add_argument("--quick", action="store_true", help="few and short steps: does it run?")
    args = parser.parse_args(argv)
    if (args.model is None) != (args.teacher is None):
        parser.error("--model and --teacher must be given together")
    if args.quick:
        args.length, args.steps = 64, 8
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if args.model is None:
        torch.set_num_threads(1)  # a second thread gains little with models so small
    root, data = story_texts.new_folder(parser, args), load(args)
    teacher = args.teacher
    if teacher is None:
        trained, _ = train(root / "teacher", model_of(None, data[0], args, 192, 4), data, args)
        trained.save_model()
        teacher = str(root / "teacher")
        print(f"teacher: loss {trained.evaluate()['eval_loss']:.3f}", flush=True)

    teacher_mib = size_of(AutoModelForCausalLM.from_pretrained(teacher).parameters())
    rows = []
    for name, flags in runs.items():
        print(f"\n{name}: {flags_of(flags)}", flush=True)
        model = model_of(args.model, data[0], args, 128, 4)
        in_bf16 = "primary_weights_kind" in flags
        if in_bf16:
            model = model.to(torch.bfloat16)
        folder, taught = root / name.strip(". ").replace(" ", "_"), teacher_mib / 2 if in_bf16 else teacher_mib
        rows.append(row(name, *train(folder, model, data, args, distill_teacher=teacher, **flags), taught))
    kinds = list(rows[0][1])
    print(f"\n{args.steps} steps of {args.batch} x {args.length} tokens, vocabulary of {len(data[0]):,}; MiB\n")
    print(f"| run | {' | '.join(kinds)} | in all | | steps a CPU second | test loss |")
    print("|---" * (len(kinds) + 5) + "|")
    for name, held, rate, loss in rows:
        total, first = sum(held.values()), sum(rows[0][1].values())
        told = [f"{value:.1f}" for value in (*held.values(), total)]
        print(f"| {name} | {' | '.join(told)} | {total / first:.2f} x | {rate:.2f} | {loss:.4f} |")
    return rows


if __name__ == "__main__":
    main()
