"""Policies on real architectures: blocks that are found, gradients equal to the bit, what each one saves."""

import copy

import pytest
import torch
import transformers
from torch import nn

from shared_core.activation_checkpointing import POLICIES, apply_policy, find_blocks
from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError

SMALL = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = {"vocab_size": 40, **SMALL}


class ResidualBlock(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1), nn.BatchNorm2d(out)
        same = stride == 1 and channels == out
        self.short = nn.Identity() if same else nn.Sequential(nn.Conv2d(channels, out, 1, stride), nn.BatchNorm2d(out))
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout2d(0.2)

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(self.drop(y))) + self.short(x))


def make_cnn():
    def layer(channels, out, stride):
        return nn.Sequential(ResidualBlock(channels, out, stride), ResidualBlock(out, out, 1))

    stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))
    return nn.Sequential(stem, layer(4, 4, 1), layer(4, 8, 2), layer(8, 16, 2), *head)


def tokens():
    ids = torch.randint(0, 40, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    # an unused cache lays out keys anew, which rounds differently; checkpointing leaves it out
    return {"input_ids": ids, "attention_mask": mask, "labels": ids, "use_cache": False}


def words():
    return {key: value for key, value in tokens().items() if key != "use_cache"}


def make_llama(**options):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**WORDS, attention_dropout=0.1, pad_token_id=0, **options)
    )


MODELS = {
    "llama": (make_llama, tokens),
    "llama eager": (lambda: make_llama(attn_implementation="eager", tie_word_embeddings=True), tokens),
    "bert": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**WORDS)), words),
    "vit": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.1, **SMALL)
        ),
        lambda: {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 2])},
    ),
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
            )
        ),
        tokens,
    ),
    "albert": (lambda: transformers.AlbertForMaskedLM(transformers.AlbertConfig(embedding_size=8, **WORDS)), words),
    "resnet": (
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(
                embedding_size=4, hidden_sizes=[4, 8], depths=[2, 1], layer_type="basic", num_labels=3
            )
        ),
        lambda: {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 2, 1, 1])},
    ),
    "cnn": (make_cnn, lambda: {"input": torch.randn(4, 1, 16, 16)}),
}
REFUSED = {"stage": ("llama", "llama eager", "bert", "vit", "albert"), "sublayer": ("cnn",)}
QUICK = ("llama", "t5", "cnn")
BLOCKS = {
    "llama": [f"model.layers.{place}" for place in range(4)],
    "bert": [f"bert.encoder.layer.{place}" for place in range(4)],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "albert": ["albert.encoder.albert_layer_groups.0.albert_layers.0"],
    "resnet": [f"resnet.encoder.stages.{name}" for name in ("0.layers.0", "0.layers.1", "1.layers.0")],
    "cnn": ["1.0", "1.1", "2.0", "2.1", "3.0", "3.1"],
}


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def gradients(model, inputs):
    torch.manual_seed(3)
    for _ in range(2):
        output = model(**inputs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_every_policy_gives_the_same_gradients_to_the_bit(name):
    torch.manual_seed(0)
    make, make_inputs = MODELS[name]
    model, inputs = make().double().train(), make_inputs()
    plain = gradients(copy.deepcopy(model), inputs)
    saved = {}
    for policy in POLICIES:
        twin = copy.deepcopy(model)
        if name in REFUSED.get(policy, ()):
            with pytest.raises(MatchError, match=policy):
                apply_policy(twin, policy)
            continue
        handle = apply_policy(twin, policy)
        found = gradients(twin, inputs)
        different = [key for key, value in plain.items() if value is not None and not torch.equal(value, found[key])]
        assert not different, (policy, different)
        assert handle.tally.recomputations > 0
        assert set(handle.tally.blocks) == set(handle.names)
        saved[policy] = handle.tally.saved_bytes
        assert list(twin.state_dict()) == list(model.state_dict())
        handle.remove()
        assert not any("forward" in vars(module) for module in twin.modules())
    assert saved["block"] > saved["every_k"] > 0 or name == "albert"
    assert saved["sqrt"] >= saved["block"] > saved["selective"]
    assert saved["block"] > saved.get("sublayer", 0)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_found_in_order(name):
    assert find_blocks(MODELS[name][0]()) == BLOCKS[name]


@pytest.mark.parametrize("layer_type", ["basic", "bottleneck"])
def test_stages_whose_blocks_all_differ_in_shape_hold_blocks_not_their_layers(layer_type):
    sizes = {"embedding_size": 4, "hidden_sizes": [8, 16], "depths": [2, 2]}  # the first stage widens too
    model = transformers.ResNetModel(transformers.ResNetConfig(layer_type=layer_type, **sizes))
    assert find_blocks(model) == [f"encoder.stages.{stage}.layers.{place}" for stage in (0, 1) for place in (0, 1)]
    assert len(apply_policy(model, "stage").segments) == 2


def test_segments_of_policies():
    cnn = make_cnn()

    def segments(model, *args, **options):
        handle = apply_policy(model, *args, **options)
        handle.remove()
        return [list(segment) for segment in handle.segments]

    assert segments(cnn, "stage") == [["1.0", "1.1"], ["2.0", "2.1"], ["3.0", "3.1"]]
    assert segments(cnn, "sqrt") == [["1.0", "1.1", "2.0"], ["2.1", "3.0", "3.1"]]
    assert segments(cnn, "every_k", k=4) == [["1.0"], ["3.0"]]
    assert segments(cnn, "block", include=["2.*"]) == [["2.0"], ["2.1"]]
    assert segments(cnn, "every_k", k=3, include=["ResidualBlock"]) == [["1.0"], ["2.1"]]
    llama = make_llama()
    assert segments(llama, "sqrt") == [BLOCKS["llama"][:2], BLOCKS["llama"][2:]]
    assert segments(llama, "sublayer") == [[f"{name}.self_attn"] for name in BLOCKS["llama"]]
    assert segments(llama, "block", include=["*.mlp"]) == [[f"{name}.mlp"] for name in BLOCKS["llama"]]
    vgg = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(True), nn.Flatten()
    )
    assert segments(vgg, "stage") == [["0", "1"], ["2", "3", "4", "5"]]


