"""`distill: {chunked: true}` in Lightning: the weights that training with logits gives, also under autocast."""

import pytest
import pytorch_lightning as pl
import torch
from lightning_world import make_trainer
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_eff import EffCallback


def llama(seed, hidden=16):
    torch.manual_seed(seed)
    sizes = {"hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=24, num_key_value_heads=2, **sizes))


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.validated = llama(0), 0

    def training_step(self, batch, index):
        output = self.net(**batch)
        return {"loss": output.loss, "logits": output.logits}

    def validation_step(self, batch, index):
        self.validated += self.net(**batch).logits.softmax(-1).sum().item()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(tmp_path, precision, **options):
    torch.manual_seed(1)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 24, (4, 2, 7))]
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    module, callback = Module(), EffCallback({"distill": {"teacher": llama(1, 32), "student": "net", **options}})
    options = {"max_epochs": 1, "precision": precision, "accumulate_grad_batches": 2}
    trainer = make_trainer(tmp_path, callbacks=[callback], **options)
    trainer.fit(module, loader, loader)
    assert module.validated
    return module.state_dict(), callback.receipt.values["techniques"]["distill"]


@pytest.mark.parametrize(("precision", "atol"), [("32-true", 1e-7), ("bf16-mixed", 5e-4)])
def test_the_same_weights(tmp_path, precision, atol):
    expected, _ = trained(tmp_path, precision)
    got, receipt = trained(tmp_path, precision, chunked=True, budget_mib=0.001)
    assert receipt["chunk_rows"] == (10 if precision == "bf16-mixed" else 8)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=atol)
