"""Our strategies: DDP with gradient compression, and FSDP2 for modules that shard nothing themselves."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

from lightning_eff._fsdp2 import Sharding, through_root
from lightning_eff._run_environment import classes_of_either_name, public, strategies
from shared_core.errors import CompatibilityError
from shared_core.front_ends.wrapped_method import Wrapped
from shared_core.gradient_compression import CommConfig


def _call_text(made: Any, given: dict[str, Any]) -> str:
    return f"{type(made).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


@functools.cache
def ddp_class(namespace: str) -> Any:
    """Return `EffDDPStrategy` for Trainers imported from this namespace."""
    base: Any = strategies(namespace).DDPStrategy

    class EffDDPStrategy(base):
        """DDP whose communication hooks also run on a CPU, where Lightning silently drops them.

        Registered as ``eff_ddp``, and with gradient compression as ``eff_ddp_fp16``, ``eff_ddp_bf16`` and
        ``eff_ddp_powersgd``.

        Args:
            comm: Options of `shared_core.gradient_compression.CommConfig`, like ``{"hook": "powersgd", "rank": 2}``.
            kwargs: Arguments of Lightning's ``DDPStrategy``, including ``ddp_comm_hook``.
        """

        def __init__(self, comm: dict[str, Any] | None = None, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.eff_recipe = {"comm": CommConfig.from_dict(comm)} if comm is not None else {}
            self._given = ({"comm": comm} if comm is not None else {}) | kwargs

        def __repr__(self) -> str:
            return _call_text(self, self._given)

        def configure_ddp(self) -> None:
            """Wrap the model, and register the hook if Lightning does not, which requires CUDA for it."""
            super().configure_ddp()
            hook, wrapper = self._given.get("ddp_comm_hook"), self._given.get("ddp_comm_wrapper")
            if hook is not None and self.root_device.type != "cuda":
                self.model.register_comm_hook(self._given.get("ddp_comm_state"), wrapper(hook) if wrapper else hook)

        def setup(self, trainer: Any) -> None:
            """Wrap the model. Add a session of ours if no callback does."""
            super().setup(trainer)
            if self.eff_recipe:
                from lightning_eff._trainer_hooks import EffCallback

                EffCallback.join_late(trainer, trainer.lightning_module)

    return public(EffDDPStrategy, namespace)


@functools.cache
def fsdp_class(namespace: str) -> Any:
    """Return `EffFSDPStrategy` for Trainers imported from this namespace."""
    base: Any = strategies(namespace).ModelParallelStrategy

    class EffFSDPStrategy(base):
        """FSDP2 for modules that shard nothing themselves: shards the repeated blocks, and the module as the root.

        Registered as ``eff_fsdp``. Sharding comes after every technique has been attached, so you need no
        `configure_model`. One that makes layers works too.

        Args:
            blocks: Class names or name patterns (``"encoder.layers.*"``) of modules to shard separately; by default the
                outermost modules that repeat in a ModuleList or Sequential with the same class.
            reshard_after_forward: Free the gathered weights of a block after its forward. False keeps them until its
                backward, for less traffic.
            param_dtype: Dtype in which a block computes and is gathered; by default the weights' own dtype.
            reduce_dtype: Dtype in which gradients are reduced; by default `param_dtype`.
            forward_prefetch: Number of blocks gathered ahead in forward; 0 leaves it to torch.
            backward_prefetch: The same in backward.
            save_distributed_checkpoint: Save a folder with a file per process instead of one file that plain code
            loads. kwargs: ``process_group_backend`` and ``timeout`` of Lightning's ``ModelParallelStrategy``.
        """

        def __init__(
            self,
            blocks: list[str] | None = None,
            reshard_after_forward: bool = True,
            param_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
            reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
            forward_prefetch: int = 0,
            backward_prefetch: int = 0,
            save_distributed_checkpoint: bool = False,
            **kwargs: Any,
        ) -> None:
            super().__init__(save_distributed_checkpoint=save_distributed_checkpoint, tensor_parallel_size=1, **kwargs)
            self.sharding = Sharding(
                tuple(blocks or ()), reshard_after_forward, param_dtype, reduce_dtype, forward_prefetch,
                backward_prefetch,
            )  # fmt: skip
            self._given = ({"save_distributed_checkpoint": True} if save_distributed_checkpoint else {}) | kwargs

        def __repr__(self) -> str:
            sharding = {name: value for name, value in vars(self.sharding).items() if value != getattr(Sharding, name)}
            return _call_text(self, sharding | self._given)

        def setup_environment(self) -> None:
            """Make one mesh of all processes: layers are not split between them."""
            self._data_parallel_size = self.num_processes * self.num_nodes
            super().setup_environment()

        def setup(self, trainer: Any) -> None:
            """Shard the module before optimizers are made."""
            module = self.lightning_module
            if not module.automatic_optimization:
                raise CompatibilityError(
                    "eff_fsdp",
                    "optimization must be automatic: a backward inside training_step runs before the root's forward "
                    "has ended",
                    "use eff_ddp",
                )
            # Before Lightning makes optimizers: they must hold the sharded parameters.
            self.sharding.apply(module, self.device_mesh["data_parallel"])
            # Lightning requires a configure_model, where it expects the sharding
            stand_in = Wrapped(module, "configure_model", lambda original: original())
            try:
                super().setup(trainer)
            finally:
                stand_in.undo()

        def _through_root(self, context: str, name: str, *args: Any, **kwargs: Any) -> Any:
            # The root's weights are gathered only by its forward, which Lightning does not call.
            with getattr(self.precision_plugin, context)():
                return through_root(self.lightning_module, getattr(self.lightning_module, name), *args, **kwargs)

        training_step = functools.partialmethod(_through_root, "train_step_context", "training_step")
        validation_step = functools.partialmethod(_through_root, "val_step_context", "validation_step")
        test_step = functools.partialmethod(_through_root, "test_step_context", "test_step")
        predict_step = functools.partialmethod(_through_root, "predict_step_context", "predict_step")

    return public(EffFSDPStrategy, namespace)


if TYPE_CHECKING:
    from lightning_eff._run_environment import DDPStrategy, ModelParallelStrategy

    class EffDDPStrategy(DDPStrategy):  # noqa: D101
        def __init__(self, comm: dict[str, Any] | None = ..., **kwargs: Any) -> None: ...

    class EffFSDPStrategy(ModelParallelStrategy):  # noqa: D101
        def __init__(self, blocks: list[str] | None = ..., **kwargs: Any) -> None: ...


_MAKERS = {"EffDDPStrategy": ddp_class, "EffFSDPStrategy": fsdp_class}
__getattr__ = classes_of_either_name(__name__, _MAKERS, "_configure_launcher", lambda strategy: strategy.accelerator)
