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
from penstock.producer.batches.webhooks.caller import WebhookCaller
from penstock.producer.batches.webhooks.deliveries import (
    RETRY_AFTER_S,
    CallFailed,
    Delivery,
    signing_keys,
)
from penstock.producer.batches.webhooks.public_address import is_public
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
             "[fe80::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "0.0.0.0", "100.64.0.1"],
)  # fmt: skip
async def test_address_that_is_not_public_is_not_called(host: str, receiver: Receiver) -> None:
    caller = WebhookCaller((), allow_private=False)
    with pytest.raises(CallFailed, match="not public"):
        await caller.call(delivery(f"http://{host}:{receiver.server_port}/hook"))
    assert not receiver.calls


@pytest.mark.parametrize(
    "address",
    [
        "::ffff:10.0.0.1",
        "::127.0.0.1",  # IPv4-compatible
        "::ffff:0:127.0.0.1",  # SIIT
        "64:ff9b::169.254.169.254",
        "64:ff9b::10.0.0.1",
        "64:ff9b:1::8.8.8.8",  # NAT64 of a network's own
        "2002:7f00:1::1",  # 6to4 of 127.0.0.1
        "2002:c0a8:101::1",
        "2001:0:808:808:0:0:f5ff:fffe",  # Teredo of 10.0.0.1
        "2001:0:808:808::f7f7:f7f7",  # Teredo of 8.8.8.8
        "2a00:1450::5efe:7f00:1",  # ISATAP
        "2a00:1450::200:5efe:a00:1",
        "fe80::1%lo", "fec0::1", "fd00::1", "ff0e::1", "2001:db8::1", "4000::1", "240.0.0.1",
    ],
)  # fmt: skip
def test_address_that_leads_behind_the_firewall_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1", "2606:4700::1111",
     "2a00:1450::5efe:808:808"],
)  # fmt: skip
def test_public_address_is_public_however_it_is_written(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("host", ["xn--a", "☃.net", "[v1.x]"])
async def test_host_that_no_name_server_can_know_is_a_failed_call(host: str) -> None:
    """Not an exception of some library: the call would be made again without end."""
    url = check_webhook_url(f"http://{host}/")
    with pytest.raises(CallFailed, match="cannot be called"):
        await WebhookCaller((), allow_private=False).call(delivery(url))


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
    "url",
    [
        "ftp://x/",
        "http://",
        "http://user@host/",
        "x",
        "http://h:99999/",
        "http://h/\n",
        "http://a b/",
    ],
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
