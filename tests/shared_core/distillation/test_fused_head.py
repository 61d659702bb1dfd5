"""A head that is fused into the loss: logits of the model's own making, and where gradients go."""

import copy

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from shared_core.distillation.forward_capture import Forward
from shared_core.distillation.task_gradient import FusedHead

TEXT = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 16}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 8, "patch_size": 4, "projection_dim": 16}  # fmt: skip
SCANS = {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
MODELS = {
    "plain": lambda: LlamaForCausalLM(LlamaConfig(**TEXT)),
    "divided": lambda: GraniteForCausalLM(GraniteConfig(**TEXT, logits_scaling=8.0)),
    "multiplied": lambda: FalconH1ForCausalLM(FalconH1Config(**TEXT, **SCANS, lm_head_multiplier=0.3)),
    "with images": lambda: LlavaForConditionalGeneration(
        LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**TEXT), image_token_id=23)
    ),
}


def fused(kind="plain"):
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    model = MODELS[kind]().train()
    ids = torch.randint(0, 20, (2, 6))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "fused_lm_head": True}
    logits = model(input_ids=ids, attention_mask=inputs["attention_mask"]).logits
    add_fused_lm_head(model)
    return model, inputs, logits


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_the_models_own_forward(kind):
    model, inputs, logits = fused(kind)
    head = FusedHead(model)
    head.active = True
    found = head.with_logits(Forward((), inputs, model(**inputs))).output.logits
    assert torch.equal(found, logits)
    assert found.requires_grad


def test_every_forward_of_a_loss_keeps_its_gradient():
    def gradients(head):
        model.zero_grad()
        loss = sum(factor * model(**inputs).log_probs.square().sum() for factor in (1.0, 2.0))
        (loss if head is None else head.take(loss).rejoined()).backward()
        return [weight.grad.clone() for weight in model.parameters()]

    model, inputs, _ = fused()
    expected, head = gradients(None), FusedHead(model)
    head.active = True
    assert all(map(torch.equal, gradients(head), expected))
    head.detach()
    assert not model._forward_hooks
    assert not model(**inputs).log_probs.is_leaf


def test_evaluation_and_copies_keep_their_graph():
    model, inputs, _ = fused()
    head = FusedHead(model)
    head.active = True
    assert not model.eval()(**inputs).log_probs.is_leaf
    assert not copy.deepcopy(model).train()(**inputs).log_probs.is_leaf
    assert model.train()(**inputs).log_probs.is_leaf
