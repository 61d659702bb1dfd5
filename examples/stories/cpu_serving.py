"""An encoder made ready to serve on a CPU: a student of half the depth, half of its neurons removed, int8, ONNX.

    python examples/stories/cpu_serving.py
    python examples/stories/cpu_serving.py --model bert-base-uncased --dataset ag_news --epochs 2 --rate 5e-5

Five steps, each one flag or one command: fine-tune a teacher; distill it into half of its layers; prune half of the
neurons and remove them (`eff shrink`); train for int8; `eff export`. The table is measured in onnxruntime, on the test
split, which nothing was trained or chosen on. Without arguments nothing is downloaded: the texts are fragments of
Python's standard library, to be told apart by package, and the model is a small BERT with random weights.
"""

import sys
from pathlib import Path

import onnxruntime
import story_texts
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PrinterCallback,
    set_seed,
)

from hf_eff import EffTrainer, EffTrainingArguments
from shared_core.cli import app

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))
from onnx_files import batches_of, hits_of, milliseconds, sessions_of

SIZE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}


def train(folder, model, data, args, rate, epochs, **techniques):
    """Train with these techniques; return the folder, which then holds the model and its receipt."""
    print(
        f"\n{folder}: " + (" ".join(f"--{name} {value}" for name, value in techniques.items()) or "plain"), flush=True
    )
    tokenizer, splits, _ = data
    set_seed(0)
    settings = EffTrainingArguments(
        str(folder), learning_rate=rate, num_train_epochs=0.5 if args.quick else epochs, warmup_steps=0.1,
        weight_decay=0.01, per_device_train_batch_size=32, per_device_eval_batch_size=128, eval_strategy="epoch",
        save_strategy="no", logging_steps=25, report_to="none", disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(), **techniques,
    )  # fmt: skip
    trainer = EffTrainer(
        model, settings, train_dataset=splits["train"], eval_dataset=splits["validation"], processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda told: {"accuracy": float((told.predictions.argmax(-1) == told.label_ids).mean())},
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()
    print(f"validation accuracy {100 * trainer.evaluate()['eval_accuracy']:.1f} %", flush=True)
    return folder


def eff(*arguments):
    """Run the command line, in this process: it starts faster."""
    print("\neff " + " ".join(map(str, arguments)), flush=True)
    app([*map(str, arguments)], standalone_mode=False)


def main(argv=None):
    parser = story_texts.flags(__doc__, "runs/story_cpu_serving")
    parser.add_argument("--epochs", type=int, default=5, help="of the teacher and the student; later steps take fewer")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of the teacher and the student")
    args = parser.parse_args(argv)
    story_texts.quiet(args)
    root, data = story_texts.new_folder(parser, args), story_texts.load(args)
    tokenizer, splits, labels = data
    load = AutoModelForSequenceClassification.from_pretrained

    set_seed(0)
    teacher = train(
        root / "teacher", story_texts.classifier(args, tokenizer, labels, **SIZE), data, args, args.rate, args.epochs
    )
    taught = {"distill_teacher": str(teacher), "distill_alpha": 0.3}
    config = AutoConfig.from_pretrained(teacher)
    config.num_hidden_layers //= 2
    half = AutoModelForSequenceClassification.from_config(config)
    student = train(root / "student", half, data, args, args.rate, args.epochs, **taught, distill_init_layers="even")
    later = max(1, args.epochs // 2)
    pruned = train(
        root / "pruned", load(student), data, args, args.rate / 2, later, **taught,
        prune_sparsity=0.5, prune_granularity="neuron", prune_scope="local", prune_end=0.5,
    )  # fmt: skip
    eff("shrink", pruned, "--out", root / "small")
    int8 = train(root / "int8", load(root / "small"), data, args, args.rate / 4, later, **taught, qat_scheme="int8")

    rows = {"teacher": teacher, "student": student, "... half of its neurons": root / "small", "... in int8": int8}
    files = [folder / "model.onnx" for folder in rows.values()]
    for folder, file in zip(rows.values(), files, strict=True):
        eff("export", folder, "--length", args.max_length, "--out", file)
    eff("report", teacher, student, pruned, int8, "--out", root / "report.html")

    sessions, collate = (
        sessions_of(files),
        DataCollatorWithPadding(tokenizer, "max_length", args.max_length, None, "np"),
    )
    test = batches_of(splits["test"], collate)
    hits = [hits_of(session, test) for session in sessions]
    one, many = ({name: value[:size] for name, value in test[0].items()} for size in (1, 32))
    rounds = 10 if args.quick else 200
    alone, together = milliseconds(sessions, one, rounds), milliseconds(sessions, many, rounds // 4)
    sizes = [file.stat().st_size for file in files]
    runtime = f"onnxruntime {onnxruntime.__version__}, one thread"
    print(f"\n{len(hits[0]):,} test texts, {args.max_length} tokens; {runtime}\n")
    print("| model | accuracy % ± standard error | points beside teacher | file kB | | ms, 1 text | | ms, 32 texts | |")
    print("|---|---|---|---|---|---|---|---|---|")
    for i, name in enumerate(rows):
        told = [name, story_texts.percent(hits[i]), story_texts.gain(hits[i], hits[0]) if i else ""]
        for values, form in ((sizes, "{:,.0f}"), (alone, "{:.2f}"), (together, "{:.1f}")):
            scale = 1000 if values is sizes else 1
            told += [form.format(values[i] / scale), f"{values[0] / values[i]:.1f} x"]
        print(f"| {' | '.join(told)} |")
    return hits


if __name__ == "__main__":
    main()
