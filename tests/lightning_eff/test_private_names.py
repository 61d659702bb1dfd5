import ast

import pytest
from lightning_world import BOTH, fit, make_module, make_trainer
from private_names import is_private, names_in, sources

import lightning_eff
from lightning_eff import EffCallback
from lightning_eff._private_names import NAMES, find
from shared_core.errors import CompatibilityError

DERIVED = {"strategies.py"}  # classes of Lightning's own kinds: what they set and override is Lightning's
OURS = {"_given", "_through_root", "_eff_leader", "_Class", "_instantiator", "_fields"}

OURS |= {"_orig_mod"}  # torch's


@pytest.mark.parametrize("namespace", BOTH)
@pytest.mark.parametrize("name", NAMES)
def test_lightning_still_has_a_private_name_where_it_was_seen(name, namespace):
    """What fails here has moved in Lightning: find its new place, then mend the table and its hook."""
    its = NAMES[name]
    owner = find(its.owner, namespace)
    user = find(its.user, namespace) if ":" in its.user else getattr(owner, its.user, None)
    assert owner is not None, f"{its.owner} is gone; whose is {name} now?"
    assert user is not None, f"{its.user} is gone; who uses {name} now?"
    assert name in names_in(user), f"{its.user} no longer uses {name}"
    assert callable(getattr(owner, name, None)) == its.is_method


def test_the_table_holds_every_private_name_of_lightning_that_we_use():
    own, used = set(OURS), set()
    for file, tree in sources(lightning_eff).items():
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
    tops = {node.name for tree in sources(lightning_eff).values() for node in tree.body if hasattr(node, "name")}
    assert used - own - tops == NAMES.keys()


def test_a_lightning_without_a_method_that_is_needed_is_refused_by_name(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, BOTH[0], callbacks=[EffCallback({"prune": {"sparsity": 0.5}})])
    loop = find(NAMES["_on_before_fetch"].owner, BOTH[0])
    monkeypatch.delattr(loop, "_on_before_fetch")
    with pytest.raises(CompatibilityError, match=r"must have _on_before_fetch .*; install pytorch_lightning 2.5.0 to"):
        fit(trainer, make_module(BOTH[0]))
