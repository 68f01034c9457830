"""Messages of gpt-oss: <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>. The channel
analysis is reasoning, other channels are content."""

from __future__ import annotations

import re

from hpcrl.envs.tool_formats.reading import MAX_STARTS, Parsed, Schemas, ToolCall, ToolFormat, json_call

MESSAGE = "<|message|>"
END = re.compile(r"<\|(?:end|call|return|start)\|>")
RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]{1,256})")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w{1,32})")
PEOPLE = ("assistant", "user", "all")
MAX_HEADER = 1000


def _read(text: str, schemas: Schemas) -> Parsed:
    if MESSAGE not in text:
        return Parsed("" if "<|channel|>" in text else text.strip())
    calls: list[ToolCall] = []
    said: list[str] = []
    at = 0
    while (begins := text.find(MESSAGE, at)) >= 0:
        header = END.split(text[max(at, begins - MAX_HEADER) : begins])[-1]
        end = END.search(text, begins + len(MESSAGE))
        body = text[begins + len(MESSAGE) : end.start() if end else len(text)]
        recipient, channel = RECIPIENT.search(header), CHANNEL.search(header)
        if len(calls) == MAX_STARTS:
            calls.append(ToolCall(problem=f"there are more than {MAX_STARTS} calls"))
            break
        if recipient and recipient[1] not in PEOPLE:
            calls.append(json_call(body, 0, "<|call|>", recipient[1].removeprefix("functions."))[0])
        elif channel is None or channel[1] != "analysis":
            said.append(body)
        at = end.end() if end else len(text)
    return Parsed("\n".join(said).strip(), tuple(calls))


SPEC = ToolFormat(about="gpt-oss", read=_read)
