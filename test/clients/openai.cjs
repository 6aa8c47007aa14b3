// The openai package.
const OpenAI = require('openai');
const { run, headers, prompt, schema, leaving } = require('./lanes.cjs');

async function play(s, seen, fetch) {
  const client = new OpenAI({ baseURL: s.url, apiKey: 'none', maxRetries: s.retries, defaultHeaders: headers(s), fetch });
  const { signal, piece } = leaving(s);
  const ask = {
    model: s.model,
    messages: [{ role: 'user', content: prompt(s) }],
    ...(s.tokens && { max_tokens: s.tokens }),
    ...(s.tool && { tools: [{ type: 'function', function: { name: s.tool, parameters: schema } }] }),
  };
  if (!s.stream) {
    const answer = await client.chat.completions.create(ask, { signal });
    const [{ message, finish_reason }] = answer.choices;
    seen.text = message.content ?? '';
    seen.finish = finish_reason;
    seen.tools = (message.tool_calls ?? []).map((c) => ({ name: c.function.name, args: JSON.parse(c.function.arguments) }));
    seen.usage = answer.usage?.completion_tokens ?? 0;
    return;
  }
  const calls = [];
  const stream = await client.chat.completions.create(
    { ...ask, stream: true, ...(s.usage && { stream_options: { include_usage: true } }) }, { signal });
  for await (const chunk of stream) {
    if (chunk.usage) seen.usage = chunk.usage.completion_tokens;
    const [choice] = chunk.choices;
    if (!choice) continue;
    if (choice.finish_reason) seen.finish = choice.finish_reason;
    for (const c of choice.delta.tool_calls ?? []) {
      const call = (calls[c.index] ??= { name: '', args: '' });
      call.name += c.function.name ?? '';
      call.args += c.function.arguments ?? '';
    }
    if (choice.delta.content) {
      seen.text += choice.delta.content;
      piece();
    }
  }
  seen.tools = calls.map((c) => ({ name: c.name, args: JSON.parse(c.args) }));
}

run(play, (e) => ({ code: e.code, type: e.type, status: e.status, requestID: e.requestID, detail: e.error }));
