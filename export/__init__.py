"""Weights in, bundle out: checkpoint readers, the graph builder and the parity check.

Needs the `export` extra (`pip install 'posttrainllm-onnx[export]'`); never needed to run a bundle.
"""
