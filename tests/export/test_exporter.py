from pathlib import Path

from posttrainllm.runtime.bundle import Bundle


def test_tiny(tiny_bundle: Path) -> None:
    b = Bundle.open(tiny_bundle, verify=True)
    assert b.manifest.parity["worst"] < 1e-4
