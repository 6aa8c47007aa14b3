// @langchain/openai.
const { ChatOpenAI } = require('@langchain/openai');
const { run, headers, prompt, schema, leaving } = require('./lanes.cjs');

async function play(s, seen, fetch) {
  const { signal, piece } = leaving(s);
  let model = new ChatOpenAI({
    model: s.model,
    apiKey: 'none',
    maxRetries: s.retries,
    streamUsage: s.usage,
    ...(s.tokens && { maxTokens: s.tokens }),
    configuration: { baseURL: s.url, defaultHeaders: headers(s), fetch },
  });
  if (s.tool) model = model.bindTools([{ type: 'function', function: { name: s.tool, parameters: schema } }]);
  if (!s.stream) {
    const answer = await model.invoke(prompt(s), { signal });
    seen.text = answer.content;
    finish(seen, answer);
    return;
  }
  let whole;
  for await (const chunk of await model.stream(prompt(s), { signal })) {
    whole = whole ? whole.concat(chunk) : chunk;
    seen.text = whole.content;
    if (chunk.content) piece();
  }
  finish(seen, whole);
}

function finish(seen, message) {
  seen.finish = message.response_metadata.finish_reason ?? '';
  seen.tools = (message.tool_calls ?? []).map((c) => ({ name: c.name, args: c.args }));
  seen.usage = message.usage_metadata?.output_tokens ?? 0;
}

run(play, (e) => ({ code: e.code, type: e.type, status: e.status, requestID: e.requestID, detail: e.error }));
