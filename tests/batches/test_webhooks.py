"""Webhooks: signed, repeated, and never aimed at what is not public."""

from __future__ import annotations

import base64
import json
import time

import openai
import pytest
from batches.conftest import completion_lines, drive, start
from batches.receiver import Receiver

from penstock.producer.batches.batch_service import BatchService
from penstock.producer.batches.webhooks.caller import CallFailed, WebhookCaller
from penstock.producer.batches.webhooks.deliveries import (
    RETRY_AFTER_S,
    Delivery,
    signing_keys,
)
from penstock.producer.batches.webhooks.webhook_url import check_webhook_url
from penstock.shared.errors import ConfigurationError, InvalidRequest

SECRETS = ["whsec_" + base64.b64encode(bytes([i]) * 32).decode() for i in (1, 2)]


def delivery(url: str) -> Delivery:
    return Delivery.of(url, "batch.completed", "batch_1", int(time.time()))


@pytest.mark.parametrize("secret", SECRETS)
async def test_openais_own_client_accepts_the_signature(receiver: Receiver, secret: str) -> None:
    """With either secret, so that a receiver can change from one to the next."""
    caller = WebhookCaller(signing_keys(SECRETS), allow_private=True)
    await caller.call(delivery(receiver.url))
    [(headers, body)] = receiver.calls
    client = openai.OpenAI(api_key="none", webhook_secret=secret)
    event = client.webhooks.unwrap(body, headers)
    assert (event.type, event.data.id) == ("batch.completed", "batch_1")
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body + " ", headers)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "10.0.0.1", "192.168.1.1", "169.254.169.254",
             "[fe80::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "100.64.0.1"],
)  # fmt: skip
async def test_address_that_is_not_public_is_not_called(host: str, receiver: Receiver) -> None:
    caller = WebhookCaller((), allow_private=False)
    with pytest.raises(CallFailed, match="not public"):
        await caller.call(delivery(f"http://{host}:{receiver.server_port}/hook"))
    assert not receiver.calls


@pytest.mark.parametrize("status", [302, 400, 500])
async def test_only_2xx_is_a_success_and_redirects_are_not_followed(
    receiver: Receiver, status: int
) -> None:
    receiver.status = status
    caller = WebhookCaller((), allow_private=True)
    with pytest.raises(CallFailed, match=str(status)):
        await caller.call(delivery(receiver.url))
    assert len(receiver.calls) == 1


async def test_call_is_repeated_with_growing_pauses_and_then_given_up(
    service: BatchService, receiver: Receiver
) -> None:
    receiver.status = 503
    outcomes: list[bool] = []
    caller = WebhookCaller((), allow_private=True, on_call=outcomes.append)
    call = Delivery.of(receiver.url, "batch.completed", "given up", int(time.time()))
    await service.deliveries.add(call)
    await service.deliveries.add(call)  # a driver that died after it, and came again
    for number in range(len(RETRY_AFTER_S) + 1):
        assert not await service.deliveries.attempt(call.id, caller)
        assert len(receiver.calls) == number + 1
    assert call.id not in await service.deliveries.due()
    assert call.id in [dead.id for dead in await service.deliveries.dead()]
    await service.deliveries.retry(call.id)
    assert call.id in await service.deliveries.due()
    assert call.id not in [dead.id for dead in await service.deliveries.dead()]
    receiver.status = 200
    assert await service.deliveries.attempt(call.id, caller)
    assert outcomes == [False] * (len(RETRY_AFTER_S) + 1) + [True]
    with pytest.raises(InvalidRequest, match="webhook list"):
        await service.deliveries.retry(call.id)


async def test_webhook_of_a_batch_that_failed_its_validation(
    service: BatchService, receiver: Receiver
) -> None:
    batch = await start(service, b"{}\n", webhook=receiver.url)
    await drive(service, batch)
    caller = WebhookCaller((), allow_private=True)
    for name in await service.deliveries.due():
        await service.deliveries.attempt(name, caller)
    bodies = [json.loads(body) for _, body in receiver.calls]
    assert [(body["type"], body["data"]["id"]) for body in bodies] == [("batch.failed", batch.id)]


@pytest.mark.parametrize(
    "url", ["ftp://x/", "http://", "http://user@host/", "x", "http://h:99999/", "http://h/\n"]
)
async def test_url_that_is_no_webhook_is_refused(service: BatchService, url: str) -> None:
    with pytest.raises(InvalidRequest, match="webhook"):
        check_webhook_url(url)
    with pytest.raises(InvalidRequest, match="webhook"):
        await start(service, completion_lines(1), webhook=url)


@pytest.mark.parametrize("secret", ["whsec_", "whsec_????", "whsec_" + "AA" * 8])
def test_weak_secret_is_refused(secret: str) -> None:
    with pytest.raises(ConfigurationError, match="webhook_secrets"):
        signing_keys([secret])
