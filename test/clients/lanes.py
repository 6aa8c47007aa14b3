"""Plays scenarios for one SDK: lanes.cjs in Python."""

import json
import sys
import threading
import time


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


def run(play, describe):
    """Plays the scenarios of stdin: the lanes at once, those of a lane in turn."""
    printing = threading.Lock()

    def each(lane):
        for s in lane:
            seen = {"name": s["name"], "text": "", "finish": "", "tools": [], "usage": 0, "error": None, "requests": []}
            try:
                play(s, seen)
            except Exception as e:
                seen["error"] = {"class": type(e).__name__, "message": str(e), **describe(e)}
            with printing:
                print(json.dumps(seen), flush=True)

    lanes = {}
    for scenario in json.load(sys.stdin):
        lanes.setdefault(scenario["lane"], []).append(scenario)
    threads = [threading.Thread(target=each, args=(lane,)) for lane in lanes.values()]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def client(s, seen, hooked):
    """What the constructors of both SDKs are told.

    A request that gets no answer in time is the only one that can leave before
    the first byte: a blocking call has no other way.
    """
    headers = {"x-check-tag": s["name"], **(s["headers"] or {})}
    if s["fault"]:
        headers["x-sim-fault"] = s["fault"]
    leave_after = s["leaveAfter"]
    return {
        "base_url": s["url"], "api_key": "none", "max_retries": s["retries"], "default_headers": headers,
        "timeout": leave_after / 1000 if leave_after else 60,
        # There is no TLS, and reading certificates takes longer than all the rest.
        "http_client": hooked(event_hooks=recorded(seen["requests"]), verify=False),
    }


def prompt(s):
    return ("call:" + s["tool"] if s["tool"] else "hello") + " x" * (s["pad"] // 2)


schema = {"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"]}
