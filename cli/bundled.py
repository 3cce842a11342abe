"""What comes with the package: two small models, each with tools of its own."""

from importlib.resources import files
from pathlib import Path

# Name of a bundled model -> the tool file that it was trained for.
BUNDLED = {"demo": "demo", "echo": "echo"}
DEMO = "demo"
NAMES = " or ".join(BUNDLED)


def bundled_model(name: str) -> Path:
    """The bundle folder of a model that comes with the package."""
    return Path(str(files("posttrainllm.models"))) / name / "bundle"


def bundled_tools(name: str) -> Path:
    """The tool file of a model that comes with the package."""
    return Path(str(files("posttrainllm.tools_schemas"))) / f"{BUNDLED[name]}.json"
