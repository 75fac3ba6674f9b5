"""A DNS server on this machine that says what a test wants."""

import asyncio
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
from typing_extensions import override


class FakeDns(asyncio.DatagramProtocol):
    """`records`: (name with its dot, type) → texts of records. Others do not exist."""

    def __init__(self, records: dict[tuple[str, str], list[str]], ttl: int = 1) -> None:
        self.records = records
        self.ttl = ttl
        self.is_broken = False
        self.asked = 0
        self._transport: Any = None

    @property
    def address(self) -> str:
        host, port = self._transport.get_extra_info("sockname")
        return f"{host}:{port}"

    async def __aenter__(self) -> "FakeDns":
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()
        await asyncio.sleep(0)

    @override
    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.asked += 1
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        question = query.question[0]
        name, kind = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        found = self.records.get((name, kind))
        if self.is_broken:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif found:
            answer.answer.append(dns.rrset.from_text_list(name, self.ttl, "IN", kind, found))
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self._transport.sendto(answer.to_wire(), addr)
