"""A storage that fails: batches wait and say why, uploads are refused, nothing is left behind."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import fsspec
import pytest
from batches.conftest import completion_lines, drive, start, upload
from fsspec.implementations.memory import MemoryFileSystem
from starlette.datastructures import UploadFile
from starlette.requests import Request

from penstock.producer.batches.batch_metrics import BatchMetrics
from penstock.producer.batches.batch_service import BatchService
from penstock.producer.batches.stores.file_store import UnknownFile
from penstock.producer.batches.stores.records import Batch, BatchState, batch_folder
from penstock.producer.batches.stores.storage import Storage, StorageError
from penstock.producer.gateway.api_errors import error_of
from penstock.producer.gateway.batch_files.uploads import read_upload
from penstock.shared.errors import InvalidRequest
from penstock.shared.keys import BatchKeys
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import Settings, load_settings

A_DAY_S = 24 * 3600


@pytest.fixture
def settings(settings: Settings, tmp_path: Path) -> Settings:
    """With a storage of the test's own."""
    flags = {"redis.url": settings.redis.url, "batches.storage": str(tmp_path / "files")}
    return load_settings({**flags, "queue.model": "letters"})


@pytest.fixture
def root(settings: Settings) -> Path:
    return Path(settings.batches.storage)


def block(folder: Path) -> Callable[[], None]:
    """Put a file where a folder was, which fails for root, too; returns what undoes it."""
    aside = folder.with_name(f"{folder.name}.aside")
    if folder.exists():
        folder.rename(aside)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.touch()

    def mend() -> None:
        folder.unlink()
        if aside.exists():
            aside.rename(folder)

    return mend


def take_away(folder: Path) -> Callable[[], None]:
    """Move a folder aside; returns what brings it back, and fails if there is another by then."""
    aside = folder.with_name("aside")
    folder.rename(aside)

    def bring_back() -> None:
        assert not folder.exists()
        aside.rename(folder)

    return bring_back


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def stumble(service: BatchService, batch: Batch) -> Batch:
    """Drive a batch until it cannot get on."""
    while not batch.trouble:
        assert not batch.ended
        await service.driver(BatchMetrics()).tick(batch.id, budget_s=0.2)
        batch = await service.batches.get(batch.id)
    return batch


async def set_back(service: BatchService, batch: Batch, **changes: object) -> Batch:
    """The batch as if its times had come earlier."""
    return await service.batches.change(batch, batch.model_copy(update=changes))


@pytest.mark.parametrize("blocked", ["batches", "files"])
async def test_batch_waits_for_its_storage_and_goes_on(
    synthetic_worker: None, service: BatchService, root: Path, blocked: str
) -> None:
    batch = await start(service, completion_lines(5))
    mend = block(root / blocked)
    stuck = await stumble(service, batch)
    assert stuck.state is BatchState.VALIDATING
    assert str(root / blocked) in stuck.trouble
    assert stuck.trouble_since is not None
    mend()
    done = await drive(service, batch)
    assert (done.state, done.completed, done.trouble) == (BatchState.COMPLETED, 5, "")
    assert not (root / batch_folder(batch.id)).exists()


async def test_directory_that_vanishes_is_not_made_again(service: BatchService, root: Path) -> None:
    """It may be another disk's: what is written there is missing once the right one is back."""
    batch = await start(service, completion_lines(5))
    bring_back = take_away(root)
    with pytest.raises(StorageError, match="is gone; bring back"):
        await upload(service, b"x")
    await stumble(service, batch)
    bring_back()
    await upload(service, b"x")


async def test_body_that_is_missing_is_no_deleted_file(service: BatchService, root: Path) -> None:
    """A disk that is not mounted yet comes back; what its owner deleted does not."""
    batch = await start(service, completion_lines(5))
    body = root / "files" / batch.input_file_id
    body.unlink()
    assert "missing in batches.storage" in (await stumble(service, batch)).trouble
    await service.files.delete(await service.files.get(batch.input_file_id))
    failed = await drive(service, batch)
    assert failed.state is BatchState.FAILED
    assert [error.code for error in failed.errors] == ["input_file_deleted"]


async def test_batch_whose_storage_stays_broken_long_after_its_window_fails(
    service: BatchService, root: Path
) -> None:
    batch = await start(service, completion_lines(5))
    finalizing = batch.into(BatchState.FINALIZING, 0, outcome=BatchState.EXPIRED, parts=("x",))
    batch = await service.batches.change(batch, finalizing)
    stuck = await stumble(service, batch)
    assert stuck.state is BatchState.FINALIZING
    early = int(time.time()) - 3601
    stuck = await set_back(service, stuck, trouble_since=early)
    await service.driver(BatchMetrics()).tick(batch.id, budget_s=0.2)
    assert await service.batches.get(batch.id) == stuck  # its window goes on
    await set_back(service, stuck, expires_at=early)
    failed = await drive(service, batch)
    assert failed.state is BatchState.FAILED
    assert [error.code for error in failed.errors] == ["storage_unavailable"]
    assert "missing in batches.storage" in failed.errors[0].message


