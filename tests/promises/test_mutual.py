"""Deep mutual learning is one run in a plain loop and in both trainers, the other students included."""

import promise_drivers
import pytest
import torch
import torch.nn.functional as F
from lightning_world import make_trainer
from promise_drivers import difference, hf_trainer, run_bare, run_hf, run_lightning, saved_state, weights_of
from promise_table import DigitsNet
from safetensors.torch import load_file

from shared_core.engine.recipe import Recipe
from shared_core.errors import TrainingError

RECIPE = {"distill": {"teacher": "mutual", "peers": 3, "alpha": 0.4}}
FRONT_ENDS = {"hf": run_hf, "lightning": run_lightning}


def peers(folder, front_end):
    prefix = "net." if front_end == "lightning" else ""
    found = [load_file(folder / f"eff_peer_{number}.safetensors") for number in (1, 2)]
    return [{name.removeprefix(prefix): value for name, value in tensors.items()} for tensors in found]


def test_bare_hf_and_lightning_agree_and_clip_each_student_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(promise_drivers, "CLIP", 0.3)  # all gradients are larger
    bare = run_bare(RECIPE)
    told = bare.receipt["techniques"]["distill"]
    others = []
    for name, run in FRONT_ENDS.items():
        result = run(RECIPE, tmp_path / name, **({"seed": 0} if name == "hf" else {}))  # draws the peers
        assert difference(result.weights, bare.weights) is None
        assert result.receipt["techniques"]["distill"] == told
        others.append(peers(tmp_path / name, name))
    assert difference(*others) is None
    assert len(set(told["task_losses"].values())) == 3


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_micro_batches_equal_one_batch(front_end, tmp_path):
    results = []
    for accumulate in (1, 4):
        folder = tmp_path / str(accumulate)
        result = FRONT_ENDS[front_end](RECIPE, folder, accumulate=accumulate, batch_norm=False, optim="sgd")
        results.append([result.weights, *peers(folder, front_end)])
    for one, four in zip(*results, strict=True):
        torch.testing.assert_close(one, four, atol=1e-6, rtol=0)


def test_the_best_models_peers_come_back_with_it(tmp_path):
    options = {"save_every": 2, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "worse"}
    trainer = hf_trainer(RECIPE, tmp_path, **options, load_best_model_at_end=True, greater_is_better=True)
    evaluate = trainer.evaluate
    trainer.evaluate = lambda *args, **kwargs: _first_is_best(trainer, evaluate(*args, **kwargs))
    trainer.train()
    saved = saved_state(tmp_path / "checkpoint-2")
    torch.testing.assert_close(weights_of(trainer.model), saved["model"], atol=0, rtol=0)
    for tensors, state in zip(
        peers(tmp_path, "hf"), saved["eff"]["techniques"]["distill"]["teachers"]["peers"], strict=True
    ):
        torch.testing.assert_close(
            tensors, {name: value.cpu() for name, value in state["weights"].items()}, atol=0, rtol=0
        )


def _first_is_best(trainer, metrics):
    return metrics | {"eval_worse": -float(trainer.state.global_step)}


def test_a_loss_of_the_hf_users_own_is_the_peers_too(tmp_path):
    def smoothed(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels, label_smoothing=0.3)

    told = []
    for name, options in {"own": {"compute_loss_func": smoothed}, "stock": {}}.items():
        trainer = hf_trainer(RECIPE, tmp_path / name)
        for key, value in options.items():
            setattr(trainer, key, value)
        trainer.train()
        told.append(trainer.callback_handler.callbacks[0].session.receipt()["techniques"]["distill"])
    assert all(told[0]["task_losses"][student] > loss for student, loss in told[1]["task_losses"].items())


class TestLightningModules:
    def run(self, folder, distill, module):
        from torch.utils.data import DataLoader

        from lightning_eff import EffCallback

        callback = EffCallback(Recipe.from_dict({"distill": {"teacher": "mutual"} | distill}))
        trainer = make_trainer(folder, callbacks=[callback], max_steps=4, devices=1)
        trainer.fit(module, DataLoader(promise_drivers.train_examples(), batch_size=8))
        return trainer, callback

    def module(self, seed=0):
        import pytorch_lightning as pl

        class Own(pl.LightningModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(seed)
                self.net, self.seen = DigitsNet(), []

            def forward(self, x):
                return self.net(x)

            def training_step(self, batch, index):
                loss = F.cross_entropy(self(batch["x"])["logits"], batch["labels"])
                self.log("loss", loss)
                self.seen.append((self.trainer.global_step, loss.item()))
                return {"loss": loss}

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.01)

        return Own()

    def test_the_whole_module_is_copied_and_only_the_student_logs(self, tmp_path):
        module = self.module()
        trainer, callback = self.run(tmp_path, {}, module)
        (peer,) = callback.session.techniques["distill"].peers
        assert [step for step, _ in peer.seen] == [step for step, _ in module.seen] == [0, 1, 2, 3]
        assert trainer.callback_metrics["loss"] == pytest.approx(module.seen[-1][1])
        assert peer._trainer is None
        assert peer.seen[0][1] != module.seen[0][1]

    def test_other_modules_join_whole_or_as_the_student(self, tmp_path):
        peer = self.module(seed=5)
        _, callback = self.run(tmp_path / "whole", {"peers": [peer]}, self.module())
        assert callback.session.techniques["distill"].peers == [peer]
        wide = DigitsNet(width=32)
        _, callback = self.run(tmp_path / "student", {"peers": [wide], "student": "net"}, self.module())
        assert callback.session.techniques["distill"].peers[0].net is wide
        assert callback.receipt["techniques"]["distill"]["peer_parameters"] != [4330]
        with pytest.raises(TrainingError, match=r"peers must be LightningModules .* distill\.student"):
            self.run(tmp_path / "refused", {"peers": [DigitsNet(width=32)]}, self.module())
