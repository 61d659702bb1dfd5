"""`eff cache-teacher`: what it writes, resumes and refuses; fingerprints of models and tokenizers."""

import functools
import json
import shutil

import commands
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from shared_core.distillation.teacher_cache import (
    TeacherCache,
    folder_fingerprint,
    teacher_fingerprint,
    template_fingerprint,
    tokenizer_fingerprint,
)
from shared_core.distillation.teacher_cache.keys import batches_of, pad_examples
from shared_core.errors import CheckpointError, ConfigError

TASK = """
import torch
from torch import nn
from torch.utils.data import Dataset

def sentences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 30, (length,), generator=generator).tolist() for length in (5, 2, 7, 4, 6, 3)]

class Texts(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, number):
        ids = sentences()[number]
        return {"input_ids": ids, "labels": [-100, *ids[1:]], "text": "t"}

def texts():
    return Texts()

def listed():
    return [Texts()[number] for number in range(6)]

def collated():
    return Texts(), lambda rows: {"input_ids": torch.tensor([row["input_ids"][:2] for row in rows])}

def pairs():
    return torch.utils.data.TensorDataset(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(6))

def batches():
    return pairs().tensors[0].split(2)

def wide():
    return [torch.ones(2, 9)]

def nothing():
    return 3

def classifier():
    torch.manual_seed(0)
    return nn.Linear(4, 5)

def tokenizer():
    class Words:
        chat_template = "{{ x }}"
        def get_vocab(self):
            return {"a": 0, "b": 1}
    return Words()
"""


@pytest.fixture
def room(tmp_path, monkeypatch):
    commands.user_module(tmp_path, monkeypatch, "cache_task", TASK)
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer():
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[EOS]", *map(str, range(27))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]")
    made.chat_template = "{{ messages }}"
    return made


def llama(seed=0, vocabulary=30):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def teacher(room, tokenizer):
    llama().save_pretrained(room / "teacher")
    tokenizer.save_pretrained(room / "teacher")
    return room / "teacher"


eff = functools.partial(commands.eff, "cache-teacher")


