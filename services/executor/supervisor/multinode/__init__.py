"""A ring over several hosts: host 0 has the supervisor, the others start ranks when it says so.

    host 0                                        host 1, 2, ...
    supervisor ── HeadNode ◀── one line per host ── RingNode
         │ pipes, board                                  │ pipes, board
    rank 0, 1 ─────────── plans, collectives ─────── rank 2, 3

A line carries what pipes carry on one host: a rank's input and events, its end, and its row of the board. Where a line
ends, the ring is lost, and both sides kill their ranks: a ring is all-or-nothing.
"""