async def test_bug_that_meets_one_batch_is_named_and_tried_again(
    service: BatchService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = await start(service, completion_lines(5))
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "open", lambda *_: 1 // 0)
        assert "division" in (await stumble(service, batch)).trouble
    assert "ZeroDivisionError" in caplog.text
    await service.cancel(batch.id, "tests")
    assert (await drive(service, batch)).state is BatchState.CANCELLED


async def test_window_that_ends_while_lines_are_checked_expires_the_batch(
    service: BatchService, client: RetryingClient
) -> None:
    batch = await start(service, completion_lines(3000), webhook="https://example.com/hook")
    await set_back(service, batch, expires_at=int(time.time()))
    expired = await drive(service, batch)
    assert (expired.state, expired.total, expired.errors) == (BatchState.EXPIRED, 0, ())
    assert expired.output_file_id is None
    assert batch.id not in await service.batches.active()
    calls = await client.redis.mget(
        [BatchKeys().delivery(name) for name in await service.deliveries.due()]
    )
    bodies = [data.decode() for data in calls if data is not None and batch.id.encode() in data]
    assert len(bodies) == 1
    assert "batch.expired" in bodies[0]


async def test_full_disk_is_named_and_leaves_nothing(
    service: BatchService, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left on device; check") as refused:
            await upload(service, b"x")
    answer = error_of(refused.value)
    assert (answer.status, answer.code) == (503, "storage_unavailable")
    assert str(root) not in answer.message  # that is for the log
    assert files_below(root) == []


async def test_upload_that_its_process_does_not_end_is_swept_after_a_day(
    service: BatchService, client: RetryingClient, root: Path
) -> None:
    storage, keys = Storage(str(root)), BatchKeys()
    for name in ("old", "young"):  # as killed processes leave them
        storage.writer(f"files/{name}").write(b"x")
    old, young = sorted((root / "unfinished").iterdir())
    os.utime(old, (0, time.time() - A_DAY_S - 60))
    await service.files.expect("file-unknown")  # killed between the body and its record
    storage.write("files/file-unknown", [b"x"])
    kept = await upload(service, b"x")
    await service.leftovers.sweep()
    assert young.exists()
    assert not old.exists()
    body = service.files.body("file-unknown")
    assert (root / body).exists()
    await client.redis.zadd(keys.leftovers, {body: time.time() - 1})
    await service.leftovers.sweep()
    assert not (root / body).exists()
    assert (root / service.files.body(kept)).exists()
    assert await client.redis.zscore(keys.leftovers, service.files.body(kept)) is None


async def test_deletion_that_the_storage_refuses_is_tried_again(
    service: BatchService, client: RetryingClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await service.files.get(await upload(service, b"x"))
    body = service.files.body(file.id)

    def refuse(*_: object) -> None:
        raise StorageError("closed")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "delete", refuse)
        await service.files.delete(file)
    with pytest.raises(UnknownFile):
        await service.files.get(file.id)
    assert (root / body).exists()
    await client.redis.zadd(BatchKeys().leftovers, {body: time.time() - 1})
    await service.leftovers.sweep()
    assert not (root / body).exists()


async def test_folder_of_a_batch_that_failed_its_validation_is_swept(
    service: BatchService, root: Path
) -> None:
    batch = await drive(service, await start(service, b"{}\n"))
    assert batch.state is BatchState.FAILED
    assert (root / batch_folder(batch.id)).exists()
    await service.leftovers.sweep()
    assert not (root / batch_folder(batch.id)).exists()


async def test_errors_of_any_file_system_are_the_storages() -> None:
    class Odd(MemoryFileSystem):
        protocol = "odd"

        def _open(self, path: str, mode: str = "rb", **options: object) -> object:
            raise RuntimeError("no credentials")

        def rm(self, path: str, **options: object) -> None:
            raise RuntimeError("no credentials")

    fsspec.register_implementation("odd", Odd, clobber=True)
    storage = Storage("odd://x")
    for act in (
        lambda: storage.write("a", [b"x"]),
        lambda: storage.read("a"),
        lambda: storage.delete("a"),
    ):
        with pytest.raises(StorageError, match="no credentials; check"):
            act()


async def test_upload_that_the_gateways_disk_cannot_hold_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    form = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\nx\r\n--b--\r\n'

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": form, "more_body": False}

    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    monkeypatch.setattr(UploadFile, "write", full)
    with pytest.raises(StorageError, match="No space left on device"):
        await read_upload(request, max_bytes=1000, timeout_s=60)


async def test_upload_that_breaks_off_leaves_nothing(service: BatchService, root: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x"
        raise InvalidRequest("file", "", "whole")

    with pytest.raises(InvalidRequest):
        await service.files.upload(broken(), tenant="tests", filename="x", expires_after_s=None)
    assert files_below(root) == []
