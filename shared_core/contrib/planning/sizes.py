"""Sizes of a transformer and its training run, which determine memory and traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared_core.config.options import checked
from shared_core.errors import ConfigError
from shared_core.files.journal import read_object


@dataclass(frozen=True)
class Cost:
    """Bytes that one item needs on a device.

    Args:
        what: Name of the item.
        held: Bytes that stay from step to step.
        during: Bytes that only live within a step.
        sent: Bytes sent by a rank per optimizer step.
        host: Bytes that stay in the host's memory.
        why: The formula, or the reason why there is no figure.
    """

    what: str
    held: float = 0.0
    during: float = 0.0
    sent: float = 0.0
    host: float = 0.0
    why: str = ""


Strategy = Literal["single", "ddp", "fsdp2"]
Precision = Literal["fp32", "mixed", "16-true"]
Optimizer = Literal["adamw", "adamw_8bit", "sgd_momentum", "sgd"]
Attention = Literal["fused", "eager"]

# Bytes of moments per parameter: a multiple of the parameter's bytes (torch uses its dtype), and fixed bytes (codes of
# bitsandbytes).
_MOMENTS = {"adamw": (2.0, 0.0), "adamw_8bit": (0.0, 2.0), "sgd_momentum": (1.0, 0.0), "sgd": (0.0, 0.0)}


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Settings that determine a run's memory and traffic, apart from the model.

    Args:
        ranks: Processes, one per device.
        strategy: ``single``, ``ddp`` (whole copies) or ``fsdp2`` (shards, gathered only for computing).
        precision: ``fp32``, ``mixed`` (weights in fp32, products in 16 bit) or ``16-true`` (weights in 16 bit).
        optimizer: Optimizer, which determines the moments.
        micro_batch: Examples per device and forward.
        seq_len: Tokens per example.
        accumulate: Micro-batches per optimizer step.
        teacher_params: Parameters of distillation's teacher on the device, 0 without one.
        attention: ``fused`` (scores are not kept for backward), or ``eager`` (they are; transformers' term).

    Raises:
        ConfigError: If a value is invalid.

    Example:
        >>> run = PlannedRun(ranks=8, strategy="fsdp2", precision="mixed", micro_batch=2, seq_len=1024)
        >>> run.tokens, run.weight_bytes, run.compute_bytes, run.parts, run.moment_bytes
        (2048, 4, 2, 8, 8.0)
    """

    ranks: int = 1
    strategy: Strategy = "single"
    precision: Precision = "mixed"
    optimizer: Optimizer = "adamw"
    micro_batch: int = 1
    seq_len: int = 2048
    accumulate: int = 1
    teacher_params: int = 0
    attention: Attention = "fused"

    def __post_init__(self) -> None:
        for name in ("ranks", "micro_batch", "seq_len", "accumulate"):
            checked(getattr(self, name), int, "plan", name, low=1)
        kinds = {"strategy": Strategy, "precision": Precision, "optimizer": Optimizer, "attention": Attention}
        for name, known in kinds.items():
            checked(getattr(self, name), known, "plan", name)
        if (self.ranks == 1) != (self.strategy == "single"):
            rule = "strategy must be single with one rank, ddp or fsdp2 with more"
            raise ConfigError("plan", f"{rule}, got {self.strategy} with {self.ranks}")

    @property
    def tokens(self) -> int:
        """Tokens per device and forward."""
        return self.micro_batch * self.seq_len

    @property
    def parts(self) -> int:
        """Number of parts into which weights, gradients and moments are cut."""
        return self.ranks if self.strategy == "fsdp2" else 1

    @property
    def weight_bytes(self) -> int:
        """Bytes per parameter, and per gradient element."""
        return 2 if self.precision == "16-true" else 4

    @property
    def compute_bytes(self) -> int:
        """Bytes per computed value."""
        return 4 if self.precision == "fp32" else 2

    @property
    def moments(self) -> float:
        """Moments per parameter that are kept in its own dtype."""
        return _MOMENTS[self.optimizer][0]

    @property
    def moment_bytes(self) -> float:
        """Bytes of the optimizer's moments per parameter."""
        return self.moments * self.weight_bytes + _MOMENTS[self.optimizer][1]

    def ring(self, size: float) -> float:
        """Return the bytes a rank sends to gather `size` bytes, or to reduce and scatter them: ``(R - 1)/R·size``."""
        return (self.ranks - 1) / self.ranks * size


