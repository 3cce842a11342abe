"""posttrainllm: an ONNX Runtime agent runtime for small language models."""

__version__ = "0.1.0"
