"""What `eff plan` says of a model, against transformers' own."""

import json

import pytest
import torch
import transformers
from commands import eff, told_by
from transformers import LlamaConfig, LlamaForCausalLM

from shared_core import Recipe
from shared_core.contrib.planning import ModelShape, PlannedRun, plan


@pytest.mark.parametrize("tied", [False, True])
def test_the_shape_of_a_config_has_its_parameters(tied):
    config = LlamaConfig(
        hidden_size=96, intermediate_size=200, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=500, tie_word_embeddings=tied,
    )  # fmt: skip
    found = sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())
    assert ModelShape.of_config(config.to_dict()).params == pytest.approx(found, rel=0.005)


SIZES = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 900}
SMALL = {**SIZES, "intermediate_size": 256}
NO_POSITIONS = {**SMALL, "max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Albert", {**NO_POSITIONS, "embedding_size": 32, "num_hidden_groups": 2}),
        ("Electra", {**NO_POSITIONS, "embedding_size": 32}),
        ("Deberta", {**NO_POSITIONS, "relative_attention": True, "pos_att_type": "c2p|p2c"}),
        ("ModernBert", {**SMALL, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}),
        ("Falcon", {**SIZES, "ffn_hidden_size": 288, "multi_query": True}),
    ],
)
def test_shared_narrow_and_gated_parts_are_counted_as_they_are(kind, options):
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}Model")(config)
    found = sum(parameter.numel() for name, parameter in model.named_parameters() if "pooler" not in name)
    assert ModelShape.of_config({**config.to_dict(), **options}).params == pytest.approx(found, rel=0.03)


def test_parameters_are_counted_where_transformers_builds_the_model(tmp_path):
    config = transformers.BertConfig(**SMALL, architectures=["BertForSequenceClassification"])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        found = sum(each.numel() for each in transformers.BertForSequenceClassification(config).parameters())
    for path in (tmp_path, tmp_path / "config.json"):
        told = eff("plan", "--model", path, "--json")
        assert json.loads(told.stdout)["shape"]["params"] == found
    (tmp_path / "config.json").rename(tmp_path / "bert.json")  # sizes alone
    told = eff("plan", "--model", tmp_path / "bert.json")
    assert "(by formula)" in told.stdout


def test_a_folder_is_explained_without_its_weights(tmp_path):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)  # there are no weights to load
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("prune: {sparsity: 0.5, skip: lm_head}\ncheckpointing: {policy: block}\n")
    options = ["--model", str(tmp_path), "--steps", "10", "--micro-batch", "2", "--length", "16"]
    told, model = told_by("explain", recipe, *options), LlamaForCausalLM(config)
    assert told["model"]["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert [*told["techniques"]["checkpointing"]["tensors"]] == ["model.layers.0", "model.layers.1"]
    layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    assert told["techniques"]["prune"]["tensors"].keys() == {f"{name}.weight" for name in layers}
    needs = plan(
        ModelShape.of_config(config.to_dict()), PlannedRun(micro_batch=2, seq_len=16), Recipe.from_yaml(recipe)
    )
    planned = {cost.what: cost for cost in needs.costs}
    activations = {cost["what"]: cost for cost in told["memory"]}["activations and logits"]
    assert activations["during"] == planned["activations"].during + planned["logits"].during


MIDDLE = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
LLAMA = {**MIDDLE, "intermediate_size": 688}


def test_a_class_without_fused_attention_is_planned_with_its_scores(tmp_path):
    config = transformers.Gemma2Config(**LLAMA, architectures=["Gemma2ForCausalLM"])  # its scores are capped
    config.save_pretrained(tmp_path)

    def activations(*options):
        told = eff("plan", "--model", tmp_path, "--json", *options)
        return next(cost["during"] for cost in json.loads(told.stdout)["costs"] if cost["what"] == "activations")

    assert activations() == activations("--attention", "eager")
    scores = 3 * 2 * 2048 * 2048 * 4 * 2
    assert activations() - activations("--attention", "fused") == scores


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LlamaConfig, LLAMA),
        (LlamaConfig, {**LLAMA, "attn_implementation": "eager"}),
        (transformers.BertConfig, {**MIDDLE, "intermediate_size": 1024, "attn_implementation": "eager"}),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "mixed", "16-true"])
def test_what_a_forward_saves_is_what_was_predicted(precision, kind, options):
    config = kind(**options)
    of_class = {LlamaConfig: LlamaForCausalLM, transformers.BertConfig: transformers.BertForMaskedLM}[kind]
    model = of_class(config).to(torch.bfloat16 if precision == "16-true" else torch.float32)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved, kept = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # freed memory would be given out again
        return tensor

    tokens = torch.randint(1000, (2, 128))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):  # noqa: SIM117
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "mixed"):
            model(input_ids=tokens, labels=tokens)
    attention = options.get("attn_implementation", "fused")
    run = PlannedRun(micro_batch=2, seq_len=128, precision=precision, attention=attention)
    needs = plan(ModelShape.of_config(config.to_dict()), run)
    lives = sum(cost.during for cost in needs.costs if cost.what in ("activations", "logits", "autocast"))
    if attention == "fused":
        assert sum(saved.values()) == pytest.approx(lives, rel=0.1)
    else:  # a bound: Llama has no dropout, BERT no norms in fp32
        assert 0.75 * lives < sum(saved.values()) < 1.05 * lives
