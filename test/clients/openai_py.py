"""The openai package of Python; its Responses API if the argument says so."""

import json
import sys

import lanes
import openai


def play(s, seen):
    client = openai.OpenAI(**lanes.client(s, seen, openai.DefaultHttpxClient))
    (responses if sys.argv[1:] == ["responses"] else chat)(client, s, seen)


def chat(client, s, seen):
    ask = {"model": s["model"], "messages": [{"role": "user", "content": lanes.prompt(s)}]}
    if s["tokens"]:
        ask["max_tokens"] = s["tokens"]
    if s["tool"]:
        ask["tools"] = [{"type": "function", "function": {"name": s["tool"], "parameters": lanes.schema}}]
    if not s["stream"]:
        answer = client.chat.completions.create(**ask)
        choice = answer.choices[0]
        seen["text"] = choice.message.content or ""
        seen["finish"] = choice.finish_reason
        seen["tools"] = [
            {"name": c.function.name, "args": json.loads(c.function.arguments)} for c in choice.message.tool_calls or []
        ]
        seen["usage"] = answer.usage.completion_tokens if answer.usage else 0
        return
    if s["usage"]:
        ask["stream_options"] = {"include_usage": True}
    calls, pieces = {}, 0
    with client.chat.completions.create(**ask, stream=True) as stream:
        for chunk in stream:
            if chunk.usage:
                seen["usage"] = chunk.usage.completion_tokens
            if not chunk.choices:
                continue
            choice = chunk.choices[0]
            seen["finish"] = choice.finish_reason or seen["finish"]
            for c in choice.delta.tool_calls or []:
                call = calls.setdefault(c.index, {"name": "", "args": ""})
                call["name"] += c.function.name or ""
                call["args"] += c.function.arguments or ""
            if choice.delta.content:
                seen["text"] += choice.delta.content
                pieces += 1
                if pieces == s["leaveAt"]:
                    break
    seen["tools"] = [{"name": c["name"], "args": json.loads(c["args"])} for c in calls.values()]


def responses(client, s, seen):
    ask = {"model": s["model"], "input": lanes.prompt(s)}
    if s["tokens"]:
        ask["max_output_tokens"] = s["tokens"]
    if s["tool"]:
        ask["tools"] = [{"type": "function", "name": s["tool"], "parameters": lanes.schema, "strict": False}]
    if not s["stream"]:
        answer = client.responses.create(**ask)
        seen["text"] = answer.output_text
        for item in answer.output:
            called(item, seen)
        ended(answer, seen)
        return
    pieces = 0
    with client.responses.create(**ask, stream=True) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                seen["text"] += event.delta
                pieces += 1
                if pieces == s["leaveAt"]:
                    break
            elif event.type == "response.output_item.done":
                called(event.item, seen)
            elif event.type in ("response.completed", "response.incomplete"):
                ended(event.response, seen)


def called(item, seen):
    if item.type == "function_call":
        seen["tools"].append({"name": item.name, "args": json.loads(item.arguments)})


def ended(response, seen):
    seen["finish"] = response.incomplete_details.reason if response.incomplete_details else response.status
    seen["usage"] = response.usage.output_tokens


def describe(e):
    field = lambda name: getattr(e, name, None)
    return {
        "code": field("code"), "type": field("type"), "status": field("status_code"),
        "requestID": field("request_id"), "detail": field("body"),
    }


lanes.run(play, describe)
