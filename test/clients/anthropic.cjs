// @anthropic-ai/sdk.
const Anthropic = require('@anthropic-ai/sdk');
const { run, headers, prompt, schema, leaving } = require('./lanes.cjs');

async function play(s, seen, fetch) {
  const client = new Anthropic({ baseURL: s.url, apiKey: 'none', maxRetries: s.retries, defaultHeaders: headers(s), fetch });
  const { signal, piece } = leaving(s);
  const ask = {
    model: s.model,
    max_tokens: s.tokens || 16,
    messages: [{ role: 'user', content: prompt(s) }],
    ...(s.tool && { tools: [{ name: s.tool, input_schema: schema }] }),
  };
  if (!s.stream) {
    const answer = await client.messages.create(ask, { signal });
    for (const block of answer.content) {
      if (block.type === 'text') seen.text += block.text;
      if (block.type === 'tool_use') seen.tools.push({ name: block.name, args: block.input });
    }
    seen.finish = answer.stop_reason;
    seen.usage = answer.usage.output_tokens;
    return;
  }
  let call;
  for await (const event of await client.messages.create({ ...ask, stream: true }, { signal })) {
    switch (event.type) {
      case 'content_block_start':
        call = event.content_block.type === 'tool_use' ? { name: event.content_block.name, args: '' } : undefined;
        break;
      case 'content_block_delta':
        if (call) {
          call.args += event.delta.partial_json;
          break;
        }
        seen.text += event.delta.text;
        piece();
        break;
      case 'content_block_stop':
        if (call) seen.tools.push({ name: call.name, args: JSON.parse(call.args) });
        break;
      case 'message_delta':
        seen.finish = event.delta.stop_reason;
        seen.usage = event.usage.output_tokens;
    }
  }
}

// Of the error object it reads type and message; error is the whole body.
run(play, (e) => ({ code: e.error?.error?.code, type: e.type, status: e.status, requestID: e.requestID, detail: e.error?.error }));
