"""`python -m backends.engine.export_tokenizer MODEL FILE`: a model's tokenizer as a file, for a
gateway that counts tokens and must not load the model. No torch. Written whole, or not at all.
"""

import sys
from pathlib import Path

from backends.engine.errors import EngineError
from backends.engine.tokenizer import from_weights
from backends.engine.weights import open_weights


def export(model: str, path: Path) -> None:
    """Raises EngineError, OSError."""
    part = path.with_suffix(f".{id(path):x}.part")
    from_weights(open_weights(model)).save(part)
    part.replace(path)


if __name__ == "__main__":
    try:
        export(sys.argv[1], Path(sys.argv[2]))
    except (EngineError, OSError) as error:
        sys.exit(str(error))
