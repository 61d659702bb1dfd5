import copy
import importlib
import pickle

import pytest
import torch
from fsspec.core import url_to_fs
from lightning_world import (
    BOTH,
    difference,
    everything,
    fit,
    hook_callback,
    loader,
    make_module,
    make_trainer,
    module_class,
    saver,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_eff import Distillation, EffCallback, ModelSoup, Pruning
from shared_core.engine.receipt import Receipt
from shared_core.errors import CompatibilityError, ConfigError, EffError, MatchError, TrainingError
from shared_core.front_ends.wrapped_method import Wrapped
from shared_core.reports.run_folder import read_run

pytestmark = pytest.mark.matrix

PRUNE = {"sparsity": 0.5, "end": 0.5, "every": 2}
QAT = {"scheme": "int8", "begin": 0.2}
RECIPE = {"prune": PRUNE, "qat": QAT}
WRAPPED = ("training_step", "configure_model", "on_save_checkpoint", "on_load_checkpoint", "lr_scheduler_step")
STOCK = {nn.Sequential, nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout}


def run(folder, recipe=RECIPE, module=None, namespace=BOTH[0], callbacks=(), val=False, **options):
    callback = EffCallback(recipe)
    trainer = make_trainer(folder, namespace, callbacks=[callback, *callbacks], **options)
    module = make_module(namespace) if module is None else module
    fit(trainer, module, val=val)
    return callback, trainer, module


def is_plain(trainer, module):
    loop = trainer.fit_loop.epoch_loop
    return (
        not set(WRAPPED) & set(vars(module))
        and {type(part) for part in module.net.modules()} <= STOCK
        and not {"on_run_start", "_on_before_fetch"} & set(vars(loop))
        and not any(optimizer._optimizer_step_post_hooks for optimizer in trainer.optimizers)
    )


@pytest.mark.parametrize("namespace", BOTH)
def test_nothing_switched_on_is_the_bare_trainer(namespace, tmp_path):
    def trained(callbacks):
        trainer = make_trainer(tmp_path, namespace, callbacks=callbacks)
        module = fit(trainer, make_module(namespace), val=True)
        return everything(trainer, module)

    assert difference(trained([]), trained([EffCallback({})])) == []
    assert not (tmp_path / "eff_receipt.json").exists()


@pytest.mark.parametrize("namespace", BOTH)
def test_it_happened_and_every_checkpoint_is_plain(namespace, tmp_path):
    weights_only = hook_callback(
        namespace,
        on_train_epoch_end=lambda trainer: trainer.save_checkpoint(f"{tmp_path}/weights.ckpt", weights_only=True),
    )
    _callback, trainer, module = run(
        tmp_path, namespace=namespace, callbacks=[saver(namespace, tmp_path), weights_only], val=True
    )
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    receipt = Receipt.read(tmp_path)
    assert receipt["steps"] == {"applied": 18, "skipped": 0, "planned": 18}
    assert receipt["techniques"].keys() == RECIPE.keys()
    zeros = sum(int((part.weight == 0).sum()) for part in module.net if isinstance(part, nn.Linear))
    assert receipt["techniques"]["prune"]["pruned"] == zeros == 96
    for name in ("3.ckpt", "17.ckpt", "weights.ckpt", "after.ckpt"):
        loaded = type(module).load_from_checkpoint(tmp_path / name)
        assert {type(part) for part in loaded.net.modules()} <= STOCK
    for name in ("17.ckpt", "weights.ckpt", "after.ckpt"):
        # Weights are baked: as many values a channel as there are codes, and those of the trained model.
        assert torch.equal(type(module).load_from_checkpoint(tmp_path / name).net[0].weight, module.net[0].weight)
    raw = torch.load(tmp_path / "17.ckpt", weights_only=True)["eff_raw_state_dict"]
    assert set(raw) == {"net.0.weight", "net.4.weight"}
    assert is_plain(trainer, module)
    assert trainer.callback_metrics["prune/sparsity"] == pytest.approx(0.5)


def test_a_callback_of_either_name_is_a_callback_of_both():
    import lightning.pytorch
    import pytorch_lightning

    assert isinstance(ModelSoup(kind="uniform"), pytorch_lightning.Callback)
    assert isinstance(ModelSoup(kind="uniform"), lightning.pytorch.Callback)


class BoomError(Exception):
    pass


@pytest.mark.parametrize("where", ["on_train_batch_end", "on_validation_start", "on_train_start", "on_save_checkpoint"])
def test_after_an_exception_everything_is_as_it_was(where, tmp_path):
    def boom(trainer):
        if where != "on_train_batch_end" or trainer.global_step == 4:
            raise BoomError

    callback = EffCallback(RECIPE)
    callbacks = [callback, hook_callback(BOTH[0], **{where: boom}), saver(BOTH[0], tmp_path)]
    trainer, module = make_trainer(tmp_path, callbacks=callbacks), make_module()
    with pytest.raises(BoomError):
        fit(trainer, module, val=True)
    assert is_plain(trainer, module)
    assert all("eff" not in key for key in module.state_dict())


def test_sanity_check_fast_dev_run_and_evaluation_alone(tmp_path):
    callback, _, module = run(tmp_path, val=True, num_sanity_val_steps=2)
    assert callback.session.step == 18
    callback, _trainer, module = run(tmp_path / "dev", fast_dev_run=2, val=True)
    assert callback.session.step == 2
    assert not (tmp_path / "dev" / "eff_receipt.json").exists()
    fresh = make_trainer(tmp_path, callbacks=[EffCallback(RECIPE)])
    fresh.validate(module, loader(), verbose=False)
    fresh.test(module, loader(), verbose=False)
    fresh.predict(module, DataLoader(torch.randn(4, 8), batch_size=2))
    assert fresh.callbacks[0].session is None


def test_the_output_of_training_step_may_be_a_dict_or_none(tmp_path):
    class Odd(module_class(BOTH[0])):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 2 else {"loss": loss, "extra": 1}

    callback, _, _ = run(tmp_path, {"distill": {"teacher": make_module(seed=3), "alpha": 0.0}}, Odd())
    assert callback.receipt["techniques"]["distill"]["batches"] == 15


def test_the_soft_term_reaches_the_gradient(tmp_path):
    teacher, module = make_module(seed=3, dropout=0.0).eval(), make_module(dropout=0.0)
    batch = next(iter(loader(shuffle=False)))
    expected = copy.deepcopy(module).train()
    logits = expected(batch[0])
    log_p = F.log_softmax(logits / 3.0, -1)
    soft = F.kl_div(log_p, F.log_softmax(teacher(batch[0]) / 3.0, -1), log_target=True, reduction="batchmean") * 9.0
    (0.25 * F.cross_entropy(logits, batch[1]) + 0.75 * soft).backward()
    seen = {}

    def keep(trainer):
        seen.update({name: p.grad.clone() for name, p in trainer.lightning_module.named_parameters()})

    trainer = make_trainer(
        tmp_path,
        callbacks=[
            Distillation(teacher=teacher, temperature=3.0, alpha=0.25),
            hook_callback(BOTH[0], on_before_optimizer_step=keep),
        ],
        max_steps=1,
    )
    fit(trainer, module, train=loader(shuffle=False))
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(seen[name], parameter.grad)


def test_a_teacher_from_a_lightning_checkpoint(tmp_path):
    teacher = make_module(seed=3)
    trainer = make_trainer(tmp_path, max_epochs=1)
    fit(trainer, teacher)
    trainer.save_checkpoint(tmp_path / "teacher.ckpt")
    named = {"teacher": str(tmp_path / "teacher.ckpt")}
    results = []
    for distill in (named, {"teacher": copy.deepcopy(teacher)}):
        _callback, trainer, module = run(tmp_path, {"distill": distill})
        results.append(everything(trainer, module))
    assert difference(*results) == []
    with pytest.raises(EffError, match="existing file"):
        run(tmp_path, {"distill": {"teacher": "nowhere.ckpt"}})


def test_a_teacher_from_a_transformers_folder_is_the_teacher_itself(tmp_path):
    import pytorch_lightning
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=20, num_labels=3
    )
    folder, weights = tmp_path / "teacher", []
    BertForSequenceClassification(config).save_pretrained(folder)

    class Student(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = BertForSequenceClassification(config)

        def training_step(self, batch, batch_idx):
            return self.net(input_ids=batch[0], labels=batch[1]).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    for teacher in (str(folder), BertForSequenceClassification.from_pretrained(folder)):
        module = Student()
        trainer = make_trainer(tmp_path, callbacks=[Distillation(teacher=teacher, student="net")], max_steps=2)
        data = [(torch.arange(5) + i, torch.tensor(i % 3)) for i in range(8)]
        torch.manual_seed(1)
        trainer.fit(module, DataLoader(data, batch_size=4))
        weights.append(torch.cat([parameter.flatten() for parameter in module.parameters()]).detach())
    assert torch.equal(*weights)


def test_a_student_whose_forward_is_not_seen_is_an_error(tmp_path):
    class Unseen(module_class(BOTH[0])):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

    with pytest.raises(TrainingError, match=r"distill\.student"):
        run(tmp_path, {"distill": {"teacher": make_module(seed=3)}}, Unseen())


def test_layers_made_in_configure_model_are_found(tmp_path):
    class Late(module_class(BOTH[0])):
        def configure_model(self):
            if not hasattr(self, "head"):
                self.head = nn.Linear(4, 4)

        def forward(self, x):
            return self.head(self.net(x))

    _callback, trainer, module = run(
        tmp_path, {"prune": {**PRUNE, "scope": "local"}}, Late(), callbacks=[saver(BOTH[0], tmp_path)]
    )
    assert (module.head.weight == 0).sum() == 8
    assert is_plain(trainer, module)


def test_compiled_modules_are_trained_and_stay_compiled(tmp_path):
    class Silent(module_class(BOTH[0])):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])

    compiled = torch.compile(Silent(), backend="eager")
    callback, trainer, _ = run(tmp_path, {"prune": PRUNE}, compiled)
    assert "_compiler_ctx" in vars(trainer.lightning_module)
    assert not isinstance(trainer.lightning_module.training_step, Wrapped)
    assert callback.receipt["techniques"]["prune"]["sparsity"] == 0.5


