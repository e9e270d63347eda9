"""A tiny encoder for the tests of models."""

from pathlib import Path

import pytest
from tests.models.tiny_encoder import write_encoder


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoders") / "tiny")
