"""deepspeed.ops.op_builder: which of DeepSpeed's compiled operators have a part of Overspill in their place."""

from __future__ import annotations

from typing import Any

from .refused import NotSupported

_THERE = {
    "AsyncIOBuilder": "async_io",
    "CPUAdamBuilder": "cpu_adam",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPULionBuilder": "cpu_lion",
    "FusedAdamBuilder": "fused_adam",
    "FusedLionBuilder": "fused_lion",
}
_MISSING = {
    "FusedLambBuilder": "fused_lamb",
    "GDSBuilder": "gds",
    "InferenceBuilder": "transformer_inference",
    "PinMemoryBuilder": "pin_memory",
    "QuantizerBuilder": "quantizer",
    "RandomLTDBuilder": "random_ltd",
    "SparseAttnBuilder": "sparse_attn",
    "TransformerBuilder": "transformer",
}
COMPATIBLE = {name: there for names, there in ((_THERE, True), (_MISSING, False)) for name in names.values()}


class OpBuilder:
    """Of one operator. NAME: as __compatible_ops__ has it."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether an optimizer or a disk of Overspill does what the operator is for."""
        return COMPATIBLE[self.NAME]

    def load(self, verbose: bool = True) -> Any:
        raise NotSupported(
            f"overspill: {type(self).__name__}.load is not supported: the engine has its own code for {self.NAME}; "
            "call what is above it"
        )


BUILDERS = {
    kind: type(kind, (OpBuilder,), {"NAME": name}) for kind, name in sorted((_THERE | _MISSING).items())
}
