"""Parts of a ring: board, plan channel, recent frames, model card."""

import json
import os
import socket
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from services.executor.core.engine import BadLogits, EngineSpec
from services.executor.core.settings import ExecutorSettings, cores_of, spare_cores
from services.executor.core.step_plan import StepPlan
from services.executor.ipc.board import RingBoard, RingState
from services.executor.ipc.plan_channel import PlanListener, PlanReceiver, PlanSender
from services.executor.ipc.proofs import NONCE_SIZE, PROOF_SIZE, MessageMac
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.leader.frames import KEPT_SECONDS, RecentFrames
from services.executor.model.card import read_card
from services.executor.rank import FIRST_WORD, vocabulary_of
from services.executor.worker.stub import StubEngine, StubRing, StubSettings
from shared.config import load_settings
from shared.errors import ModelLoadError, RingLost
from shared.messages import GroupLoad

PLAN = StepPlan(7, 1, b"\1\0\0\0", b"\0\0\0\0", b"\0\0\0\0", b"\1\0\0\0", b"\1\0\0\0", b"\0\0\0\0", b"\0\0\0\0")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [[2, 5, 7, 9]]),
        ({"tp": 2}, [[2, 5], [7, 9]]),
        ({"tp": 2, "threads": 2}, [[2, 5], [7, 9]]),
        ({"tp": 4}, [[2], [5], [7], [9]]),
        ({"threads": 3}, [[]]),
        ({"tp": 3}, [[], [], []]),
        ({"pin_threads": False}, [[]]),
    ],
    ids=str,
)
def test_threads_have_cores_of_their_own_where_the_ring_fills_the_machine(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], expected: list[list[int]]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {9, 2, 5, 7})
    settings = load_settings(ExecutorSettings, **changes)
    assert [cores_of(settings, rank) for rank in range(settings.tp)] == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, 0), ({"threads": 3}, 1), ({"tp": 2}, 0), ({"tp": 2, "threads": 1}, 1), ({"tp": 3}, 0), ({"threads": 9}, 0)],
    ids=str,
)
def test_cores_that_no_thread_computes_on(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {9, 2, 5, 7})
    assert spare_cores(load_settings(ExecutorSettings, **changes)) == expected


def test_what_ranks_write_the_orchestrator_reads(tmp_path: Path) -> None:
    board = RingBoard(tmp_path / "board", 2, create=True)
    same = RingBoard(tmp_path / "board", 2)
    assert (board.state, board.beats(), board.loaded) == (RingState.STARTING, [], 0.0)
    leader, follower = same.rank(0), same.rank(1)
    load = GroupLoad(1, 2, 3, 4, 5, 6, 7, 0.008, 9.0)
    same.set_state(RingState.READY)
    same.set_load(load)
    leader.loaded(50, 100)
    follower.loaded(100, 100)
    assert not board.packs
    follower.packs()
    assert board.packs
    leader.begin(1)
    leader.progress.tick()
    same.add_step(2_000_000_000, 10, 3)
    same.totals.cached_tokens, same.totals.preemptions = 8, 1
    assert (board.state, board.load, board.loaded) == (RingState.READY, load, 0.75)
    assert [beat.in_flight for beat in board.beats()] == [True, True], "the follower has not seen its plan yet"
    assert {beat.pid for beat in board.beats()} == {os.getpid()}
    leader.end(1)
    follower.begin(1)
    follower.end(1)
    assert [(beat.step, beat.progress, beat.in_flight) for beat in board.beats()] == [(1, 1, False), (1, 0, False)]
    totals = board.totals
    assert (totals.steps, totals.step_seconds, totals.prompt_tokens, totals.output_tokens) == (1, 2.0, 10, 3)
    assert (totals.cached_tokens, totals.preemptions) == (8, 1)


def test_plans_reach_only_those_who_know_the_secret() -> None:
    listener = PlanListener("127.0.0.1")
    stranger = socket.create_connection((listener.host, listener.port))
    stranger.sendall(b"x" * (NONCE_SIZE + PROOF_SIZE))
    received: list[StepPlan | None] = []

    def follow() -> None:
        receiver = PlanReceiver(listener.host, listener.port, listener.secret, 10)
        while (plan := receiver.receive()) is not None:
            received.append(plan)
        receiver.close()

    thread = threading.Thread(target=follow)
    thread.start()
    sender = listener.accept(1, 10)
    sender.send(PLAN)
    sender.close()
    thread.join(10)
    assert received == [PLAN]
    assert stranger.recv(16), "it was asked for a proof"
    assert stranger.recv(100) == b"", "it was turned away with nothing"
    stranger.close()


def test_a_rank_takes_no_plans_from_who_does_not_know_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def pretend() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"n" * 16)
                connection.recv(48, socket.MSG_WAITALL)
                connection.sendall(b"p" * 32)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(RingLost, match="does not know the ring's secret"):
            PlanReceiver("127.0.0.1", other.getsockname()[1], "the ring's secret", 10)
        thread.join(10)


