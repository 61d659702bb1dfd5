"""A sweep of fine-tunings becomes one better model: the greedy soup beside the best single run and the ensemble.

    python examples/stories/soup_a_sweep.py
    python examples/stories/soup_a_sweep.py --model bert-base-uncased --dataset ag_news --rates 1e-5 3e-5 5e-5

Runs with other learning rates and seeds go on from one start, in Lightning; of a sweep all but one are usually
thrown away. A soup costs no training and is one model. The validation split chooses the best single run and the
members of the greedy soup; the table is measured on the test split, which chose nothing. Without arguments nothing is
downloaded: a small BERT is first pre-trained by masked words on fragments of Python's standard library.
"""

import logging
import warnings

import pytorch_lightning as pl
import story_texts
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from rich.console import Console
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
)

from shared_core.checkpoint_formats import open_ingredient
from shared_core.soup import greedy_soup, path_table, save_soup, uniform_soup

SIZE = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 256}


class Model(pl.LightningModule):
    """Any model of transformers that returns a loss."""

    def __init__(self, net, rate):
        super().__init__()
        self.net, self.rate = net.train(), rate  # from_pretrained returns it in evaluation mode

    def training_step(self, batch, batch_index):
        return self.net(**batch).loss

    def validation_step(self, batch, batch_index):
        right = (self.net(**batch).logits.argmax(-1) == batch["labels"]).float().mean()
        self.log("val_accuracy", right, batch_size=len(batch["labels"]))

    def configure_optimizers(self):
        # constant: where the learning rate ends at 0, runs are so settled that averages gain little
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


def fit(module, seed, train, validation=None, folder=None, epochs=1):
    """Train in Lightning; return the last checkpoint, if a folder is given."""
    pl.seed_everything(seed, verbose=False)
    saving = [ModelCheckpoint(folder, "last", save_weights_only=True)] if folder else []
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="auto", callbacks=saving, enable_checkpointing=bool(saving), logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, train, validation)
    return saving[0].best_model_path if folder else None


@torch.no_grad()
def probabilities(module, loader):
    """Return the class probabilities, (examples, classes)."""
    module.eval()
    return torch.cat([module.net(**batch).logits.softmax(-1) for batch in loader])


def main(argv=None):
    parser = story_texts.flags(__doc__, "runs/story_soup")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 3e-3, 4e-3], help="learning rates")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each learning rate")
    parser.add_argument("--start_epochs", type=int, default=2, help="of the fine-tuning that all runs go on from")
    parser.add_argument("--epochs", type=int, default=2, help="of each run")
    args = parser.parse_args(argv)
    story_texts.quiet(args)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    if args.quick:
        args.seeds = args.start_epochs = args.epochs = 1
    root = story_texts.new_folder(parser, args)
    tokenizer, splits, labels = story_texts.load(args)
    pad = DataCollatorWithPadding(tokenizer)
    train = DataLoader(splits["train"], 32, shuffle=True, collate_fn=pad)
    validation, test = (DataLoader(splits[name], 128, collate_fn=pad) for name in ("validation", "test"))

    if args.model is None:
        pl.seed_everything(0, verbose=False)
        language = Model(story_texts.random_bert(BertForMaskedLM, tokenizer, args.max_length, **SIZE), 3e-3)
        masked = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.2)
        texts = splits["train"].remove_columns("labels")
        fit(language, 0, DataLoader(texts, 32, shuffle=True, collate_fn=masked), epochs=1 if args.quick else 6)
        language.net.save_pretrained(root / "language")
        tokenizer.save_pretrained(root / "language")
        args.model = str(root / "language")
    # one start: runs that each move far, from a head with random weights, end too far apart to be averaged
    pl.seed_everything(0, verbose=False)
    start, rate = root / "start", sorted(args.rates)[len(args.rates) // 2]
    begun = Model(story_texts.classifier(args, tokenizer, labels), rate)
    fit(begun, 0, train, epochs=args.start_epochs)
    begun.net.save_pretrained(start)

    def fresh(rate=0.0):
        return Model(AutoModelForSequenceClassification.from_pretrained(start), rate)

    files = []
    for rate in args.rates:
        for seed in range(args.seeds):
            files.append(fit(fresh(rate), seed, train, validation, root / f"rate {rate:g} seed {seed}", args.epochs))
            print(f"trained: {files[-1]}", flush=True)

    judge = fresh()
    truth = {loader: torch.tensor(loader.dataset["labels"]) for loader in (validation, test)}

    def judged(weights, loader):
        judge.load_state_dict(weights)
        return probabilities(judge, loader)

    def accuracy(weights):
        return float((judged(weights, validation).argmax(-1) == truth[validation]).float().mean())

    greedy = greedy_soup(files, accuracy)
    Console(width=110).print(path_table(greedy))
    (root / "soup").mkdir()
    save_soup(greedy.state_dict, open_ingredient(greedy.ingredients[0]), root / "soup" / "soup.ckpt")
    members = [dict(torch.load(file, weights_only=True)["state_dict"]) for file in files]
    best = max(members, key=accuracy)
    of = {"best single run": [best], "uniform soup": [uniform_soup(files)], "greedy soup": [greedy.state_dict]}
    of[f"ensemble of {len(files)}"] = members
    right = {
        name: {
            loader: (torch.stack([judged(one, loader) for one in weights]).mean(0).argmax(-1) == truth[loader]).double()
            for loader in (validation, test)
        }
        for name, weights in of.items()
    }
    mean = torch.stack([(judged(one, test).argmax(-1) == truth[test]).double() for one in members]).mean()
    told = f"{len(files)} runs, {len(greedy.ingredients)} of them in the greedy soup"
    print(f"\n{told}; {len(truth[test]):,} test texts, of which the mean run has {100 * mean:.1f} % right\n")
    print("| what | models to serve | validation %, which chose | test % ± standard error | points beside best run |")
    print("|---|---|---|---|---|")
    for name, hits in right.items():
        points = story_texts.gain(hits[test], right["best single run"][test]) if name in list(of)[1:] else ""
        print(f"| {name} | {len(of[name])} | {100 * hits[validation].mean():.1f} | "
              f"{story_texts.percent(hits[test])} | {points} |")  # fmt: skip
    return right


if __name__ == "__main__":
    main()
