import importlib
import subprocess
import sys

import pytest
from lightning_world import BOTH, fit, make_module, make_trainer

from lightning_eff import EffCallback, Pruning, QuantizationAwareTraining, auto_callback
from lightning_eff.front_end import FRONT_END
from shared_core.engine.recipe import Recipe
from shared_core.errors import ConfigError
from shared_core.pruning import PruneConfig

pytestmark = pytest.mark.matrix


def parse(namespace, *arguments):
    cli = importlib.import_module(f"{namespace}.cli")
    boring = importlib.import_module(f"{namespace}.demos.boring_classes")
    made = cli.LightningCLI(boring.BoringModel, boring.BoringDataModule, args=list(arguments), run=False)
    return made.trainer


def ours(trainer):
    return [callback for callback in trainer.callbacks if isinstance(callback, EffCallback)]


@pytest.mark.parametrize("namespace", BOTH)
@pytest.mark.parametrize("name", ["Pruning", "lightning_eff.Pruning"])
def test_flags(namespace, name):
    trainer = parse(
        namespace, f"--trainer.callbacks+={name}", "--trainer.callbacks.sparsity=0.8", "--trainer.callbacks.begin=2ep"
    )
    (callback,) = ours(trainer)
    assert (callback.recipe["prune"].sparsity, callback.recipe["prune"].begin) == (0.8, "2ep")


@pytest.mark.parametrize(("namespace", "floor"), zip(BOTH, ["pytorch", "lightning"], strict=True))
def test_callbacks_and_recipes_come_from_a_yaml_file(namespace, floor, tmp_path):
    (tmp_path / "recipe.yaml").write_text("qat: {scheme: int8, ema_constant: 1e-2}")
    (tmp_path / "config.yaml").write_text(f"""
        trainer:
          callbacks:
            - {{class_path: lightning_eff.Pruning, init_args: {{sparsity: 0.8, skip: [last]}}}}
            - {{class_path: lightning_eff.EffCallback, init_args: {{recipe: {tmp_path}/recipe.yaml}}}}
            - {{class_path: lightning_eff.EffCallback, init_args: {{recipe: {{soup: {{kind: greedy}}}}}}}}
          plugins: {{class_path: lightning_eff.{floor}.LossScalingPrecision, init_args: {{init_scale: 8}}}}
    """)
    trainer = parse(namespace, f"--config={tmp_path}/config.yaml")
    assert [list(callback.recipe) for callback in ours(trainer)] == [["prune"], ["qat"], ["soup"]]
    assert trainer.precision_plugin.scaler.get_scale() == 8.0


@pytest.mark.parametrize("namespace", BOTH)
def test_help_shows_every_option_with_type_choices_and_text(namespace, capsys):
    with pytest.raises(SystemExit):
        parse(namespace, "--trainer.callbacks.help=lightning_eff.Pruning")
    told = capsys.readouterr().out
    assert "--trainer.callbacks.schedule {one_shot,linear,cubic,cosine,exponential,iterative}" in told
    assert "(required, type: float)" in told
    assert PruneConfig.__dataclass_fields__["sparsity"].metadata["help"] in " ".join(told.split())


@pytest.mark.parametrize(
    "arguments", [["--trainer.callbacks.sparsity=1.5"], ["--trainer.callbacks.schedule=never"], []]
)
def test_wrong_flags_end_the_program(arguments, capsys):
    with pytest.raises((SystemExit, ValueError)):
        parse(BOTH[0], "--trainer.callbacks+=lightning_eff.Pruning", *arguments)


def test_python_gets_the_same_signature():
    import inspect

    parameters = inspect.signature(QuantizationAwareTraining).parameters
    assert parameters["scheme"].default is None  # weights can be given instead
    assert parameters["ema_constant"].annotation is float
    with pytest.raises(ConfigError, match="scheme or weights or init must be given"):
        QuantizationAwareTraining()
    with pytest.raises(ConfigError, match="did you mean 'scheme'"):
        QuantizationAwareTraining(schme="int8")
    assert Pruning(sparsity="8e-1").recipe["prune"].sparsity == 0.8


@pytest.mark.parametrize("namespace", BOTH)
def test_the_environment_variable_reaches_every_trainer(namespace, tmp_path, monkeypatch):
    assert ours(make_trainer(tmp_path, namespace)) == []
    (tmp_path / "recipe.yaml").write_text("prune: {sparsity: 0.5}")
    monkeypatch.setenv("EFF_RECIPE", str(tmp_path / "recipe.yaml"))
    trainer = make_trainer(tmp_path, namespace, callbacks=[EffCallback({"qat": {"scheme": "int8"}})])
    fit(trainer, make_module(namespace))
    assert list(ours(trainer)[0].receipt["techniques"]) == ["prune", "qat"]
    monkeypatch.setenv("EFF_RECIPE", str(tmp_path / "nowhere.yaml"))
    with pytest.raises(ConfigError, match=r"EFF_RECIPE: .*cannot read"):
        make_trainer(tmp_path, namespace)


def test_eff_run_installs_a_recipe_and_learns_whether_it_was_used(tmp_path, monkeypatch):
    monkeypatch.setenv("EFF_RECIPE", "")
    monkeypatch.setattr(EffCallback, "num_started", 0)
    monkeypatch.setattr(FRONT_END, "_recipe", None)  # of Fabric loops
    FRONT_END.install(Recipe.from_dict({"prune": {"sparsity": 0.5}}))
    trainer = make_trainer(tmp_path)
    assert not FRONT_END.used()
    fit(trainer, make_module())
    assert FRONT_END.used()
    assert ours(trainer)[0].session.step == 18


def test_the_entry_point_imports_nothing_heavy():
    code = (
        "import sys; from lightning_eff import auto_callback as a; import lightning_eff.front_end; "
        "assert a.for_lightning() == []; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'pytorch_lightning', 'lightning')))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
    assert auto_callback.for_pytorch_lightning() == []