def test_a_plan_that_is_changed_on_its_way_ends_the_ring() -> None:
    """By somebody who has passed the greeting on as it was."""
    listener = PlanListener("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as between:

        def relay() -> None:
            near, _ = between.accept()
            with near, socket.create_connection((listener.host, listener.port)) as far:
                near.sendall(far.recv(16, socket.MSG_WAITALL))
                far.sendall(near.recv(48, socket.MSG_WAITALL))
                near.sendall(far.recv(32, socket.MSG_WAITALL))
                said = bytearray()
                while data := far.recv(1000):
                    said += data
                said[10] ^= 1
                near.sendall(said)

        def lead() -> None:
            sender = listener.accept(1, 10)
            sender.send(PLAN)
            sender.close()

        threads = [threading.Thread(target=relay), threading.Thread(target=lead)]
        for thread in threads:
            thread.start()
        receiver = PlanReceiver("127.0.0.1", between.getsockname()[1], listener.secret, 10)
        with pytest.raises(RingLost, match="changed on its way"):
            receiver.receive()
        receiver.close()
        for thread in threads:
            thread.join(10)


def test_a_rank_that_does_not_come_is_said() -> None:
    with pytest.raises(RingLost, match="Only 0 of 2 other ranks came"):
        PlanListener("127.0.0.1").accept(2, 0.01)


def test_whoever_leaves_in_the_greeting_is_no_rank() -> None:
    listener = PlanListener("127.0.0.1")
    with socket.create_connection((listener.host, listener.port)):
        pass
    with socket.create_connection((listener.host, listener.port)) as stranger:
        stranger.sendall(bytes(200))
        with pytest.raises(RingLost, match="Only 0 of 1 other ranks came"):
            listener.accept(1, 0.2)


def test_what_hangs_up_in_the_greeting_is_no_leader() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closing = threading.Thread(target=lambda: server.accept()[0].close())
        closing.start()
        with pytest.raises(RingLost, match="does not know the ring's secret"):
            PlanReceiver("127.0.0.1", server.getsockname()[1], "secret", 10)
        closing.join(10)


def test_a_plan_for_a_rank_that_has_gone_is_told() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    sender = PlanSender([(ours, MessageMac(b"k", "leader", b"n"))])
    with pytest.raises(RingLost, match="A rank of the ring is gone"):
        sender.send(PLAN)
    sender.close()


def test_recent_frames_grow_old_only_while_connected() -> None:
    frames = [bytes([step]) for step in range(3)]
    recent = RecentFrames()
    recent.add("a", frames[0], 0.0, connected=True)
    recent.add("b", frames[1], KEPT_SECONDS + 1, connected=False)
    assert [frame for _, frame in recent] == frames[:2]
    recent.add("a", frames[2], KEPT_SECONDS + 2, connected=True)
    assert list(recent) == [("b", frames[1]), ("a", frames[2])]


def test_a_failed_step_is_over_on_the_board(tmp_path: Path) -> None:
    class Broken(StubEngine):
        def execute(self, plan: StepPlan, samples: object) -> list[object]:  # type: ignore[override]
            raise BadLogits([0])

    board = RingBoard(tmp_path / "board", 1, create=True)
    ring = StubRing(
        Broken(StubSettings()),
        RankSpec(0, 1, "g", "i", 1, "", {}),
        board,
        PlanListener("127.0.0.1"),
        lambda rendezvous: None,
    )
    ring.load(lambda done, total: None)
    with pytest.raises(BadLogits):
        ring.execute(PLAN, [])
    assert [(beat.step, beat.in_flight) for beat in board.beats()] == [(PLAN.step, False)]
    ring.close()


TOKENIZER = Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str()
SPEC = EngineSpec(block_size=16, num_blocks=8, context_length=64, vocab_size=100)


def test_the_stub_has_the_tokenizer_of_the_model_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    with pytest.raises(ModelLoadError, match="found no vocab_size"):
        vocabulary_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 4000, "eos_token_id": 7}))
    stub = StubEngine(StubSettings(vocab_size=vocabulary_of(tmp_path), first_token=FIRST_WORD))
    board = RingBoard(tmp_path / "board", 1, create=True)
    spec = RankSpec(0, 1, "g", "i", 1, "", {})
    ring = StubRing(stub, spec, board, PlanListener("127.0.0.1"), lambda rendezvous: None, tmp_path)
    ring.load(lambda done, total: None)
    card, bundle = ring.card("m")
    assert (card.vocab_size, card.eos_token_ids, bool(card.tokenizer)) == (4000, [7], True)
    assert bundle
    ring.close()


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 0}, {"eos_token_id": 7}, [0]),
        ({"eos_token_id": [1, 2]}, {}, [1, 2]),
        (None, {"eos_token_id": 7}, [7]),
        ({}, {}, []),
    ],
)
def test_the_card_names_the_ends_of_a_sequence(
    tmp_path: Path, generation: dict[str, object] | None, config: dict[str, object], expected: list[int]
) -> None:
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({**generation, "temperature": 0.6}))
    card, bundle = read_card(tmp_path, "m", SPEC)
    assert card.eos_token_ids == expected
    assert card.defaults == ({} if generation is None else {"temperature": 0.6})
    assert bundle


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama", "torch_dtype": "bfloat16"}, ("llama", "BF16")),
        ({"model_type": "gemma3", "text_config": {"dtype": "float16"}}, ("gemma3", "F16")),
        ({"dtype": "float32", "quantization_config": {"quant_method": "gptq"}}, ("", "GPTQ")),
        ({"dtype": "int3"}, ("", "")),
    ],
)
def test_the_card_says_how_weights_are_stored(tmp_path: Path, config: dict[str, object], said: tuple[str, str]) -> None:
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    (tmp_path / "config.json").write_text(json.dumps(config))
    card, _ = read_card(tmp_path, "m", SPEC)
    assert (card.architecture, card.weights) == said


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer.json, which gateways need"),
        ({"tokenizer.json": TOKENIZER, "generation_config.json": "{"}, "is not JSON"),
        ({"tokenizer.json": TOKENIZER, "generation_config.json": "[]"}, "is not a JSON object"),
        ({"tokenizer.json": TOKENIZER[:-9]}, "tokenizer.json is not JSON"),
        ({"tokenizer.json": "{}"}, "tokenizer.json does not say 'added_tokens'"),
    ],
)
def test_a_directory_without_its_files_is_said(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        read_card(tmp_path, "m", SPEC)
