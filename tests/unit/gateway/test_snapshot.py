"""Known keys over a restart."""

import asyncio
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.auth import Auth, AuthSettings, Credential
from gateway.errors import StoreUnavailable, Unauthenticated
from gateway.keys import KeyRing
from gateway.snapshot import KeySnapshot, Remembered
from tests.fakes.clock import FakeClock
from tests.fakes.identity import FakeIdentityStore
from tests.unit.gateway.test_auth import identity_of

RING = KeyRing(bytes(range(32)))
REVOKED_AT = datetime.fromtimestamp(1_700_000_000, UTC)
POLL = AuthSettings(poll_s=0.02, offline_s=600)


class Scene:
    """A store with one key, and the file."""

    def __init__(self, path: Path) -> None:
        self.path = path / "key-snapshot"
        self.clock = FakeClock()
        self.store = FakeIdentityStore()
        self.minted = RING.mint()
        self.store.put(identity_of(self.minted, ip_allow=["203.0.113.0/24"]))
        self.credential = Credential(self.minted.secret.reveal(), "203.0.113.7")

    def auth(self, ring: KeyRing = RING) -> Auth:
        return Auth(self.store, ring, self.clock, POLL, snapshot=KeySnapshot(self.path, ring))

    async def live_once(self) -> None:
        """Use the key, and wait until it is saved."""
        async with self.auth() as auth:
            await auth.identify(self.credential)
            while b"203.0.113" not in (self.path.read_bytes() if self.path.exists() else b""):
                await asyncio.sleep(0.005)


async def test_known_keys_go_on_after_a_restart_without_the_database(tmp_path: Path) -> None:
    """The same caller, bounds included, for as long as without a restart and no longer."""
    scene = Scene(tmp_path)
    await scene.live_once()
    scene.store.gone = True
    scene.clock.advance(500)
    async with scene.auth() as auth:
        assert auth.is_offline
        assert (await auth.identify(scene.credential)).tenant == "acme"
        with pytest.raises(Unauthenticated):
            await auth.identify(Credential(scene.minted.secret.reveal(), "192.0.2.1"))
        stranger = RING.mint().secret.reveal()
        with pytest.raises(StoreUnavailable):
            await auth.identify(Credential(stranger))
        scene.clock.advance(101)  # 601 s since the database last agreed
        with pytest.raises(StoreUnavailable):
            await auth.identify(scene.credential)


async def test_a_restart_does_not_make_old_keys_young(tmp_path: Path) -> None:
    """A snapshot that is too old is not used at all."""
    scene = Scene(tmp_path)
    await scene.live_once()
    scene.store.gone = True
    scene.clock.advance(601)
    async with scene.auth() as auth:
        with pytest.raises(StoreUnavailable):
            await auth.identify(scene.credential)


async def test_with_the_database_there_the_file_is_not_believed(tmp_path: Path) -> None:
    """A key that was revoked while we were down is refused at once."""
    scene = Scene(tmp_path)
    await scene.live_once()
    scene.store.put(identity_of(scene.minted, revoked_at=REVOKED_AT))
    async with scene.auth() as auth:
        with pytest.raises(Unauthenticated):
            await auth.identify(scene.credential)


async def test_the_file_holds_no_key_and_is_its_owners(tmp_path: Path) -> None:
    """HMACs, mode 0600, and nothing that opens anything."""
    scene = Scene(tmp_path)
    await scene.live_once()
    assert stat.S_IMODE(scene.path.stat().st_mode) == 0o600
    secret = scene.minted.secret.reveal().rsplit("-", 1)[1]
    assert secret.encode() not in scene.path.read_bytes()
    assert [child.name for child in tmp_path.iterdir()] == ["key-snapshot"]


@pytest.mark.parametrize("damage", [b"", b"x", b"00\n{}", b"\xff\xfe\n{}"])
def test_a_file_that_is_not_ours_is_not_believed(tmp_path: Path, damage: bytes) -> None:
    """Changed, cut, foreign or of another pepper: as if there were none."""
    path = tmp_path / "s"
    snapshot = KeySnapshot(path, RING)
    assert snapshot.read() is None
    path.write_bytes(damage)
    assert snapshot.read() is None
    snapshot.write(Remembered(version=1, synced_ns=2, keys=[]))
    assert snapshot.read() is not None
    assert KeySnapshot(path, KeyRing(bytes(32))).read() is None
    assert KeySnapshot(path, KeyRing(bytes(32), bytes(range(32)))).read() is not None
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    assert snapshot.read() is None
