"""All techniques by recipe key: this library's, and those that other packages register."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from shared_core.config.options import TechniqueConfig
from shared_core.engine.checks import declarations
from shared_core.errors import ConfigError, EffError, nearest

if TYPE_CHECKING:
    from shared_core.engine.technique import Technique  # imports torch, which `eff prune --help` must not wait for

GROUP = "efftrain.techniques"
"""The entry point group of modules that call `register`."""


@dataclasses.dataclass(frozen=True)
class Registration:
    """A technique's key, package and classes."""

    key: str
    package: str
    config_name: str
    technique_name: str
    classes: tuple[type[TechniqueConfig], type[Technique]] | None = None
    """Those that `register` received. Others are imported on first use: a run with one technique loads no others."""

    @property
    def config_class(self) -> type[TechniqueConfig]:
        """The dataclass of its options."""
        return self.classes[0] if self.classes else getattr(importlib.import_module(self.package), self.config_name)

    @property
    def technique_class(self) -> type[Technique]:
        """The class that a session drives."""
        return self.classes[1] if self.classes else getattr(importlib.import_module(self.package), self.technique_name)


# In the order of composition. Attach: a factorized layer can be pruned, and a pruned one quantized. The rest is cast
# and then checkpointed. Loss: the task loss, then distillation. After the step: first 16-bit weights from their
# copies, then masks, then averages, which must see masked weights.
_OURS = (
    ("matmul", "matmul_precision", "MatmulPrecisionConfig", "MatmulPrecision"),
    ("low_rank", "low_rank", "LowRankConfig", "LowRank"),
    ("lora", "lora", "LoraConfig", "Lora"),
    ("primary_weights", "primary_weights", "PrimaryWeightsConfig", "PrimaryWeights"),
    ("prune", "pruning", "PruneConfig", "Pruning"),
    ("lottery", "lottery_ticket", "LotteryConfig", "LotteryTicket"),
    ("cluster", "weight_clustering", "ClusterConfig", "WeightClustering"),
    ("qat", "quantization", "QatConfig", "QuantizationAwareTraining"),
    ("fp8", "fp8", "Fp8Config", "Fp8"),
    ("checkpointing", "activation_checkpointing", "CheckpointingConfig", "ActivationCheckpointing"),
    ("activations", "activation_compression", "ActivationsConfig", "ActivationCompression"),
    ("distill", "distillation", "DistillConfig", "Distillation"),
    ("loss_scale", "loss_scaling", "LossScaleConfig", "LossScaling"),
    ("dp", "privacy", "PrivacyConfig", "DifferentialPrivacy"),
    ("comm", "gradient_compression", "CommConfig", "GradientCompression"),
    ("average", "weight_average", "AverageConfig", "WeightAverage"),
    ("soup", "soup", "SoupConfig", "ModelSoup"),
)
OURS = frozenset(row[0] for row in _OURS)
"""Keys of the techniques of this library."""


class _Registry(Mapping[str, Registration]):
    """Recipe key → registration, in the order of registration. Entry points are loaded on first access."""

    def __init__(self) -> None:
        self._known = {key: Registration(key, f"shared_core.{package}", one, two) for key, package, one, two in _OURS}
        self._loaded = False
        self._orders: dict[str, tuple[str, ...]] = {}
        self.has_made_flags = False
        """True if a front end has made the flags of all techniques, which happens once per process."""

    def __getitem__(self, key: str) -> Registration:
        return self._all()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, Registration]:
        if not self._loaded:
            self._loaded = True  # set first, because a module that registers a technique may read the others
            try:
                for point in metadata.entry_points(group=GROUP):
                    self._load(point)
            except BaseException:
                self._loaded = False  # the next run must not silently lack the technique
                raise
        return self._known

    def _load(self, point: metadata.EntryPoint) -> None:
        try:
            point.load()
        except EffError:
            raise
        except Exception as error:
            owner = point.dist.name if point.dist is not None else "an installed package"
            raise ConfigError(
                "registry",
                f"entry point {point.name} of {owner} does not load: {point.value} raised {type(error).__name__}: "
                f"{error}",
                f"fix or uninstall {owner}",
            ) from error

    def add(self, registration: Registration) -> None:
        """Add a technique. Replace one of the same name and module, since a notebook may run a cell twice."""
        self._known[registration.key] = registration
        self._orders = {}

    def remove(self, key: str) -> None:
        """Remove a technique that `register` added."""
        if key in OURS:
            raise ConfigError("registry", f"{key} belongs to this library and cannot be removed")
        self._known.pop(key, None)
        self._orders = {}

    def order(self, kind: str) -> tuple[str, ...]:
        """Return all keys in the order of composition (``attach``) or of the end of training (``finish``).

        Raises:
            ConfigError: If declarations contradict each other.
        """
        if kind not in self._orders:
            first, last = {"attach": ("after", "before"), "finish": ("finishes_after", "finishes_before")}[kind]
            # First ours alone, then all: a technique of another package must not change the order of ours.
            ours = _sorted({key: one for key, one in self._all().items() if key in OURS}, first, last)
            self._orders[kind] = tuple(_sorted(self._all(), first, last, itertools.pairwise(ours)))
        return self._orders[kind]


REGISTRY = _Registry()


