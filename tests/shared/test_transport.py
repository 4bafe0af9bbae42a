"""The pipes: nothing is lost, nothing overtakes, and an end that is not there yet holds nobody up."""

import asyncio
import os
import threading
import time

import msgspec
import pytest
import zmq
import zmq.asyncio

from srt.messages import AbortRequest, ControlReply, InboxItem
from srt.transport import BurstSender, Endpoints, Sender, bursts, pull, push


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy()


def receive(socket, count):
    decoder = msgspec.msgpack.Decoder(InboxItem)
    received = []
    while len(received) < count:
        assert socket.poll(60_000), f"{count - len(received)} messages are missing"
        received.append(decoder.decode(socket.recv()))
    return received


def test_messages_sent_before_the_receiver_binds_arrive_in_order(context, endpoints):
    """More of them than ZMQ's default high-water mark of 1000 lets wait."""
    sender = Sender(endpoints.leader, context)
    for rid in range(20_000):
        sender.send(AbortRequest(rid))
    socket = pull(endpoints.leader, context)
    assert [message.rid for message in receive(socket, 20_000)] == list(range(20_000))


def test_a_slow_receiver_loses_nothing(context, endpoints):
    socket = pull(endpoints.leader, context)
    sender = Sender(endpoints.leader, context)
    for rid in range(20_000):
        sender.send(AbortRequest(rid))
    time.sleep(0.1)
    assert [message.rid for message in receive(socket, 20_000)] == list(range(20_000))


def test_two_senders_share_a_pipe_each_in_its_own_order(context, endpoints):
    socket = pull(endpoints.frontend, context)
    first, second = Sender(endpoints.frontend, context), Sender(endpoints.frontend, context)
    for rid in range(500):
        first.send(AbortRequest(rid))
        second.send(AbortRequest(1000 + rid))
    rids = [message.rid for message in receive(socket, 1000)]
    assert [rid for rid in rids if rid < 1000] == list(range(500))
    assert [rid for rid in rids if rid >= 1000] == list(range(1000, 1500))


def test_bursts_have_all_that_was_said_in_order(context, endpoints):
    socket = pull(endpoints.leader, context)

    async def send():
        senders = [BurstSender(endpoints.leader, context, asyncio.get_running_loop()) for _ in range(2)]
        for rid in range(500):
            senders[rid % 2].send(AbortRequest(rid))
            if rid % 7 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        return senders

    senders = asyncio.run(send())
    messages: list[bytes] = []
    while len(messages) < 500:
        messages += bursts.decode(socket.recv())
    del senders  # what is on its way ends with them
    rids = [msgspec.msgpack.decode(message, type=AbortRequest).rid for message in messages]
    assert [rid for rid in rids if rid % 2 == 0] == list(range(0, 500, 2))
    assert [rid for rid in rids if rid % 2] == list(range(1, 500, 2))


def test_a_burst_to_whom_has_ended_is_dropped(endpoints):
    """As of a stream that its reader closes once the engine has died."""

    async def send():
        context = zmq.Context()
        sender = BurstSender(endpoints.leader, context, asyncio.get_running_loop())
        context.destroy(linger=0)
        sender.send(AbortRequest(1))
        sender.flush()

    asyncio.run(send())


def test_an_asyncio_loop_can_receive(context, endpoints):
    async def one():
        with zmq.asyncio.Context() as aio:
            socket = pull(endpoints.frontend, aio)
            sender = Sender(endpoints.frontend, context)
            sender.send(ControlReply(1, True, ""))
            raw = await asyncio.wait_for(socket.recv(), 60)
            socket.close()
            return msgspec.msgpack.decode(raw, type=ControlReply)

    assert asyncio.run(one()) == ControlReply(1, True, "")


def test_ending_does_not_wait_for_what_nobody_receives(endpoints):
    context = zmq.Context()
    socket = push(endpoints.leader, context)
    socket.send(b"never read")
    end = threading.Thread(target=context.destroy, daemon=True)
    end.start()
    end.join(60)
    assert not end.is_alive()


def test_all_addresses_lie_in_the_one_folder(context, endpoints):
    second = Endpoints(endpoints.folder, 1)
    assert (second.detokenizer, second.frontend) == (endpoints.detokenizer, endpoints.frontend)
    addresses = [endpoints.leader, second.leader, endpoints.detokenizer, endpoints.frontend, endpoints.frontend_of(1)]
    sockets = [pull(address, context) for address in addresses]
    assert sorted(os.listdir(endpoints.folder)) == ["detokenizer", "frontend-0", "frontend-1", "leader-0", "leader-1"]
    assert os.path.dirname(endpoints.board) == endpoints.folder
    for socket in sockets:
        socket.close()
