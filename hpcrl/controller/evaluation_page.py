"""evaluation.html: the results of an evaluation, and some responses of each set."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.controller.pages import page
from hpcrl.metrics.evaluated import COLUMNS, table_rows
from hpcrl.metrics.responses import ResponseRow, by_set

PAGE = "evaluation.html"
MAX_SHOWN = 50
"""Responses of each set."""
MAX_CHARS = 20_000
"""Characters of a text; a longer one loses its middle."""


def evaluation_page(title: str, summary: Mapping[str, Any], rows: Sequence[ResponseRow]) -> bytes:
    """The page of these results (hpcrl.metrics.evaluated.summarised) and responses."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in cells) for cells in table_rows(summary))
    body = [f"<p>Model: {html.escape(str(summary['model']))}</p>"]
    body += [f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"]
    for name, own in by_set(rows).items():
        shown = min(len(own), MAX_SHOWN)
        body.append(f"<h2>{html.escape(name)}: {shown} of {len(own)} responses</h2>")
        body += [_response(row) for row in own[:shown]]
    return page(f"{title}: evaluation", body)


def _response(row: ResponseRow) -> str:
    told = [f"row {row['row']}, response {row['sample']}", f"score {row['score']:.4g}", f"{row['tokens']} tokens"]
    told += ["truncated"] if row["truncated"] else []
    told += [f"answer {row['answer']}"] if row["answer"] is not None else []
    told += [f"error: {row['error']}"] if row["error"] is not None else []
    prompt = "".join(_message(message) for message in row["prompt"])
    response = row["response"]
    if isinstance(response, str):
        response = [{"role": "assistant", "content": response}]
    return f"<div><b>{html.escape(', '.join(told))}</b>{prompt}{''.join(map(_message, response))}</div>"


def _message(message: Mapping[str, Any]) -> str:
    role, content = str(message.get("role", "")), message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    if calls := message.get("tool_calls"):
        text += json.dumps(calls, ensure_ascii=False)
    if len(text) > MAX_CHARS:
        half = MAX_CHARS // 2
        text = f"{text[:half]} [... {len(text) - MAX_CHARS} characters ...] {text[-half:]}"
    kind = "assistant" if role == "assistant" else "other"
    return f'<div class="{kind}"><i>{html.escape(role)}</i><pre>{html.escape(text)}</pre></div>'
