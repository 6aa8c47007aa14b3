"""The openai package of Python: lanes.cjs and openai.cjs in one."""

import json
import sys
import threading
import time

import openai


def play(s, seen):
    headers = {"x-check-tag": s["name"], **(s["headers"] or {})}
    if s["fault"]:
        headers["x-sim-fault"] = s["fault"]
    # A request that gets no answer in time is the only one that can leave
    # before the first byte: a blocking call has no other way.
    leave_after = s["leaveAfter"]
    client = openai.OpenAI(
        base_url=s["url"], api_key="none", max_retries=s["retries"], default_headers=headers,
        timeout=leave_after / 1000 if leave_after else 60,
        http_client=openai.DefaultHttpxClient(event_hooks=recorded(seen["requests"])),
    )
    prompt = "call:" + s["tool"] if s["tool"] else "hello"
    ask = {"model": s["model"], "messages": [{"role": "user", "content": prompt + " x" * (s["pad"] // 2)}]}
    if s["tokens"]:
        ask["max_tokens"] = s["tokens"]
    if s["tool"]:
        schema = {"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"]}
        ask["tools"] = [{"type": "function", "function": {"name": s["tool"], "parameters": schema}}]
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


def recorded(requests):
    """Hooks that note every request, so that the SDK's own resends show."""

    def began(request):
        requests.append({"at": time.monotonic() * 1000, "retry": request.headers.get("x-stainless-retry-count", "")})

    def answered(response):
        h = response.headers
        requests[-1] |= {
            "answered": time.monotonic() * 1000,
            "status": response.status_code,
            "id": h.get("x-request-id", ""),
            "reason": h.get("headgate-reason", ""),
            "again": h.get("x-should-retry", ""),
            "wait": float(h.get("retry-after-ms", 0)),
        }

    return {"request": [began], "response": [answered]}


def describe(e):
    field = lambda name: getattr(e, name, None)
    return {
        "class": type(e).__name__, "message": str(e), "code": field("code"), "type": field("type"),
        "status": field("status_code"), "requestID": field("request_id"), "detail": field("body"),
    }


def run(lane):
    for s in lane:
        seen = {"name": s["name"], "text": "", "finish": "", "tools": [], "usage": 0, "error": None, "requests": []}
        try:
            play(s, seen)
        except Exception as e:
            seen["error"] = describe(e)
        with printing:
            print(json.dumps(seen), flush=True)


printing = threading.Lock()
lanes = {}
for scenario in json.load(sys.stdin):
    lanes.setdefault(scenario["lane"], []).append(scenario)
threads = [threading.Thread(target=run, args=(lane,)) for lane in lanes.values()]
for t in threads:
    t.start()
for t in threads:
    t.join()
