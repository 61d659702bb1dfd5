"""A language model cut to half of its parameters in one go, then healed by distillation (Minitron).

    python examples/stories/smaller_lm.py

Layers, channels, neurons and heads are chosen by what they do on calibration batches, or at random, or by their
weights. Each small model then learns from the big one for as many steps as one of the same sizes that starts from
random weights. Nothing is downloaded: the texts are Python's own standard library. One seed: a difference below 0.02
says nothing.
"""

import argparse

import story_texts
import torch
from less_memory_lm import load
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, set_seed
from transformers.utils import logging

from hf_eff import EffTrainer, EffTrainingArguments
from shared_core.tools.shrink import shrink_to

SIZES = {"layers": 5, "hidden_size": 72, "intermediate_size": 192, "attention_heads": 4, "key_value_heads": 2}
DISTILL = {"distill_temperature": 1.0, "distill_alpha": 0.0}


def train(folder, model, data, steps, args, **techniques):
    """Train on the blocks of tokens; return the loss on the test's."""
    set_seed(0)
    settings = EffTrainingArguments(
        str(folder), max_steps=steps, learning_rate=args.rate, warmup_steps=0.1, lr_scheduler_type="cosine",
        per_device_train_batch_size=args.batch, per_device_eval_batch_size=args.batch, save_strategy="no",
        report_to="none", disable_tqdm=True, dataloader_pin_memory=torch.cuda.is_available(), **techniques,
    )  # fmt: skip
    trainer = EffTrainer(model, settings, train_dataset=data[1], eval_dataset=data[2])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()
    return trainer.evaluate()["eval_loss"]


@torch.no_grad()
def loss_of(model, data, batch):
    """Return the loss on the blocks of the test."""
    rows = torch.stack([row["input_ids"] for row in data[2]]).split(batch)
    return sum(float(model.eval()(input_ids=ids, labels=ids).loss) * len(ids) for ids in rows) / len(data[2])


def big_model(tokenizer, args):
    """Return a small Llama with random weights."""
    set_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=3,
        intermediate_size=288, max_position_embeddings=args.length, initializer_range=96**-0.5,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    ))  # fmt: skip


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=64, help="tokens of an example")
    parser.add_argument("--batch", type=int, default=16, help="examples a step")
    parser.add_argument("--steps", type=int, default=800, help="of the big model")
    parser.add_argument("--heal_steps", type=int, default=120, help="of the small ones")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--out", default="runs/smaller", help="folder of the runs")
    parser.add_argument("--quick", action="store_true", help="few and short steps: does it run?")
    args = parser.parse_args(argv)
    if args.quick:
        args.length, args.steps, args.heal_steps = 64, 8, 4
    args.dataset = args.model = None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # a second thread gains little with models so small
    root, data = story_texts.new_folder(parser, args), load(args, vocabulary=2000)
    big = big_model(data[0], args)
    whole = train(root / "big", big, data, args.steps, args)
    print(f"big: {big.num_parameters():,} parameters, loss {whole:.3f}", flush=True)

    ids = torch.stack([row["input_ids"] for row in data[1][:128]]).split(args.batch)
    batches = [{"input_ids": rows, "labels": rows} for rows in ids]
    rows = []
    for name, layer in (("activations", "block_influence"), ("magnitude", "random"), ("random", "random")):
        cut = shrink_to(
            big,
            SIZES,
            batches,
            {"input_ids": ids[0][:2, :16]},
            criterion=name,
            layer_criterion=layer,
            latency_repeats=0,
        )
        before = loss_of(cut.model, data, args.batch)
        healed = train(
            root / name, cut.model, data, args.heal_steps, args, distill_teacher=str(root / "big"), **DISTILL
        )
        rows.append((f"cut by {name}, layers by {layer}", f"{before:.3f}", healed))
        print(rows[-1], cut.chosen["layers"], flush=True)
    for name, flags in (("distilled", {"distill_teacher": str(root / "big"), **DISTILL}), ("trained", {})):
        set_seed(0)
        fresh = LlamaForCausalLM(cut.model.config)
        rows.append(
            (f"from random weights, {name}", "", train(root / name, fresh, data, args.heal_steps, args, **flags))
        )
        print(rows[-1], flush=True)
    print(f"\n{args.heal_steps} steps of {args.batch} x {args.length} tokens, vocabulary of {len(data[0]):,}")
    print(f"| model | parameters | loss after the cut | after {args.heal_steps} steps |\n|---|---|---|---|")
    print(f"| big, {args.steps} steps | {big.num_parameters():,} | | {whole:.3f} |")
    for name, before, healed in rows:
        print(f"| {name} | {cut.parameters[1]:,} | {before} | {healed:.3f} |")
    return rows


if __name__ == "__main__":
    main()
