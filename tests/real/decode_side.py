"""The decode ranks of a test, in a process of their own that carries out calls from a connection.

A call names the DecodeSide by the number of its opening, a method of it, and the method's arguments.
"""

import sys
from multiprocessing.connection import Client
from pathlib import Path

import torch
from pdreal.memory.mover import decode_mover, exchange_of
from pdreal.transports.opening import open_transport

from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.loading import parse_scenario

CPU = torch.device("cpu")
FILLED_WITH = 9


class DecodeSide:
    def __init__(self, settings):
        scenario = resolve(parse_scenario(settings, base=Path()))
        exchange = exchange_of(scenario)
        side = exchange.decode
        self.planes, self.movers = [], []
        for rank in range(exchange.decode_tp):
            transport = open_transport(scenario.network.transport, CPU)
            memory = transport.allocate(side.num_planes * side.num_pages * side.page_bytes).fill_(FILLED_WITH)
            shape = side.num_planes, side.num_pages * side.page_size, side.num_kv_heads, side.head_dim
            planes = memory.view(torch.bfloat16).view(shape)
            self.planes.append(planes)
            self.movers.append(decode_mover(scenario, rank, planes.unbind(), transport))

    def describe(self):
        return [mover.describe()._asdict() for mover in self.movers]

    def warm_up(self):
        for mover in self.movers:
            mover.warm_up()

    def scatter(self, command, pages):
        for mover in self.movers:
            mover.scatter(command, pages)

    def read(self):
        return [planes.view(torch.uint8).numpy() for planes in self.planes]

    def digest(self, pages, tokens):
        return {head: value for mover in self.movers for head, value in mover.digest(pages, tokens).items()}

    def close(self):
        for mover in self.movers:
            mover.close()


def main():
    sides = {}
    with Client(sys.argv[1], "AF_UNIX") as connection:
        while True:
            number, name, *arguments = connection.recv()
            if name == "open":
                sides[number] = DecodeSide(*arguments)
                connection.send(sides[number].describe())
            else:
                connection.send(getattr(sides[number], name)(*arguments))
                if name == "close":
                    del sides[number]


if __name__ == "__main__":
    main()