def test_a_language_model_from_a_folder(teacher, tokenizer):
    result = eff(
        teacher, "--data", "cache_task:texts", "--out", "c", "--temperature", 3, "--top-k", 8, "--batch-size", 4
    )
    assert result.exit_code == 0
    for told in ("6 different examples, 27 positions", "the top 8 of 30 classes", "temperature 3", "other classes"):
        assert told in result.stdout
    cache = TeacherCache.open("c")
    student, tokens = llama(seed=1), {"tokenizer_fingerprint": tokenizer_fingerprint(tokenizer)}
    tokens["template_fingerprint"] = template_fingerprint(tokenizer)
    known = cache.check(temperature=3.0, vocabulary=student.config.vocab_size, **tokens)
    assert known == ()
    for fingerprint in (folder_fingerprint(teacher), teacher_fingerprint(llama())):
        assert cache.check(teacher_fingerprint=fingerprint) == ()
    with pytest.raises(CheckpointError, match="teacher must be the one"):
        cache.check(teacher_fingerprint=teacher_fingerprint(student))
    # left padding, which rotary positions do not see, and another order
    from cache_task import sentences

    rows = sentences()
    ids, mask = torch.zeros(6, 9, dtype=torch.int64), torch.zeros(6, 9, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[5 - number, 9 - len(row) :], mask[5 - number, 9 - len(row) :] = torch.tensor(row), 1
    targets = cache.lookup({"input_ids": ids, "attention_mask": mask})
    with torch.no_grad():
        want = torch.log_softmax(llama()(input_ids=ids, attention_mask=mask).logits / 3.0, -1)
    assert torch.equal(targets.mask, mask == 1)
    got = want.gather(-1, targets.indices)[targets.mask]
    assert torch.allclose(targets.log_probs[targets.mask], got, atol=6e-3)  # float16, |log p| < 6


def test_json_is_all_that_goes_to_stdout_and_only_labeled_positions_are_kept(teacher):
    result = eff(teacher, "--data", "cache_task:texts", "--out", "c", "--labeled", "--dtype", "float32", "--json")
    values = json.loads(result.stdout)
    assert (values["examples"], values["rows"], values["top_k"], values["dtype"]) == (6, 21, 30, "float32")
    assert values["labeled"]
    assert values["bytes"] == sum(file.stat().st_size for file in TeacherCache.open("c").path.iterdir())


def test_a_classifier_from_a_function_over_pairs_and_over_batches(room):
    for data in ("pairs", "batches"):
        assert eff("cache_task:classifier", "--data", f"cache_task:{data}", "--out", data).exit_code == 0
    import cache_task

    inputs = cache_task.pairs().tensors[0]
    one, other = (TeacherCache.open(name).lookup(inputs) for name in ("pairs", "batches"))
    assert torch.allclose(one.log_probs, torch.log_softmax(cache_task.classifier()(inputs) / 2, -1), atol=1e-3)
    assert torch.equal(one.log_probs, other.log_probs)
    assert eff("cache_task:classifier", "--data", "cache_task:pairs", "--out", "x").stdout.count("other classes") == 0


def test_a_list_of_examples_and_a_file_of_them_are_what_a_data_set_is(teacher, room):
    eff(teacher, "--data", "cache_task:texts", "--out", "texts")
    import cache_task

    (room / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in cache_task.listed()))
    for data, out in (("cache_task:listed", "listed"), ("lines.jsonl", "lines")):
        eff(teacher, "--data", data, "--out", out)
        shards = {file.name: file.read_bytes() for file in (room / out).glob("*.safetensors")}
        assert shards
        assert shards == {name: (room / "texts" / name).read_bytes() for name in shards}


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "got no lines"), ('{"input_ids": [1]}\n{"input_ids": [[1]]}\n', "in line 2"), ("{", "JSON object")],
)
def test_a_file_of_something_else_is_refused(room, text, told):
    (room / "lines.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=told):
        eff("cache_task:classifier", "--data", "lines.jsonl", "--out", "c")


def test_a_collator_fields_and_a_tokenizer_of_the_users_own(teacher):
    arguments = ["--data", "cache_task:collated", "--out", "c", "--fields", "input_ids", "--vocabulary", 28]
    eff(teacher, *arguments, "--tokenizer", "cache_task:tokenizer")
    import cache_task

    made = TeacherCache.open("c").manifest
    assert (made.rows, made.vocabulary, made.fields) == (12, 28, ("input_ids",))
    assert made.fingerprints["tokenizer"] == tokenizer_fingerprint(cache_task.tokenizer())
    assert made.fingerprints["template"] == template_fingerprint(cache_task.tokenizer())


def test_what_was_interrupted_goes_on(teacher, monkeypatch):
    from shared_core.distillation.teacher_cache.format import PendingShard

    write, written = PendingShard.write, []

    def stopping(shard, path):
        write(shard, path)
        written.append(path)
        if len(written) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(PendingShard, "write", stopping)
    arguments = [teacher, "--data", "cache_task:texts", "--out", "c", "--batch-size", 2]
    with pytest.raises(BaseException, match=r"^$|Abort|1"):
        eff(*arguments)
        raise SystemExit(1)
    with pytest.raises(CheckpointError, match="--resume"):
        TeacherCache.open("c")
    with pytest.raises(CheckpointError, match="new or empty"):
        eff(*arguments)
    assert eff(*arguments, "--resume").exit_code == 0
    assert len(TeacherCache.open("c")) == 6


def test_another_tokenizer_beside_the_same_weights_is_refused(teacher):
    arguments = [teacher, "--data", "cache_task:texts", "--out", "c"]
    eff(*arguments)
    file = teacher / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["7"], words["8"] = words["8"], words["7"]
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="tokenizer must be"):
        eff(*arguments, "--resume")


@pytest.mark.parametrize(("arguments", "match"), [
    (["cache_task:classifier", "--data", "cache_task:nothing", "--out", "c"], "data must be batches"),
    (["cache_task:nothing", "--data", "cache_task:pairs", "--out", "c"], "must return a model"),
    (["cache_task:classifier", "--data", "cache_task:pairs", "--out", "c", "--device", "abacus"], "--device must"),
    (["cache_task:classifier", "--data", "cache_task:pairs", "--out", "c", "--tokenizer", "cache_task:nothing"],
     "must have a vocabulary"),
    (["cache_task:classifier", "--data", "cache_task:pairs", "--out", "c", "--dtype", "int8"], "dtype must be"),
])  # fmt: skip
def test_wrong_arguments_are_refused_with_nothing_written(room, arguments, match):
    with pytest.raises(ConfigError, match=match):
        eff(*arguments)
    assert not (room / "c").exists()


def test_batches_that_the_teacher_does_not_take_are_refused_by_number(room):
    with pytest.raises(
        ConfigError, match=r"cached teacher: batch 1 must hold what the model takes: .*, got Tensor .Runtime"
    ):
        eff("cache_task:classifier", "--data", "cache_task:wide", "--out", "c")


