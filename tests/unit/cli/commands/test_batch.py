"""How a batch's end is told."""

from typing import Any

import pytest

from services.cli.commands.batch import BatchUnfinished, _judge


def batch(status: str, *errors: dict[str, Any], completed: int = 0, failed: int = 0) -> dict[str, Any]:
    counts = {"completed": completed, "failed": failed, "total": completed + failed}
    return {"status": status, "request_counts": counts, "errors": {"data": list(errors)} if errors else None}


def test_a_file_that_was_refused_is_told_by_what_is_wrong_with_it() -> None:
    first = {"line": 3, "message": "The line is not a JSON object.", "code": "invalid_json_line"}
    second = {"line": 4, "message": "The line is not a JSON object.", "code": "invalid_json_line"}
    with pytest.raises(BatchUnfinished) as told:
        _judge(batch("failed", first, second))
    assert str(told.value) == (
        "No line was run: line 3: The line is not a JSON object. (1 more above) Correct the file and submit it again."
    )
    with pytest.raises(BatchUnfinished, match="without a reason"):
        _judge(batch("failed"))


def test_a_batch_that_has_run_is_told_by_its_lines() -> None:
    _judge(batch("completed", completed=2))
    with pytest.raises(BatchUnfinished, match="is completed: 1 of 2 lines are answered, 1 failed"):
        _judge(batch("completed", completed=1, failed=1))
