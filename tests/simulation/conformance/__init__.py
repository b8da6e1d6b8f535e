"""The model of the broker and the real nats-server, held against each other by the same scripts of operations.

    script ──▶ operations: nats-py, shared/nats ──▶ nats-server ──▶ outcomes ─┐
          └──▶ the same                         ──▶ the model   ──▶ outcomes ─┴──▶ differences

Where they differ, the model is wrong. What order nats-server guarantees, and what the model may therefore draw, is
said in `tests/simulation/broker/__init__.py`.
"""