def test_a_copy_inside_fit_does_not_drag_the_trainer_along(tmp_path):
    copies = []
    look = hook_callback(
        BOTH[0], on_train_epoch_end=lambda trainer: copies.append(copy.deepcopy(trainer.lightning_module))
    )
    run(tmp_path, callbacks=[look])
    assert len(copies) == 3
    assert pickle.loads(pickle.dumps(EffCallback(RECIPE))).recipe == EffCallback(RECIPE).recipe


def manual_module(**options):
    class Manual(module_class(BOTH[0])):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
                optimizer.step()
                for layer in (self.net[0], self.net[4]):
                    assert self.mask_holds(layer)

        def mask_holds(self, layer):
            pruned = getattr(layer, "was_zero", None)
            layer.was_zero = layer.weight.detach() == 0
            return pruned is None or bool(layer.was_zero[pruned].all())

        def configure_optimizers(self):
            return [torch.optim.Adam(part.parameters(), lr=0.1) for part in (self.net[0], self.net[4])]

    return Manual(**options)


def test_manual_optimization_with_two_optimizers(tmp_path):
    callback, _, _module = run(tmp_path, {"prune": PRUNE, "qat": {"scheme": "int8"}}, manual_module())
    assert callback.session.step == callback.receipt["steps"]["planned"] == 36
    # what qat rounds to zero is zero too
    assert 0.5 <= callback.receipt["techniques"]["prune"]["sparsity"] < 0.55


