"""A model of nats-server 2.15 at the wire: as much of it as shared/nats, the services and nats-py use.

    protocol (a client's connection) ──▶ server (who hears what) ──▶ jetstream ──▶ api
                                            │ routes                     ├── streams, consumers: pure
                                         cluster (who leads)             └── disk (what outlives it)

The same classes run in a `World`, on an ordinary loop over sockets, and as a program (`python -m
tests.simulation.broker`), which RYZANSTEIN_TEST_NATS=model has tests start in place of nats-server.
`tests/simulation/conformance` holds it against the real one.

What nats-server guarantees, and the model keeps:
- Messages of one connection on one subject reach each subscriber in their order. A stream stores them in that order.
- A consumer delivers in the stream's order, what is delivered again before anything new, and in turn to those who pull.
- What was acknowledged as stored stays stored over a kill; over a loss of power what was synced (`Disk`); in a cluster
  over the loss of any minority.

What it leaves open, and the seed draws: who of a queue group is chosen, who leads a stream, how long an election takes
(4 to 9 s), which server a client finds first, and, by the network, what was under way when somebody was lost.

What is not modelled: mirrors, sources, republishing, message schedules, counters, other accounts than one, TLS, leaf
nodes, gateways; flow control of push consumers (everything is sent at once; who does not read is cut off as a slow
consumer); messages that a loss of power brings back though they were removed; followers of a cluster that lag behind;
acknowledgements of deliveries that a leader which dies has not passed on.
"""
