"""What the worlds of `worlds` must have seen, by their names."""

from typing import Any

EXPECTED: dict[str, Any] = {
    "dead_code_never_runs": {"ran": [], "failures": 0},
    "failures_are_told": {
        "told": [["first", "ValueError"], ["first", "ZeroDivisionError"], ["second", "ZeroDivisionError"]],
        "own": ["first", "first", "second"],
    },
    "processes_exit": {
        "codes": {"exit": 3, "_exit": 4, "own signal": -11, "handler": 7, "none": -15},
        "ended": ["_exit", "exit", "handler", "none", "own signal"],
    },
    "paused_processes_wait": ["", "hello"],
    "starved_processes_are_slow": {"quick": 10, "slow": True, "stopped": True, "again": True},
    "faults_fall_between_two_steps": {"done": [0, 1, 2, 3], "reached": True, "late": False, "now": 1.0},
    "threads_take_virtual_time": {"results": [2.0, 3.0], "took": 7.0, "quick": True},
    "what_is_not_simulated_is_refused": [
        f"curious asked for {what}, which no simulation has: {instead}"
        for what, instead in (
            ("time.sleep on its event loop", "await asyncio.sleep, or sleep in a thread's work"),
            ("a thread 'writer'", "use a task, or loop.run_in_executor for what ends"),
            ("the process ['true'] of the machine", "give the service a starter that makes a process of the world"),
            (
                "a file descriptor (add_reader)",
                "connect with loop.create_connection, or pass in a stand-in at construction",
            ),
            ("a lock that blocks", "await what ends, or wait in a thread's work, with a time-out"),
        )
    ]
    + ["allowed\n"],
    "machines_are_told_apart": {
        "true": ["true", True, 1000, 100.0, True, 2023, 100.0],
        "ahead": ["ahead", True, 1001, 131.0, True, 2023, 100.0],
    },
    "randomness_is_the_seeds": {"same": True, "other": True},
    "cuts_heal": [["", "back"], ["one ", []], "one two ", "one two three"],
    "what_was_aborted_is_not_sent_again": ["", ["ConnectionResetError"]],
    "silence_ends_at_last": [[], ["TimeoutError"], 127],
    "nobody_listens": ["ConnectionRefusedError", "gaierror"],
    "hosts_lose_power": [[], ["ConnectionResetError"], {"written": 1}, 1],
    "hosts_lose_power_with_bytes_under_way": [[], ["ConnectionResetError"], {"written": 1}, 1],
    "slow_readers_fill_the_writer": [[0, []], True, ["full", "room"], 0],
    "connections_break": ["one", ["ConnectionResetError"], ["ConnectionResetError"], 0],
    "what_spins_or_waits_for_nothing_is_seen": [
        "spinner run for ever at 1.000000 s",
        "nothing can happen any more at 0.000000 s",
    ],
    "memory_is_given_back": 0,
}
