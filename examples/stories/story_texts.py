"""The stories' labeled texts, tokenizer and classifier, of this machine or of the Hub."""

import argparse
import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification
from transformers.utils import logging

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))
import quickstart_data
import stdlib_fragments


def flags(description, out, max_length=96):
    """Return the parser of a story's flags."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub id to start from; none: a small one with random weights")
    parser.add_argument("--dataset", help="Hub id or folder of a data set; none: Python's own standard library")
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--label_column", default="label")
    parser.add_argument("--max_length", type=int, default=max_length, help="tokens that are kept of a text")
    parser.add_argument("--out", default=out, help="folder of the runs")
    parser.add_argument("--quick", action="store_true", help="a share of the data and of the steps: does it run?")
    return parser


def new_folder(parser, args):
    """Return the folder of the runs; nothing of an earlier story is mixed with them or deleted."""
    if Path(args.out).exists():
        parser.error(f"--out must be a new folder, got {args.out}; remove it, or name another")
    return Path(args.out)


def quiet(args):
    """Leave the terminal to the story."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if args.model is None:
        torch.set_num_threads(1)  # a second thread gains little with models so small, and loses much on a busy machine


def load(args):
    """Return a tokenizer, the data set of each split, and the names of the labels."""
    given = {"train_file": None, "validation_file": None, "test_file": None, "dataset_name": args.dataset}
    texts, labels = quickstart_data.load_texts(argparse.Namespace(**given, **vars(args)))
    if args.quick:
        texts = {name: rows[:: max(1, len(rows) // 256)] for name, rows in texts.items()}
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        tokenizer = stdlib_fragments.train_tokenizer([row["text"] for row in texts["train"]], 2000, args.max_length)
    return tokenizer, quickstart_data.tokenize(texts, tokenizer, args.max_length), labels


def classifier(args, tokenizer, labels, **size):
    """Return the named model with a new head, or a BERT of that size with random weights."""
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: index for index, label in enumerate(labels)}}
    if args.model:
        return AutoModelForSequenceClassification.from_pretrained(args.model, ignore_mismatched_sizes=True, **names)
    return random_bert(BertForSequenceClassification, tokenizer, args.max_length, **size, **names)


def random_bert(kind, tokenizer, max_length, hidden_size, **size):
    """Return a small BERT with random weights."""
    config = BertConfig(
        hidden_size=hidden_size, **size, vocab_size=len(tokenizer), max_position_embeddings=max_length,
        pad_token_id=tokenizer.pad_token_id, attention_probs_dropout_prob=0.0,
        initializer_range=hidden_size**-0.5,  # BERT's 0.02 suits a width of 768
    )  # fmt: skip
    model = kind(config)
    for table in (module for module in model.modules() if isinstance(module, torch.nn.Embedding)):
        torch.nn.init.normal_(table.weight, std=0.02)  # embeddings that start small turn faster
    return model


def percent(hits):
    """Return the accuracy of a row of right (1) and wrong (0) with its standard error, in percent."""
    share = float(hits.mean())
    return f"{100 * share:.1f} ± {100 * math.sqrt(share * (1 - share) / len(hits)):.1f}"


def gain(hits, other):
    """Return how many points more of the same examples are right than in another row, with its standard error."""
    difference = hits - other
    return f"{100 * float(difference.mean()):+.1f} ± {100 * float(difference.std()) / math.sqrt(len(difference)):.1f}"
