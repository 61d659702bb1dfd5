"""Built-in evaluators of `eff soup --task`, against the Trainer's own numbers and float64."""

import functools
import json
import math
import sys

import commands
import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_eff.evaluation import FolderEvaluator, class_score
from shared_core.errors import CheckpointError, ConfigError

WORDS = [
    "the", "a", "good", "bad", "film", "plot", "was", "is", "not", "very", "dull", "fine", "one", "we", "saw", "it",
]  # fmt: skip


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    vocabulary = {name: number for number, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    for number in range(3):
        classifier = make_classifier(0)
        language = make_language_model(0)
        generator = torch.Generator().manual_seed(number)
        for model, name in ((classifier, "bert"), (language, "llama")):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            model.save_pretrained(folder / name / f"checkpoint-{number}")
            tokenizer.save_pretrained(folder / name / f"checkpoint-{number}")
    generator = torch.Generator().manual_seed(7)
    rows = []
    for number in range(23):
        length = int(torch.randint(1, 14, (1,), generator=generator))
        picks = torch.randint(len(WORDS), (length,), generator=generator).tolist()
        rows.append({"text": " ".join(WORDS[pick] for pick in picks), "label": number % 4})
    data = Dataset.from_list(rows)
    data.to_json(folder / "data.jsonl")
    data.to_csv(folder / "data.csv")
    data.to_parquet(folder / "data.parquet")
    data.save_to_disk(folder / "saved")
    return folder


def make_classifier(seed):
    torch.manual_seed(seed)
    return BertForSequenceClassification(
        BertConfig(vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                   max_position_embeddings=16, num_labels=4)
    )  # fmt: skip


def make_language_model(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                    intermediate_size=32, max_position_embeddings=16, tie_word_embeddings=True)
    )  # fmt: skip


def weights_of(model):
    return dict(model.state_dict())


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_classification_is_that_of_each_example_alone(room, batch_size):
    folder = room / "bert" / "checkpoint-0"
    model = AutoModelForSequenceClassification.from_pretrained(folder).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    losses, guesses, labels = [], [], []
    for line in (room / "data.jsonl").read_text().splitlines():
        row = json.loads(line)
        ids = tokenizer(row["text"], truncation=True, max_length=16, return_tensors="pt")
        logits = model(**ids).logits[0].detach()
        losses.append(float(-logits.log_softmax(0)[row["label"]]))
        guesses.append(int(logits.argmax()))
        labels.append(row["label"])
    hits = sum(guess == label for guess, label in zip(guesses, labels, strict=True)) / len(labels)
    state = weights_of(model.float())
    expected = {"loss": sum(losses) / len(losses), "accuracy": hits}
    for task, value in expected.items():
        evaluate = FolderEvaluator(task, folder, room / "data.jsonl", batch_size=batch_size)
        assert evaluate(state) == pytest.approx(value, rel=1e-5)
        assert evaluate(state) == evaluate(state)
    from sklearn.metrics import f1_score

    evaluate = FolderEvaluator("f1", folder, room / "data.jsonl", batch_size=batch_size)
    assert evaluate(state) == pytest.approx(f1_score(labels, guesses, average="macro"))


def test_f1_of_two_classes_is_that_of_class_one():
    from sklearn.metrics import f1_score

    generator = torch.Generator().manual_seed(0)
    for classes in (2, 3):
        guesses, truth = (torch.randint(classes, (40,), generator=generator) for _ in range(2))
        average = "binary" if classes == 2 else "macro"
        logits = torch.nn.functional.one_hot(guesses, classes).float()
        assert class_score("f1", logits, truth) == pytest.approx(f1_score(truth, guesses, average=average))
    assert class_score("f1", torch.tensor([[1.0, 0.0]] * 3), torch.zeros(3)) == 0.0


@pytest.mark.parametrize("max_length", [None, 5])
def test_perplexity_is_that_of_every_token_given_those_before(room, max_length):
    folder = room / "llama" / "checkpoint-1"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for line in (room / "data.jsonl").read_text().splitlines():
        ids = tokenizer(json.loads(line)["text"])["input_ids"]
        for start in range(0, len(ids), max_length or 16):
            window = torch.tensor([ids[start : start + (max_length or 16)]])
            logits = model(window).logits[0, :-1].double().detach()
            total -= float(logits.log_softmax(-1).gather(1, window[0, 1:, None]).sum())
            count += window.shape[1] - 1
    state = {name: value for name, value in weights_of(model).items() if name != "lm_head.weight"}  # tied
    for task, value in (("loss", total / count), ("perplexity", math.exp(total / count))):
        evaluate = FolderEvaluator(task, folder, room / "data.parquet", batch_size=4, max_length=max_length)
        assert evaluate(state) == pytest.approx(value, rel=1e-5)


def test_every_kind_of_file_holds_the_same(room):
    folder, names = room / "bert" / "checkpoint-0", ("data.jsonl", "data.csv", "data.parquet", "saved")
    made = {name: FolderEvaluator("loss", folder, room / name) for name in names}
    assert len({evaluate.digest for evaluate in made.values()}) == 1
    assert FolderEvaluator("loss", folder, room / "saved", max_length=4).digest != made["saved"].digest


