"""The anthropic package of Python."""

import json

import anthropic
import lanes


def play(s, seen):
    client = anthropic.Anthropic(**lanes.client(s, seen, anthropic.DefaultHttpxClient))
    ask = {
        "model": s["model"],
        "max_tokens": s["tokens"] or 16,
        "messages": [{"role": "user", "content": lanes.prompt(s)}],
    }
    if s["tool"]:
        ask["tools"] = [{"name": s["tool"], "input_schema": lanes.schema}]
    if not s["stream"]:
        answer = client.messages.create(**ask)
        for block in answer.content:
            if block.type == "text":
                seen["text"] += block.text
            elif block.type == "tool_use":
                seen["tools"].append({"name": block.name, "args": block.input})
        seen["finish"] = answer.stop_reason
        seen["usage"] = answer.usage.output_tokens
        return
    call, pieces = None, 0
    with client.messages.create(**ask, stream=True) as stream:
        for event in stream:
            if event.type == "content_block_start":
                block = event.content_block
                call = {"name": block.name, "args": ""} if block.type == "tool_use" else None
            elif event.type == "content_block_delta" and call:
                call["args"] += event.delta.partial_json
            elif event.type == "content_block_delta":
                seen["text"] += event.delta.text
                pieces += 1
                if pieces == s["leaveAt"]:
                    break
            elif event.type == "content_block_stop" and call:
                seen["tools"].append({"name": call["name"], "args": json.loads(call["args"])})
            elif event.type == "message_delta":
                seen["finish"] = event.delta.stop_reason
                seen["usage"] = event.usage.output_tokens


def describe(e):
    """Of the error object it reads type and message; body is the whole body."""
    body = getattr(e, "body", None)
    detail = body.get("error") if isinstance(body, dict) else None
    if not isinstance(detail, dict):
        detail = {}
    return {
        "code": detail.get("code"), "type": getattr(e, "type", None), "status": getattr(e, "status_code", None),
        "requestID": getattr(e, "request_id", None), "detail": detail,
    }


lanes.run(play, describe)