# Bytes per token, layer and hidden unit, measured on transformers' Llama without attention scores, which
# scaled_dot_product_attention does not keep.
_ACTIVATION_BYTES = {"fp32": 79, "mixed": 54, "16-true": 42}
# Values kept per score with eager attention: softmax, dropout's mask and result (BERT, GPT-2), or in 16 bit a softmax
# in fp32 and its cast (Llama).
_KEPT_OF_A_SCORE = 3
_WIDTH_PER_LAYER = 128  # hidden units per layer of Llama 2 7B; 13B and 70B have 128 and 102
_WIDTH_PER_HEAD = 128  # in all of them
_GATED = ("silu", "swish")  # Llama, Mistral, Qwen and similar models
_GATED_GELU = ("gemma", "modernbert")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a transformer.

    Args:
        params: Number of all parameters.
        layers: Number of blocks.
        hidden: Width of the residual stream.
        vocab: Size of the vocabulary.
        embeddings: Parameters in embeddings and head, which most techniques do not change.
        heads: Attention heads, which determine the scores of eager attention.
    """

    params: int
    layers: int
    hidden: int
    vocab: int
    embeddings: int
    heads: int = 0

    @property
    def matrices(self) -> int:
        """Parameters of the linear layers within blocks, which adapters extend."""
        return self.params - self.embeddings

    @property
    def linear(self) -> int:
        """Parameters of these layers and of an untied output head."""
        return self.matrices + max(0, self.embeddings - self.vocab * self.hidden)

    @property
    def block(self) -> int:
        """Parameters of one block, if blocks don't share them."""
        return self.matrices // self.layers

    @classmethod
    def of_params(
        cls, params: float, *, layers: int | None = None, hidden: int | None = None, vocab: int = 32_000
    ) -> ModelShape:
        """Return a decoder's usual shape for a number of parameters: ``P = 12·L·h² + 2·V·h`` with ``h = 128·L``.

        Args:
            params: P, above 0; may be a float such as 70e9.
            layers: L, if known.
            hidden: h, if known.
            vocab: V.

        Raises:
            ConfigError: If no such model exists.

        Source: Kaplan et al., 2020, arXiv:2001.08361, section 2.1, for 12·L·h².

        Example:
            >>> shape = ModelShape.of_params(7e9)
            >>> shape.layers, shape.hidden
            (32, 4157)
        """
        checked(params, float, "plan", "params", low=1)
        for name, value in (("layers", layers), ("hidden", hidden), ("vocab", vocab)):
            checked(value, int | None, "plan", name, low=1)
        if hidden is None:
            # With L = h / 128, 12 L h^2 + 2 V h = P has one solution, since the left side increases with h.
            hidden = _solve(lambda h: 12 * (layers or h / _WIDTH_PER_LAYER) * h * h + 2 * vocab * h - params)
        layers = layers or max(1, round((params - 2 * vocab * hidden) / (12 * hidden * hidden)))
        embeddings = 2 * vocab * hidden
        if embeddings >= params:
            rule = f"params must exceed the {embeddings:,} of embeddings and head ({vocab:,} x {hidden})"
            raise ConfigError("plan", f"{rule}, got {params:,.0f}", "pass --vocab or --hidden")
        heads = max(1, round(hidden / _WIDTH_PER_HEAD))
        return cls(params=round(params), layers=layers, hidden=hidden, vocab=vocab, embeddings=embeddings, heads=heads)

    @classmethod
    def of_config(cls, source: str | Path | Mapping[str, Any]) -> ModelShape:
        """Return the shape from a Hugging Face ``config.json``.

        Attention counts ``h²·(2 + 2·kv/heads)``, the MLP ``2·h·i``, or ``3·h·i`` if it is gated (SiLU). Experts count
        as gated MLPs, plus their router. Blocks with shared weights (ALBERT) count once. Biases, norms and position
        tables are not counted: about 0.1 %, in small encoders 1 %.

        Args:
            source: The file, its folder, or the mapping.

        Raises:
            CheckpointError: If the file cannot be read.
            ConfigError: If a size is missing, or the model has an encoder and a decoder.

        Example:
            >>> ModelShape.of_config({"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000,
            ...     "intermediate_size": 11008, "num_attention_heads": 32, "hidden_act": "silu",
            ...     "tie_word_embeddings": False}).params
            6738149376
        """
        config = source if isinstance(source, Mapping) else _config_of(Path(source))
        if config.get("is_encoder_decoder"):
            rule = f"models with an encoder and a decoder are not supported, got {config.get('model_type')}"
            raise ConfigError("plan", rule, "pass --params instead")
        hidden = _size(config, "hidden_size", "n_embd", "dim", "d_model")
        layers = _size(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
        vocab = _size(config, "vocab_size")
        heads = _size(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
        inner = _size(
            config, "intermediate_size", "n_inner", "hidden_dim", "ffn_dim", "ffn_hidden_size", default=4 * hidden
        )
        head_size = _size(config, "head_dim", default=hidden // heads)
        # Queries and output have heads * head_size each, keys and values the key-value heads.
        attention = 2 * hidden * head_size * (heads + _key_value_heads(config, heads))
        if config.get("model_type") == "deberta" and config.get("relative_attention"):
            kinds = config.get("pos_att_type") or ()  # a list, or text such as c2p|p2c in old files
            attention += len(kinds.split("|") if isinstance(kinds, str) else kinds) * hidden * hidden
        # SwiGLU and similar MLPs have three matrices.
        is_gated = config.get("hidden_act") in _GATED or str(config.get("model_type")).startswith(_GATED_GELU)
        dense = (3 if is_gated else 2) * hidden * inner
        different = layers
        # ALBERT shares one group of layers among all blocks.
        if "num_hidden_groups" in config:
            different = _size(config, "num_hidden_groups") * _size(config, "inner_group_num", default=1)
        params_of_blocks = different * attention + _mlps(config, different, hidden, inner, dense)
        narrow = _size(config, "embedding_size", default=hidden)
        embeddings = vocab * narrow * (1 if config.get("tie_word_embeddings", True) else 2)
        # A factorized embedding has a projection to the hidden width.
        embeddings += narrow * hidden if narrow != hidden else 0
        return cls(
            params=params_of_blocks + embeddings, layers=layers, hidden=hidden, vocab=vocab, embeddings=embeddings,
            heads=heads,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SharedSizes:
    """Sizes that are counted once for all techniques of a run. `resized` applies a technique's changes."""

    weights: float
    trained: int
    activations: float
    logits: float
    on_host: float = 0.0

    @classmethod
    def of(cls, shape: ModelShape, run: PlannedRun) -> SharedSizes:
        """Return the sizes for a run without techniques."""
        block = _ACTIVATION_BYTES[run.precision] * run.tokens * shape.hidden
        if run.attention == "eager":
            block += _KEPT_OF_A_SCORE * run.compute_bytes * run.tokens * run.seq_len * shape.heads
        return cls(
            weights=float(shape.params * run.weight_bytes),
            trained=shape.params,
            activations=float(shape.layers * block),
            logits=run.tokens * shape.vocab * (run.compute_bytes + 8.0),
        )


def _key_value_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):  # Falcon, StarCoder
        return 1
    return _size(config, "num_key_value_heads", "num_kv_heads", default=heads)


def _mlps(config: Mapping[str, Any], layers: int, hidden: int, inner: int, dense: int) -> int:
    """Return the parameters of all MLPs, including experts and their routers. `dense` is an MLP without experts."""
    experts = _size(config, "num_local_experts", "num_experts", "n_routed_experts", default=1)
    if experts == 1:
        return layers * dense
    width = _size(config, "moe_intermediate_size", default=inner)
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
    without = config.get("first_k_dense_replace") or len(config.get("mlp_only_layers") or ())
    # Three matrices per expert, the shared expert, and one router row per expert.
    return without * dense + (layers - without) * hidden * (3 * (experts * width + shared) + experts)


def _solve(function: Callable[[float], float]) -> int:
    """Return where an increasing function crosses 0, by bisection."""
    low, high = 1.0, 2.0
    while function(high) < 0:
        low, high = high, 2 * high
    # 60 bisections: far below one unit.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return max(1, round(high))


def _config_of(path: Path) -> Mapping[str, Any]:
    return read_object(path / "config.json" if path.is_dir() else path, "pass a model's config.json, or --params")


def _size(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    found = next((config[name] for name in names if config.get(name)), default)
    if isinstance(found, int) and found > 0:
        return found
    rule = f"config must have a number above 0 as {' or '.join(names)}"
    raise ConfigError("plan", f"{rule}, got {found!r:.80}", "pass --params instead")
