"""`eff compress` and `eff decompress`: what is written loads without this library, and what is refused."""

import pytest
import torch
from commands import eff, told_by
from reports import report_of, row
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from shared_core.errors import CheckpointError, ConfigError
from shared_core.weight_clustering import share_values


def run(*arguments):
    result = eff(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def make_net(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 30))
    with torch.no_grad():
        net[0].weight.mul_(net[0].weight.abs() > 0.1)
    return net


def test_a_state_dict_there_and_back(tmp_path):
    net = make_net()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    told = told_by("compress", tmp_path / "net.safetensors", "--bits", 4, "--out", tmp_path / "m.eff")
    size = (tmp_path / "m.eff").stat().st_size
    original = sum(tensor.numel() * tensor.element_size() for tensor in net.state_dict().values())
    assert (told["file_bytes"], told["original_bytes"]) == (size, original)
    assert told["ratio"] == original / size
    assert told["decompression_seconds"] > 0
    text = report_of(tmp_path / "m.eff")
    assert row(text, "bytes of the weights, as given and in m.eff")[:2] == [f"{original:,}", f"{size:,}"]
    told = told_by("decompress", tmp_path / "m.eff", "--out", tmp_path / "back")
    assert told["bytes"] == original
    assert told["decompression_seconds"] > 0
    assert [file.name for file in (tmp_path / "back").iterdir()] == ["model.safetensors"]
    back = load_file(tmp_path / "back" / "model.safetensors")
    for name, tensor in net.state_dict().items():
        expected = share_values(tensor, 4).weight() if tensor.ndim > 1 else tensor
        assert torch.equal(back[name], expected), name
    other = make_net(seed=1)
    other.load_state_dict(back)


def test_the_tables_name_tensors_and_times(tmp_path):
    save_file(make_net().state_dict(), tmp_path / "net.safetensors")
    text = run("compress", tmp_path / "net.safetensors", "--out", tmp_path / "m.eff")
    for part in ("0.weight", "sparse", "times smaller", "decompressing and comparing", "m.eff"):
        assert part in text
    assert "Decompressed" in run("decompress", tmp_path / "m.eff", "--out", tmp_path / "back")


@pytest.fixture
def hf_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text('{"model": {}}')
    (tmp_path / "model" / "merges.txt").write_text("a b\n")
    (tmp_path / "model" / "trainer_state.json").write_text("{}")
    (tmp_path / "model" / "training_args.bin").write_bytes(b"\x80\x04")
    (tmp_path / "model" / "modeling_own.py").write_text("raise SystemExit\n")
    return tmp_path / "model"


def test_a_hugging_face_folder_there_and_back(hf_folder, tmp_path):
    from transformers import GPT2LMHeadModel

    out = tmp_path / "out" / "model.eff"
    run("compress", hf_folder, "--out", out, "--bits", 5, "--bits-of", "*wte*=8", "--bits-of", "*attn*=exact")
    run("decompress", out, "--out", tmp_path / "back")
    names = {file.name for file in (tmp_path / "back").iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "merges.txt", "model.safetensors"}
    assert not names & {"trainer_state.json", "training_args.bin", "modeling_own.py"}
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (hf_folder / name).read_bytes()
    before = GPT2LMHeadModel.from_pretrained(hf_folder)
    after, info = GPT2LMHeadModel.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    weights, old = after.state_dict(), before.state_dict()
    assert torch.equal(weights["transformer.h.0.attn.c_attn.weight"], old["transformer.h.0.attn.c_attn.weight"])
    assert torch.equal(weights["transformer.wte.weight"], share_values(old["transformer.wte.weight"], 8).weight())
    assert torch.equal(
        weights["transformer.h.0.mlp.c_fc.weight"], share_values(old["transformer.h.0.mlp.c_fc.weight"], 5).weight()
    )
    assert after.lm_head.weight is after.transformer.wte.weight


class Tied(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_load_again(tmp_path):
    torch.save(Tied(0).state_dict(), tmp_path / "tied.pt")
    told = told_by("compress", tmp_path / "tied.pt", "--out", tmp_path / "m.eff")
    assert told["ties"] == {"head.weight": "embed.weight"}
    assert told["original_bytes"] == 4 * 640
    run("decompress", tmp_path / "m.eff", "--out", tmp_path / "back")
    other = Tied(1)
    assert load_model(other, str(tmp_path / "back" / "model.safetensors")) == (set(), [])
    assert torch.equal(other.head.weight, share_values(Tied(0).embed.weight, 5).weight())


def test_a_lightning_checkpoint(tmp_path):
    torch.save({"state_dict": make_net().state_dict(), "epoch": 3}, tmp_path / "last.ckpt")
    run("compress", tmp_path / "last.ckpt", "--out", tmp_path / "m.eff")
    run("decompress", tmp_path / "m.eff", "--out", tmp_path / "back")
    make_net(seed=1).load_state_dict(load_file(tmp_path / "back" / "model.safetensors"))


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (["--bits", 9], ConfigError, r"--bits must be in \[2, 8\], got 9"),
    (["--bits-of", "0"], ConfigError, "--bits-of must be PATTERN=BITS or PATTERN=exact, got '0'"),
    (["--bits-of", "7.*=4"], ConfigError, r"pattern '7.\*' matches no tensor"),
    (["--min-size", -1], ConfigError, "--min-size must be in"),
])  # fmt: skip
def test_options_that_break_a_rule(tmp_path, arguments, error, message):
    save_model(make_net(), str(tmp_path / "net.safetensors"))
    with pytest.raises(error, match=message):
        run("compress", tmp_path / "net.safetensors", "--out", tmp_path / "m.eff", *arguments)
    assert not (tmp_path / "m.eff").exists()


def test_what_is_there_is_not_overwritten(tmp_path):
    save_file(make_net().state_dict(), tmp_path / "net.safetensors")
    (tmp_path / "m.eff").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="--out must not exist yet"):
        run("compress", tmp_path / "net.safetensors", "--out", tmp_path / "m.eff")
    run("compress", tmp_path / "net.safetensors", "--out", tmp_path / "n.eff")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(CheckpointError, match="--out must be a new or empty folder"):
        run("decompress", tmp_path / "n.eff", "--out", tmp_path / "full")


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.safetensors"):
        run("compress", tmp_path / "none.safetensors", "--out", tmp_path / "m.eff")
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="`eff compress`"):
        run("decompress", tmp_path / "w.safetensors", "--out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_files_that_no_model_needs_are_not_put_into_the_folder(tmp_path):
    from shared_core.tools.compression import compress as write

    write({"w": torch.ones(3)}, tmp_path / "m.eff", files={"config.json": b"{}", "evil.py": b"", "run.sh": b""})
    told = told_by("decompress", tmp_path / "m.eff", "--out", tmp_path / "back")
    assert told["files"] == ["config.json"]
    assert {file.name for file in (tmp_path / "back").iterdir()} == {"config.json", "model.safetensors"}


def test_a_hostile_size_needs_the_users_word(tmp_path):
    save_file({"w": torch.zeros(5000, 5000)}, tmp_path / "zeros.safetensors")
    text = run("compress", tmp_path / "zeros.safetensors", "--out", tmp_path / "m.eff")
    assert "--max-bytes 100000000" in text
    with pytest.raises(CheckpointError, match=r"pass max_bytes .eff decompress: --max-bytes"):
        run("decompress", tmp_path / "m.eff", "--out", tmp_path / "back")
    run("decompress", tmp_path / "m.eff", "--out", tmp_path / "back", "--max-bytes", 10**8)
