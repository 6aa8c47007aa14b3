// The openai package; its Responses API if the argument says so.
const OpenAI = require('openai');
const { run, headers, prompt, schema, leaving } = require('./lanes.cjs');

async function play(s, seen, fetch) {
  const client = new OpenAI({ baseURL: s.url, apiKey: 'none', maxRetries: s.retries, defaultHeaders: headers(s), fetch });
  await (process.argv[2] === 'responses' ? responses : chat)(client, s, seen, leaving(s));
}

async function chat(client, s, seen, { signal, piece }) {
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

async function responses(client, s, seen, { signal, piece }) {
  const ask = {
    model: s.model,
    input: prompt(s),
    ...(s.tokens && { max_output_tokens: s.tokens }),
    ...(s.tool && { tools: [{ type: 'function', name: s.tool, parameters: schema, strict: false }] }),
  };
  const called = (item) => {
    if (item.type === 'function_call') seen.tools.push({ name: item.name, args: JSON.parse(item.arguments) });
  };
  const ended = (response) => {
    seen.finish = response.incomplete_details?.reason ?? response.status;
    seen.usage = response.usage.output_tokens;
  };
  if (!s.stream) {
    const answer = await client.responses.create(ask, { signal });
    seen.text = answer.output_text;
    answer.output.forEach(called);
    ended(answer);
    return;
  }
  for await (const event of await client.responses.create({ ...ask, stream: true }, { signal })) {
    switch (event.type) {
      case 'response.output_text.delta':
        seen.text += event.delta;
        piece();
        break;
      case 'response.output_item.done':
        called(event.item);
        break;
      case 'response.completed':
      case 'response.incomplete':
        ended(event.response);
    }
  }
}

run(play, (e) => ({ code: e.code, type: e.type, status: e.status, requestID: e.requestID, detail: e.error }));
