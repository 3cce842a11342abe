"""ONNX Runtime's execution providers: one row each, and the rules for choosing.

A provider that is named and not there is an error, never a silent CPU. `auto` is CUDA where it is listed
and one probe step passes, otherwise CPU: the only other provider that was measured to be faster than the CPU
on decoder graphs. CoreML, for one, splits such graphs into many partitions and is slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ProviderError


@dataclass(frozen=True)
class Provider:
    """`ort_name` is ONNX Runtime's; `device` is where KV buffers and logits live (an OrtDevice name)."""

    name: str
    ort_name: str
    device: str


CPU = Provider("cpu", "CPUExecutionProvider", "cpu")
CUDA = Provider("cuda", "CUDAExecutionProvider", "cuda")
# Providers whose device memory ONNX Runtime's Python API cannot bind, or where nobody has run it yet,
# keep KV in host memory and copy.
PROVIDERS = (
    CPU,
    CUDA,
    Provider("coreml", "CoreMLExecutionProvider", "cpu"),
    Provider("dml", "DmlExecutionProvider", "cpu"),
    Provider("openvino", "OpenVINOExecutionProvider", "cpu"),
    Provider("webgpu", "WebGpuExecutionProvider", "cpu"),
    Provider("migraphx", "MIGraphXExecutionProvider", "cpu"),
    Provider("xnnpack", "XnnpackExecutionProvider", "cpu"),
)
NAMES = ("auto", *(provider.name for provider in PROVIDERS))


def available(offered: Sequence[str]) -> list[Provider]:
    """The rows among ONNX Runtime's own list `offered` (`onnxruntime.get_available_providers()`)."""
    return [provider for provider in PROVIDERS if provider.ort_name in offered]


def candidates(name: str, offered: Sequence[str]) -> list[Provider]:
    """Providers to try for `--provider name`, best first. Raises ProviderError.

    More than one only for `auto`: each but the last must pass a probe step.
    """
    here = available(offered)
    if name == "auto":
        return [provider for provider in (CUDA, CPU) if provider in here]
    for provider in PROVIDERS:
        if provider.name == name:
            if provider in here:
                return [provider]
            raise ProviderError(
                f"--provider {name}",
                f"{provider.ort_name} is not in this ONNX Runtime",
                f"one of auto, {', '.join(p.name for p in here)}",
                "install the onnxruntime package that has it",
            )
    raise ProviderError(f"--provider {name}", "unknown provider", f"one of {', '.join(NAMES)}")