class Newton(module_class(BOTH[0])):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("recipe", "make", "match"),
    [
        (
            {"distill": {"teacher": "x"}},
            manual_module,
            "distill cannot be combined with Lightning's manual",
        ),
        ({"loss_scale": {"kind": "dynamic"}}, manual_module, "loss_scale cannot be combined with Lightning's manual"),
        (RECIPE, Newton, "prune cannot be combined with an LBFGS"),
    ],
)
def test_what_a_module_cannot_have_is_refused_by_name(recipe, make, match, tmp_path):
    module = make()
    with pytest.raises(CompatibilityError, match=match):
        run(tmp_path, recipe, module)
    assert {type(part) for part in module.net.modules()} <= STOCK


def test_wrong_recipes_fail_before_training(tmp_path):
    with pytest.raises(ConfigError, match="sparsity must be given"):
        Pruning()
    with pytest.raises(ConfigError, match="prune was given twice"):
        run(tmp_path, callbacks=[Pruning(sparsity=0.3)])


# What Lightning's own QuantizationAwareTraining callback had as open complaints when it was removed in 2.0.


def test_forward_keeps_its_keyword_arguments_under_qat(tmp_path):
    class Keywords(module_class(BOTH[0])):
        def forward(self, x, *, scale=1.0, shift=0.0):
            return self.net(x) * scale + shift

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0], scale=2.0, shift=0.5), batch[1])

    _callback, _, module = run(tmp_path, {"qat": QAT}, Keywords())
    x = torch.randn(3, 8)
    torch.testing.assert_close(module.eval()(x, scale=2.0, shift=1.0), module(x) * 2 + 1)