def test_a_folder_without_a_model_is_refused(room):
    (room / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no weights"):
        eff("empty", "--data", "cache_task:texts", "--out", "c")


def test_fingerprints_of_tokenizers_survive_saving_and_loading_and_see_a_change(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "t")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "t")
    here = tokenizer_fingerprint(tokenizer)
    assert here == tokenizer_fingerprint(tmp_path / "t") == tokenizer_fingerprint(loaded)
    template = template_fingerprint(tokenizer)
    assert template == template_fingerprint(str(tmp_path / "t")) == template_fingerprint(loaded)
    loaded(["1 2", "3"], padding=True, truncation=True, max_length=4)
    assert tokenizer_fingerprint(loaded) == here
    loaded.add_tokens(["<new>"])
    loaded.chat_template = "other"
    assert tokenizer_fingerprint(loaded) != here
    assert template_fingerprint(loaded) != template
    loaded.save_pretrained(tmp_path / "u")
    assert tokenizer_fingerprint(tmp_path / "u") == tokenizer_fingerprint(loaded)
    assert tokenizer_fingerprint(object()) is None
    assert tokenizer_fingerprint(tmp_path) is None
    assert template_fingerprint(tmp_path) is None


@pytest.mark.parametrize("model", [
    models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]),
    models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0),
], ids=["bpe", "unigram"])  # fmt: skip
def test_fingerprints_of_every_kind_of_vocabulary(tmp_path, model):
    backend = Tokenizer(model)
    backend.add_tokens(["<x>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_fingerprint(tmp_path) == tokenizer_fingerprint(backend)


def test_damaged_tokenizer_files_are_refused(tmp_path):
    for text in ("{", '{"model": {"vocab": {}}, "added_tokens": [1]}', '{"model": {"vocab": [1]}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            tokenizer_fingerprint(tmp_path)


def test_fingerprints_of_models_see_weights_and_configuration_but_not_the_path(tmp_path):
    model, prints = llama(), teacher_fingerprint(llama())
    model.save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert prints == teacher_fingerprint(LlamaForCausalLM.from_pretrained(tmp_path / "b"))
    files = folder_fingerprint(tmp_path / "a")
    assert files == folder_fingerprint(tmp_path / "b")
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    assert teacher_fingerprint(model) != prints
    model.save_pretrained(tmp_path / "b")
    assert folder_fingerprint(tmp_path / "b") != files
    other = llama()
    other.config.rms_norm_eps = 1e-2
    assert teacher_fingerprint(other) != prints
    assert teacher_fingerprint(llama().to(torch.bfloat16)) != prints


def test_absolute_positions_are_those_the_teacher_was_run_with(room):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=1, n_head=2)).eval()
    model.save_pretrained(room / "gpt")
    eff("gpt", "--data", "cache_task:texts", "--out", "c", "--dtype", "float32")
    from cache_task import sentences

    ids = torch.tensor(sentences()[:1])
    left = {"input_ids": torch.cat([torch.zeros(1, 2, dtype=torch.int64), ids], 1)}
    left["attention_mask"] = (torch.arange(ids.shape[1] + 2) >= 2).long()[None]
    targets = TeacherCache.open("c").lookup(left)
    with torch.no_grad():
        want = torch.log_softmax(model(input_ids=ids).logits / 2, -1)
    assert torch.allclose(targets.log_probs[:, 2:], want, atol=1e-5)


def test_examples_are_padded_by_themselves():
    batch = pad_examples(
        [
            {"input_ids": [1, 2], "labels": [1, 2], "decoder_input_ids": torch.tensor([4]), "kind": 1, "text": "a"},
            {"input_ids": [3], "labels": [3], "decoder_input_ids": torch.tensor([5, 6]), "kind": 0, "text": "b"},
        ]
    )
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[1, 2], [3, 0]],
        "labels": [[1, 2], [3, -100]],
        "decoder_input_ids": [[4, 0], [5, 6]],
        "kind": [1, 0],
        "attention_mask": [[1, 1], [1, 0]],
        "decoder_attention_mask": [[1, 0], [1, 1]],
    }
    with pytest.raises(ConfigError, match="must hold numbers"):
        pad_examples([{"text": "a"}])
    loader = [torch.ones(2)]
    assert batches_of(loader, 4) is loader


def test_a_table_of_datasets_is_a_data_set():
    from datasets import Dataset

    table = Dataset.from_dict({"input_ids": [[1, 2], [3], [4, 5, 6]], "text": ["a", "b", "c"]})
    first, second = batches_of(table, 2)
    assert first["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert second["input_ids"].tolist() == [[4, 5, 6]]


def test_a_batch_that_is_the_only_argument(tmp_path):
    from shared_core.distillation.teacher_cache import write_teacher_cache

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, batch):
            return self.layer(batch["x"])

    inputs = {"x": torch.randn(5, 3), "labels": torch.zeros(5)}
    write_teacher_cache(Holder(), [inputs], tmp_path / "c")
    assert TeacherCache.open(tmp_path / "c").lookup(inputs).mask.all()
