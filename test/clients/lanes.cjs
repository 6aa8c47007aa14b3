// Plays scenarios for one SDK. A scenario is described in scenario_test.go; it
// arrives as JSON on stdin, and for each one a line of JSON goes to stdout: what
// the application saw. Lanes run at once, the scenarios of a lane in turn.

const { readFileSync } = require('node:fs');

// play(scenario, seen, fetch) makes the request and fills seen as things
// arrive, so that what came before an error is kept; describe(error) puts the
// SDK's own error into plain fields.
exports.run = async (play, describe) => {
  const lanes = new Map();
  for (const s of JSON.parse(readFileSync(0))) lanes.set(s.lane, [...(lanes.get(s.lane) ?? []), s]);
  await Promise.all([...lanes.values()].map(async (lane) => {
    for (const s of lane) {
      const seen = { name: s.name, text: '', finish: '', tools: [], usage: 0, error: null, requests: [] };
      try {
        await play(s, seen, recorded(seen.requests));
      } catch (e) {
        seen.error = plain(e, describe);
      }
      console.log(JSON.stringify(seen));
    }
  }));
};

// recorded is fetch that notes every request: the SDK's own resends are made
// through it and show here.
function recorded(requests) {
  return async (url, init) => {
    const r = { at: performance.now(), retry: new Headers(init.headers).get('x-stainless-retry-count') ?? '' };
    requests.push(r);
    const res = await fetch(url, init);
    Object.assign(r, {
      answered: performance.now(),
      status: res.status,
      id: res.headers.get('x-request-id') ?? '',
      reason: res.headers.get('headgate-reason') ?? '',
      again: res.headers.get('x-should-retry') ?? '',
      wait: Number(res.headers.get('retry-after-ms')) || 0,
    });
    return res;
  };
}

// plain drops what is not there: undefined fields are left out of JSON.
const plain = (e, describe) => ({ class: e?.constructor?.name ?? typeof e, message: String(e?.message ?? e), ...describe(e) });
exports.plain = plain;

exports.headers = (s) => ({ 'x-check-tag': s.name, ...(s.fault && { 'x-sim-fault': s.fault }), ...s.headers });

// What a scenario asks: its text is long when the body is to be.
exports.prompt = (s) => (s.tool ? `call:${s.tool}` : 'hello') + ' x'.repeat(s.pad / 2);

exports.schema = { type: 'object', properties: { t: { type: 'string' } }, required: ['t'] };

// leaving is the application's way out: a signal that fires by itself after
// leaveAfter, and a function to call at each piece of text that fires it once
// leaveAt of them have come.
exports.leaving = (s) => {
  const controller = new AbortController();
  if (s.leaveAfter) setTimeout(() => controller.abort(), s.leaveAfter).unref();
  let pieces = 0;
  return { signal: controller.signal, piece: () => ++pieces === s.leaveAt && controller.abort() };
};
