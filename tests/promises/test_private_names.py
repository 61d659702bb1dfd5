"""The private names of both trainers' libraries: where they were seen, and refused by name where one is missing."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest
from lightning_world import BOTH, fit, make_module, make_trainer
from promise_drivers import hf_trainer
from transformers import Trainer

import hf_eff
import lightning_eff
from hf_eff._private_names import USED, WRAPPED
from lightning_eff._private_names import NAMES, find
from shared_core.errors import CompatibilityError

HF_NAMES = {**WRAPPED, **USED}
PRUNE = {"prune": {"sparsity": 0.5}}
DERIVED = {"strategies.py"}  # classes of Lightning's own kinds: what they set and override is Lightning's
OURS = {"_given", "_through_root", "_eff_leader", "_Class", "_instantiator", "_fields", "_orig_mod"}  # the last torch's


def names_in(function):
    """Return the attributes and functions that a function or property names."""
    function = getattr(function, "fget", function)
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {
        node.id for node in nodes if isinstance(node, ast.Name)
    }


def sources(package):
    """Return the text of the files of a front end without its table."""
    files = [file for file in Path(package.__file__).parent.rglob("*.py") if file.name != "_private_names.py"]
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()


@pytest.mark.parametrize(
    ("library", "name"),
    [*(("transformers", name) for name in HF_NAMES), *((namespace, name) for namespace in BOTH for name in NAMES)],
)
def test_a_library_still_has_a_private_name_where_it_was_seen(library, name):
    """What fails here has moved in the library: find its new place, then mend the table and its hook."""
    its = HF_NAMES[name] if library == "transformers" else NAMES[name]
    owner = Trainer if library == "transformers" else find(its.owner, library)
    assert owner is not None, f"{its.owner} is gone; whose is {name} now?"
    user = find(its.user, library) if ":" in its.user else getattr(owner, its.user, None)
    assert user is not None, f"{its.user} is gone; who uses {name} now?"
    assert name in names_in(user), f"{its.user} no longer uses {name}"
    assert callable(getattr(owner, name, None)) == its.is_method


def test_the_table_holds_every_private_name_of_transformers_that_we_use():
    text = "\n".join(sources(hf_eff).values())
    used = {*re.findall(r"trainer\.(_[a-z]\w*)", text)} - {"_eff_installed"}
    by_name = {name for name in re.findall(r'"(_[a-z]\w*)"', text) if hasattr(Trainer, name) or name in HF_NAMES}
    assert used | by_name == HF_NAMES.keys()


def test_the_table_holds_every_private_name_of_lightning_that_we_use():
    own, used, tops = set(OURS), set(), set()
    for file, text in sources(lightning_eff).items():
        tree = ast.parse(text)
        tops |= {node.name for node in tree.body if hasattr(node, "name")}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                used.add(node.attr)
                if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self" and file not in DERIVED:
                    own.add(node.attr)
            elif isinstance(node, ast.FunctionDef) and is_private(node.name):
                (used if file in DERIVED else own).add(node.name)
            elif isinstance(node, ast.ClassDef) and file not in DERIVED:
                own |= {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
                used.add(node.value)
    assert used - own - tops == NAMES.keys()


def test_a_library_without_a_method_that_is_needed_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "_clip_grad_norm", None)
    with pytest.raises(CompatibilityError, match=r"lacks _clip_grad_norm .*transformers 4\.57 to"):
        hf_trainer(PRUNE, tmp_path)
    trainer = make_trainer(tmp_path, BOTH[0], callbacks=[lightning_eff.EffCallback(PRUNE)])
    monkeypatch.delattr(find(NAMES["_on_before_fetch"].owner, BOTH[0]), "_on_before_fetch")
    with pytest.raises(CompatibilityError, match=r"lacks _on_before_fetch .*pytorch_lightning 2\.5\.0 to"):
        fit(trainer, make_module(BOTH[0]))