def test_test_with_a_checkpoint_after_conversion(tmp_path):
    from shared_core.quantization import convert

    callback, trainer, module = run(tmp_path, {"qat": QAT}, callbacks=[saver(BOTH[0], tmp_path)])
    expected = trainer.test(module, loader(shuffle=False), ckpt_path=tmp_path / "17.ckpt", verbose=False)
    converted = convert(copy.deepcopy(module))
    assert converted is not module
    plain = make_trainer(tmp_path)
    fit(plain, make_module())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    trainer.test(module, loader(shuffle=False), ckpt_path=tmp_path / "plain.ckpt", verbose=False)
    assert callback.receipt["notes"] == []
    again = make_trainer(tmp_path, callbacks=[EffCallback({"qat": QAT})])
    found = again.test(make_module(seed=8), loader(shuffle=False), ckpt_path=tmp_path / "17.ckpt", verbose=False)
    assert found == expected


@pytest.mark.parametrize("event", ["on_train_start", "on_train_epoch_start"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_callback_that_comes_in_training_is_refused(event, beside, tmp_path):
    late = Pruning(**PRUNE)

    def add(trainer, *_):
        if late not in trainer.callbacks:
            trainer.callbacks.append(late)

    callbacks = [hook_callback(BOTH[0], **{event: add}), *([EffCallback({"qat": QAT})] if beside else [])]
    module = make_module()
    with pytest.raises(TrainingError, match="Pruning must be among the Trainer's callbacks before fit"):
        fit(make_trainer(tmp_path, callbacks=callbacks), module)
    assert {type(part) for part in module.net.modules()} <= STOCK


@pytest.mark.parametrize("name", ["lightning.fabric", "lightning_fabric"])
def test_fabric_is_refused_where_a_module_or_an_optimizer_is_set_up(name):
    fabric = pytest.importorskip(name).Fabric(accelerator="cpu", devices=1, callbacks=[Pruning(sparsity=0.5)])
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CompatibilityError, match="Pruning must be a callback of a Trainer, got Fabric"):
        fabric.setup(model, optimizer)
    model, optimizer = fabric.setup_module(model), fabric.setup_optimizers(optimizer)
    fabric.backward(model(torch.ones(1, 4)).sum())
    with pytest.raises(CompatibilityError, match="got Fabric"):
        optimizer.step()


def test_a_technique_may_reach_little_where_a_callback_says_so(tmp_path):
    module = make_module(BOTH[0])
    for part in [one for one in module.net if hasattr(one, "weight")][:-1]:
        nn.utils.parametrizations.weight_norm(part)
    with pytest.raises(MatchError, match=r"prune: covers only .*is not a prunable weight"):
        run(tmp_path, {"prune": PRUNE}, module=module, max_steps=2)
    callback, _, _ = run(
        tmp_path, {"prune": PRUNE}, module=module, callbacks=[EffCallback({"allow_partial": True})], max_steps=2
    )
    assert callback.receipt["coverage"]["prune"]["share"] < 0.5
    assert "multiply activations" in callback.receipt["notes"][0]


@pytest.mark.parametrize("namespace", BOTH)
def test_among_checkpoints_and_behind_a_url_the_receipt_lies_in_each_checkpoint(namespace, tmp_path, capsys):
    checkpoints = importlib.import_module(f"{namespace}.callbacks")
    for place in (tmp_path / "local", f"memory://{tmp_path.name}"):
        keeper = checkpoints.ModelCheckpoint(dirpath=place, save_last="link" if place == tmp_path / "local" else True)
        run(place, namespace=namespace, callbacks=[keeper], enable_checkpointing=True)
        assert "receipt: in each checkpoint" in capsys.readouterr().out
        files, _ = url_to_fs(str(place))
        names = {name.rpartition("/")[2] for name in files.ls(str(place), detail=False)}
        assert names == {"epoch=2-step=18.ckpt", "last.ckpt"}
        local = tmp_path / "found.ckpt"
        files.get(keeper.best_model_path, str(local))
        read = read_run(local)
        assert read.receipt["steps"]["applied"] == 18
        assert read.receipt["techniques"].keys() == RECIPE.keys()
        module = make_module(namespace)
        resumed = make_trainer(tmp_path / "again", namespace, callbacks=[EffCallback(RECIPE)], max_epochs=4)
        fit(resumed, module, ckpt_path=keeper.last_model_path)
        assert resumed.global_step == 24
    assert not (tmp_path / "local" / "eff_receipt.json").exists()
    assert (tmp_path / "again" / "eff_receipt.json").exists()


@pytest.mark.parametrize("namespace", BOTH)
def test_a_callback_appended_before_fit_is_as_one_of_construction(namespace, tmp_path):
    def trained(folder, given, appended):
        trainer = make_trainer(folder, namespace, callbacks=[saver(namespace, folder), *given])
        trainer.callbacks.extend(appended)
        module = fit(trainer, make_module(namespace))
        saved = sorted(folder.rglob("*.ckpt"))
        return module.state_dict(), torch.load(saved[-1], weights_only=True)["state_dict"]

    ours = [EffCallback({"prune": PRUNE}), EffCallback({"qat": QAT})]
    expected = trained(tmp_path / "a", copy.deepcopy(ours), [])
    found = trained(tmp_path / "b", [], ours)
    for weights, others in zip(found, expected, strict=True):
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
    assert "eff_deployment" in torch.load(sorted((tmp_path / "b").rglob("*.ckpt"))[-1], weights_only=False)


@pytest.mark.parametrize("namespace", BOTH)
def test_a_callback_of_the_other_trainer_is_refused_with_the_line_to_write(namespace, tmp_path):
    hf_eff, transformers = pytest.importorskip("hf_eff"), pytest.importorskip("transformers")
    for callback, name in ((hf_eff.Pruning(0.5), "Pruning"), (hf_eff.LossScaling("dynamic"), "LossScalingPrecision")):
        with pytest.raises(ConfigError, match=f"from efftrain.lightning import {name}`"):
            fit(make_trainer(tmp_path, namespace, callbacks=[callback]), make_module(namespace))
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match=r"from efftrain\.hf import Pruning`"):
        transformers.Trainer(nn.Linear(2, 2), args, callbacks=[Pruning(0.5)])