def test_tokenized_data_pairs_and_names_of_labels(room, tmp_path):
    folder = room / "bert" / "checkpoint-0"
    state = weights_of(make_classifier(3))
    rows = [
        {"one": "good film", "two": "a bad plot", "label": "LABEL_2"},
        {"one": "dull", "two": "fine", "label": "LABEL_0"},
    ]
    pairs = Dataset.from_list(rows)
    pairs.to_json(tmp_path / "pairs.jsonl")
    ids = [[2, 6, 8, 3, 5, 7, 9, 3], [2, 14, 3, 15, 3]]
    types = [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1]]
    tokenized = Dataset.from_dict({"input_ids": ids, "token_type_ids": types, "labels": [2, 0]})
    tokenized.save_to_disk(tmp_path / "tokenized")
    one, two = (FolderEvaluator("loss", folder, tmp_path / name)(state) for name in ("pairs.jsonl", "tokenized"))
    assert one == pytest.approx(two, rel=1e-6)
    assert one != FolderEvaluator("loss", folder, tmp_path / "pairs.jsonl", text=("one",))(state)
    labels = [[-100, -100, 8, 3, -100, -100, -100, 3], [-100] * 5]
    Dataset.from_dict({"input_ids": ids, "labels": labels}).save_to_disk(tmp_path / "instructions")
    language = make_language_model(2).eval()
    logits = language(torch.tensor(ids[:1])).logits[0].log_softmax(-1)
    expected = -(logits[1, 8] + logits[2, 3] + logits[6, 3]) / 3
    evaluate = FolderEvaluator("loss", room / "llama" / "checkpoint-0", tmp_path / "instructions")
    assert evaluate(weights_of(language)) == pytest.approx(float(expected), rel=1e-5)


def test_padding_of_tokenized_data_plays_no_part_and_long_rows_are_cut_to_the_model(room, tmp_path):
    ids, mask = [[2, 6, 8, 3], [2, 14, 3, 0]], [[1, 1, 1, 1], [1, 1, 1, 0]]
    Dataset.from_dict({"input_ids": ids, "attention_mask": mask}).save_to_disk(tmp_path / "padded")
    Dataset.from_dict({"input_ids": [ids[0], ids[1][:3]]}).save_to_disk(tmp_path / "bare")
    state, folder = weights_of(make_language_model(2)), room / "llama" / "checkpoint-0"
    padded, bare = (FolderEvaluator("loss", folder, tmp_path / name)(state) for name in ("padded", "bare"))
    assert padded == pytest.approx(bare, rel=1e-6)
    state, folder = weights_of(make_classifier(3)), room / "bert" / "checkpoint-0"
    row = torch.randint(4, 24, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    for length in (40, 16, 8):  # the model has 16 positions
        Dataset.from_dict({"input_ids": [row[:length]], "label": [1]}).save_to_disk(tmp_path / str(length))
    whole, cut, short = (FolderEvaluator("loss", folder, tmp_path / name)(state) for name in ("40", "16", "8"))
    assert whole == cut != short
    assert FolderEvaluator("loss", folder, tmp_path / "40", max_length=8)(state) == short


def long_rows(folder):
    Dataset.from_dict({"input_ids": [[5] * 17], "label": [1]}).save_to_disk(folder / "long")
    return folder / "long"


def test_what_cannot_be_evaluated_is_refused_at_once(room, tmp_path):
    bert, llama = (room / name / "checkpoint-0" for name in ("bert", "llama"))
    DatasetDict(train=Dataset.from_dict({"text": ["a"]})).save_to_disk(tmp_path / "splits")
    Dataset.from_dict({"input_ids": [[5]]}).save_to_disk(tmp_path / "short")  # one token predicts nothing
    files = {
        "unlabeled.jsonl": '{"text": "good"}', "far.jsonl": '{"text": "good", "label": 4}',
        "minus.jsonl": '{"text": "good", "label": -1}', "three.jsonl": '{"a": "x", "b": "y", "c": "z", "label": 1}',
        "broken.jsonl": "{", "data.txt": "good", "none.csv": "text,label\n",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    cases = [
        ("accuracy", llama, "far.jsonl", {}, CheckpointError, "have a classifier of texts .* got LlamaForCausalLM"),
        ("perplexity", bert, "far.jsonl", {}, CheckpointError, "must have a language model"),
        ("accuracy", bert, "unlabeled.jsonl", {}, ConfigError, "a column label or labels"),
        ("accuracy", bert, "far.jsonl", {}, ConfigError, "labels from 0 to 3, .* got 4"),
        ("accuracy", bert, "minus.jsonl", {}, ConfigError, "got -1"),
        ("accuracy", bert, "three.jsonl", {}, ConfigError, "one or two columns"),
        ("accuracy", bert, "far.jsonl", {"text": ("body",)}, ConfigError, "got \\['body'\\]"),
        ("accuracy", bert, "gone.jsonl", {}, CheckpointError, "does not exist"),
        ("accuracy", bert, "data.txt", {}, CheckpointError, "a file of .json"),
        ("accuracy", bert, "broken.jsonl", {}, CheckpointError, "must be readable"),
        ("accuracy", bert, "none.csv", {}, CheckpointError, "must be readable, .* no data"),
        ("loss", llama, "short", {}, ConfigError, "at least one example"),
        ("accuracy", bert, "splits", {}, ConfigError, "must be one split"),
        ("accuracy", tmp_path, "far.jsonl", {}, CheckpointError, "must hold a config of transformers"),
    ]
    for task, folder, name, options, kind, match in cases:
        with pytest.raises(kind, match=match):
            FolderEvaluator(task, folder, tmp_path / name, **options)
    for number, (columns, match) in enumerate([
        ({"input_ids": [[5], [24]]}, r"tokens below 24 as input_ids .* got \[24\] in row 1"),
        ({"input_ids": [[5, -1]]}, "got .5, -1. in row 0"),
        ({"input_ids": [[5.0]]}, "got .5.0. in row 0"),
        ({"input_ids": ["good"]}, "got 'good' in row 0"),
        ({"input_ids": [[5], None]}, "got None in row 1"),
        ({"input_ids": [[5], []]}, r"got \[\] in row 1"),
        ({"input_ids": [[5, 6]], "attention_mask": [[1]]}, "as many numbers as tokens as attention_mask"),
    ]):  # fmt: skip
        data = Dataset.from_dict({**columns, "label": [0] * len(columns["input_ids"])})
        data.save_to_disk(tmp_path / f"tokens{number}")
        with pytest.raises(ConfigError, match=match):
            FolderEvaluator("loss", bert, tmp_path / f"tokens{number}")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="at least one example"):
        FolderEvaluator("loss", bert, tmp_path / "empty.jsonl")
    # transformers 5 makes up a tokenizer to which all words are unknown
    make_classifier(0).save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match=r"tokenizer .*bare"):
        FolderEvaluator("loss", tmp_path / "bare", room / "data.jsonl")
    with pytest.raises(ConfigError, match="BertForSequenceClassification, got"):
        FolderEvaluator("loss", bert, long_rows(tmp_path), max_length=17)(weights_of(make_classifier(0)))
    evaluate = FolderEvaluator("loss", bert, room / "data.jsonl")
    with pytest.raises(CheckpointError, match="tensor names of BertForSequenceClassification"):
        evaluate({"other": torch.ones(1)})