def _sorted(
    registrations: Mapping[str, Registration], after: str, before: str, pairs: Iterable[tuple[str, str]] = ()
) -> list[str]:
    """Return keys in the order of registration, moving a key that must come earlier right before its dependents.

    A depth-first topological sort (Tarjan, 1976).

    Args:
        registrations: By key.
        after: The config attribute that names the keys that come earlier.
        before: The config attribute that names the keys that come later.
        pairs: More pairs of an earlier and a later key.
    """
    # Names of techniques that are not registered are ignored.
    waits_for: dict[str, set[str]] = {
        key: set(getattr(one.config_class, after)) & registrations.keys() for key, one in registrations.items()
    }
    for key, one in registrations.items():
        for other in getattr(one.config_class, before):
            waits_for.get(other, set()).add(key)
    for earlier, later in pairs:
        waits_for[later].add(earlier)
    done: list[str] = []

    def visit(key: str, path: tuple[str, ...]) -> None:
        if key in path:
            raise ConfigError(
                "registry",
                f"{after} and {before} form a cycle: {' -> '.join((*path, key))}",
                "fix the technique that was registered last",
            )
        # Depth first: a key that must come earlier is placed right before its dependent.
        if key not in done:
            for other in registrations:  # not the set, which has no order
                if other in waits_for[key]:
                    visit(other, (*path, key))
            done.append(key)

    for key in registrations:
        visit(key, ())
    return done


def in_order(keys: Iterable[str], kind: str = "attach") -> list[str]:
    """Return recipe keys in the order of composition.

    Args:
        keys: Recipe keys in any order.
        kind: ``attach``, or ``finish`` for the end of training.

    Example:
        >>> in_order(["soup", "qat", "prune"]), in_order(["soup", "qat", "prune"], "finish")
        (['prune', 'qat', 'soup'], ['prune', 'soup', 'qat'])
    """
    return sorted(keys, key=REGISTRY.order(kind).index)


def register(technique: type[Technique], config: type[TechniqueConfig]) -> None:
    """Add a technique to recipes, flags, YAML, callbacks, receipts and `eff`.

    Call it in the module that defines both classes. Import that module before the trainer is made, and before
    `efftrain.hf` if you use flags. Or name the module in an entry point of the group ``efftrain.techniques``, which is
    loaded with the first recipe.

    Args:
        technique: The class that a session drives.
        config: A frozen dataclass of its options.

    Raises:
        ConfigError: If a declaration of the config is invalid, or the key or a flag is taken.

    Example:
        The file ``examples/own_technique/gradient_noise.py``.
    """
    key, where = config.key, f"register: {config.__name__}"
    declarations.check(config, REGISTRY, where)
    for declared in (technique, config):
        declarations.check_names(declared, where)
    known = REGISTRY.get(key)
    # A class that a notebook defines again replaces the earlier one. Another class must not.
    if known is not None and (known.package, known.config_name) != (config.__module__, config.__name__):
        taken_by = f"{known.package}.{known.config_name}"
        raise ConfigError(where, f"the key {key!r} is taken by {taken_by}", "give key another name")
    own = {f"{key}_{field.name}" for field in dataclasses.fields(config)}
    taken = sorted(own & flags(*(REGISTRY.keys() - {key})).keys())
    if taken:
        raise ConfigError(where, f"another technique already has the flag --{taken[0]}", "rename the key")
    if known is None and REGISTRY.has_made_flags:
        warnings.warn(
            f"{where}: the flags of this process were built earlier, without --{key}_{config.switch}. Import "
            f"{config.__module__} before efftrain.hf, or name it in an entry point of {GROUP}. Recipes and callbacks "
            "accept it",
            stacklevel=2,
        )
    REGISTRY.add(Registration(key, config.__module__, config.__name__, technique.__name__, (config, technique)))
    try:
        # A cycle shows only now. Remove the technique, so that the registry stays usable.
        REGISTRY.order("attach"), REGISTRY.order("finish")
    except ConfigError:
        REGISTRY.remove(key)
        raise


def registration(key: str) -> Registration:
    """Return the registration of a recipe key.

    Raises:
        ConfigError: If there is none. The message suggests the nearest.
    """
    if key not in REGISTRY:
        of_package = [repr(one.key) for one in REGISTRY.values() if one.package == f"shared_core.{key}"]
        hint = f"; did you mean {' or '.join(of_package)}?" if of_package else nearest(str(key), REGISTRY)
        if (flag := flags().get(key)) is not None:
            hint = f"; it is a flag: in a recipe, write {{{flag[0]!r}: {{{flag[1].name!r}: VALUE}}}}"
        raise ConfigError("recipe", f"{key!r} is not a technique{hint}")
    return REGISTRY[key]


def is_in_bar(name: str) -> bool:
    """Return True if the progress bar shows a figure ``<key>/<name>``."""
    key, _, figure = name.partition("/")
    declared = REGISTRY[key].config_class.figures if key in REGISTRY else {}
    return figure in declared and declared[figure].in_bar


def flags(*keys: str) -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Return every flag, ``prune_sparsity`` → (``prune``, its field), in the order of registration.

    Args:
        keys: Techniques whose flags are wanted, all by default.
    """
    return {
        f"{key}_{field.name}": (key, field)
        for key in keys or REGISTRY
        for field in dataclasses.fields(REGISTRY[key].config_class)
    }
