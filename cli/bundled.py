"""What comes with the package: the demo model and its tools."""

from importlib.resources import files
from pathlib import Path

DEMO = "demo"
DEMO_TOOLS = "echo"


def bundled_model(name: str) -> Path:
    """The bundle folder of a model that comes with the package."""
    return Path(str(files("posttrainllm.models"))) / name / "bundle"


def bundled_tools(name: str) -> Path:
    """The tool file `name` that comes with the package."""
    return Path(str(files("posttrainllm.tools_schemas"))) / f"{name}.json"
