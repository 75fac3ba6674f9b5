"""The gateway's own secrets: the admin key and the pepper of API keys. Given by reference, or made
at first start and kept in the data folder, readable by its owner only."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from gateway.config import Config, resolve
from gateway.keys import PepperInvalid, mint_admin_key, open_pepper, read_pepper
from telemetry.redaction import Secret


def peppers(config: Config, environment: Mapping[str, str]) -> list[bytes]:
    """What API keys are hashed with, newest first. All replicas on one database need the same.
    Raises ConfigInvalid, PepperInvalid."""
    if config.server.key_pepper is not None:
        newest = _pepper(config.server.key_pepper, environment)
    else:
        newest = open_pepper(Path(config.store.data_dir) / "key-pepper")
    return [newest, *(_pepper(old, environment) for old in config.server.old_key_peppers)]


def _pepper(reference: str, environment: Mapping[str, str]) -> bytes:
    """A file may hold the bytes as they are, as the one that we make does."""
    kind, _, name = reference.partition(":")
    if kind == "file":
        with contextlib.suppress(OSError, PepperInvalid):
            return read_pepper(Path(name))
    return resolve(reference, environment).encode()


def admin_key(config: Config, environment: Mapping[str, str]) -> tuple[Secret, Secret | None]:
    """The admin key, and the same again if it was made just now and must be shown."""
    if config.server.admin_key is not None:
        return Secret(resolve(config.server.admin_key, environment)), None
    path = Path(config.store.data_dir) / "admin-key"
    if path.exists():
        return Secret(resolve(f"file:{path}", environment)), None
    made = mint_admin_key()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(made.reveal())
    return made, made
