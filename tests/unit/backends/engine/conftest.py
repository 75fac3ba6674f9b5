"""The tiny model's vocabulary, for every test here."""

import pytest

from backends.engine import tokenizer
from backends.engine.gguf import GgufFile
from backends.engine.tokenizer import Tokenizer
from tests.fakes.gguf import tiny_llama


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return GgufFile(tiny_llama(tmp_path_factory.mktemp("weights") / "tiny.gguf"))


@pytest.fixture(scope="session")
def words(file: GgufFile) -> Tokenizer:
    return tokenizer.from_gguf(file)
