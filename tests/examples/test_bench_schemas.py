"""The bench of schemas counts what passes, and why the rest does not."""

import json
import sys

from examples import bench_schemas

ORDER = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 1}, "state": {"enum": ["open", "sent"]}},
    "required": ["id"],
    "additionalProperties": False,
}
CASES = [
    {
        "id": "order",
        "schema": ORDER,
        "tests": [
            {"valid": True, "data": {"id": 7, "state": "sent"}},
            {"valid": True, "data": {"id": 1}},
            {"valid": False, "data": {"id": 0}},
            {"valid": False, "data": {"state": "open"}},
            {"valid": False, "data": {"id": 1, "state": "lost"}},
        ],
        "features": ["enum", "minimum"],
    },
    {
        "id": "other order",
        "schema": ORDER,
        "tests": [{"valid": True, "data": {"state": "open", "id": 1}}],
        "features": [],
    },
    {
        "id": "other form",
        "schema": {"type": "integer"},
        "tests": [{"valid": True, "data": 1.0}],
        "features": [],
    },
    {"id": "sets", "schema": {"type": "array", "uniqueItems": True}, "tests": [], "features": ["uniqueItems"]},
]


def test_what_passes_is_counted_by_feature(default_model, tmp_path, monkeypatch, capsys):
    file = tmp_path / "cases.jsonl"
    file.write_text("\n".join(map(json.dumps, CASES)))
    monkeypatch.setattr(sys, "argv", ["bench_schemas", str(file)])
    assert bench_schemas.main() == 0
    *table, line = capsys.readouterr().out.splitlines()
    counts = {row.split()[0]: list(map(int, row.split()[1:])) for row in table[1:]}
    assert counts == {"enum": [1, 0, 0, 0, 0], "minimum": [1, 0, 0, 0, 0], "uniqueItems": [0, 0, 1, 0, 0]}
    result = json.loads(line)
    assert [result[name] for name in bench_schemas.OUTCOMES] == [1, 1, 1, 1, 0]
    assert (result["pass_share"], result["in_order_share"]) == (0.25, 0.5)


def test_what_is_let_through_is_a_failure(default_model, tmp_path, monkeypatch, capsys):
    file = tmp_path / "cases.jsonl"
    file.write_text(json.dumps({**CASES[0], "tests": [{"valid": False, "data": {"id": 1}}]}))
    monkeypatch.setattr(sys, "argv", ["bench_schemas", str(file)])
    assert bench_schemas.main() == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["loose"] == 1
