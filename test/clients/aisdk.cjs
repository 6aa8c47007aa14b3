// The AI SDK with @ai-sdk/openai, or with @ai-sdk/openai-compatible if the
// argument says "compatible".
const { generateText, streamText, tool, jsonSchema } = require('ai');
const { createOpenAI } = require('@ai-sdk/openai');
const { createOpenAICompatible } = require('@ai-sdk/openai-compatible');
const { run, plain, headers, prompt, schema, leaving } = require('./lanes.cjs');

const model = (s, fetch) => process.argv[2] === 'compatible'
  ? createOpenAICompatible({ name: 'headgate', baseURL: s.url, includeUsage: s.usage, fetch })(s.model)
  : createOpenAI({ baseURL: s.url, apiKey: 'none', fetch }).chat(s.model);

const toolsOf = (calls) => calls.map((c) => ({ name: c.toolName, args: c.input }));

async function play(s, seen, fetch) {
  const { signal, piece } = leaving(s);
  const ask = {
    model: model(s, fetch),
    prompt: prompt(s),
    headers: headers(s),
    maxRetries: s.retries,
    abortSignal: signal,
    ...(s.tokens && { maxOutputTokens: s.tokens }),
    ...(s.tool && { tools: { [s.tool]: tool({ inputSchema: jsonSchema(schema) }) } }),
  };
  if (!s.stream) {
    const answer = await generateText(ask);
    seen.text = answer.text;
    seen.finish = answer.finishReason;
    seen.tools = toolsOf(answer.toolCalls);
    seen.usage = answer.usage.outputTokens ?? 0;
    return;
  }
  for await (const part of streamText({ ...ask, onError() {} }).fullStream) {
    switch (part.type) {
      case 'text-delta':
        seen.text += part.text;
        piece();
        break;
      case 'tool-call':
        // Of a call that was cut off, the compatible provider says that it is invalid.
        if (!part.invalid) seen.tools.push(...toolsOf([part]));
        break;
      case 'finish':
        seen.finish = part.finishReason;
        seen.usage = part.totalUsage.outputTokens ?? 0;
        break;
      case 'error':
        seen.error = plain(part.error, describe);
        break;
      case 'abort':
        seen.finish = 'abort';
    }
  }
}

// In a stream the error is the object of the event; before it, an APICallError,
// inside a RetryError if it was resent.
function describe(e) {
  const last = e.lastError ?? e;
  const detail = last.data?.error ?? body(last.responseBody)?.error ?? (last.code ? last : undefined);
  return { code: detail?.code, type: detail?.type, status: last.statusCode, requestID: last.responseHeaders?.['x-request-id'], detail };
}

function body(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

run(play, describe);