class TestRefusals:
    def test_unknown_policies_and_budgets_without_inputs_are_refused(self):
        with pytest.raises(ConfigError, match=r"policy must be .*, got 'blok'; did you mean 'block'"):
            apply_policy(make_cnn(), "blok")
        with pytest.raises(ConfigError, match="example_inputs or a step"):
            apply_policy(make_cnn(), "budget:0.5")

    def test_models_without_blocks(self):
        with pytest.raises(MatchError, match=r"no repeated blocks.*include"):
            apply_policy(nn.Linear(2, 2), "block")
        with pytest.raises(MatchError, match=r"include pattern 'layer' matches no module"):
            apply_policy(make_llama(), "block", include=["layer"])
        with pytest.raises(MatchError, match=r"sublayer: 0 has no attention"):
            apply_policy(nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3))), "sublayer")

    def test_checkpointing_of_transformers(self):
        model = make_llama()
        model.gradient_checkpointing_enable()
        with pytest.raises(CompatibilityError, match="already checkpointed"):
            apply_policy(model, "block")

    def test_outputs_of_layers_that_selective_keeps_changed_in_place(self):
        net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Tanh()) for _ in range(3)))
        handle = apply_policy(net, "selective")
        with pytest.raises(TrainingError, match=r"2: with selective, outputs of layers must not be changed"):
            net(torch.ones(2, 4)).sum().backward()
        handle.remove()
        apply_policy(net, "block")
        net(torch.ones(2, 4)).sum().backward()

    def test_a_second_backward_over_what_selective_keeps(self):
        net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        apply_policy(net, "selective")
        loss = net(torch.ones(2, 4)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(TrainingError, match=r"2: with selective, backward must run .* block"):
            loss.backward()

    def test_a_filled_cache(self):
        model, inputs = make_llama().train(), tokens()
        apply_policy(model, "block")
        model.eval()
        with torch.no_grad():
            cache = model(inputs["input_ids"], use_cache=True).past_key_values
        assert cache.get_seq_length() == 9  # evaluation keeps its cache
        model.train()
        with pytest.raises(TrainingError, match=r"model\.layers\.0: the generation cache must be empty in training"):
            model(inputs["input_ids"], past_key_values=cache)


def test_generation_caches_are_left_out_while_training_and_told():
    model, inputs = make_llama().train(), tokens()
    handle = apply_policy(model, "every_k")
    output = model(**inputs | {"use_cache": True})
    output.loss.backward()
    assert handle.tally.notes == ["generation caches are off in checkpointed blocks while training"]
    assert handle.tally.recomputations == 2


class Listed(nn.Module):
    """Its largest part is a list, which no forward calls."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
        self.small = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.small(x)


def test_lists_of_modules_are_no_parts_that_run():
    model = nn.Sequential(*(Listed() for _ in range(3)))
    largest = apply_policy(model, "sublayer")
    assert largest.names == [f"{number}.small" for number in range(3)]
    largest.remove()
    named = apply_policy(model, "block", include=["*.parts"])
    assert named.names == [f"{number}.parts.{part}" for number in range(3) for part in range(2)]
    model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert named.tally.recomputations == 6
    named.remove()