eff = functools.partial(commands.eff, "soup")


def test_the_command_searches_by_a_task(room, tmp_path):
    common = (room / "bert", "--task", "loss", "--data", room / "data.jsonl", "--json")
    found = json.loads(eff(*common, "--out", tmp_path / "soup", "--journal", tmp_path / "journal").stdout)
    singles = [row["single"] for row in found["history"]]
    assert singles == sorted(singles)  # smaller is better, without --mode
    assert found["repeat"][0] == found["repeat"][1]
    final = FolderEvaluator("loss", tmp_path / "soup", room / "data.jsonl")
    from shared_core.checkpoint_formats import open_ingredient

    soup = open_ingredient(tmp_path / "soup")
    assert final({name: soup.tensor(name) for name in soup.specs}) == pytest.approx(found["score"], rel=1e-6)
    with pytest.raises(CheckpointError, match="its batch_size were 32, now 4"):
        eff(*common, "--out", tmp_path / "two", "--journal", tmp_path / "journal", "--batch-size", 4)
    told = json.loads(eff(room / "llama", "--task", "perplexity", "--data", room / "data.csv", "--text", "text",
                          "--diagnose", "--json").stdout)  # fmt: skip
    assert min(told["metrics"]) > 1
    assert len(told["barriers"]) == 2


def test_the_command_refuses_what_does_not_go_together(room):
    cases = [
        (["--task", "bleu", "--data", room / "data.csv"], "must be one of accuracy, f1, loss, perplexity"),
        (["--task", "loss"], "--task .*--data"),
        (["--task", "loss", "--eval", "a:b", "--data", "x"], "got both"),
        (["--task", "loss", "--data", "x", "--mode", "max"], "--mode .*--eval"),
        (["--eval", "a:b", "--data", "x"], "--data .*--task"),
        (["--task", "loss", "--data", room / "data.csv", "--device", "abacus"], "--device must"),
    ]
    for arguments, match in cases:
        with pytest.raises(ConfigError, match=match):
            eff(room / "bert", "--out", "never", *arguments)


def test_a_function_of_a_model_scores_the_models_of_folders(room, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "scoring_task.py").write_text(
        "import torch\ndef score(model):\n    assert not model.training and model.config.vocab_size\n"
        "    return -float(model(torch.arange(8)[None]).logits.double().square().mean())\n"
    )
    found = json.loads(eff(room / "llama", "--eval", "scoring_task:score", "--out", tmp_path / "soup", "--json").stdout)
    sys.modules.pop("scoring_task")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "soup").eval()
    assert found["score"] == -saved(torch.arange(8)[None]).logits.double().square().mean().item()
