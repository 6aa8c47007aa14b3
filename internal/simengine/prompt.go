// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"strings"

	"github.com/tidwall/gjson"
)

// prompt is a tokenised prompt: how long it is and the keys of its full
// blocks. A token is up to pieceBytes bytes of one space-separated word, or
// one given token id. Real tokenisers differ; what matters here is that equal
// prefixes give equal keys and that an answer sent back gives the keys it had
// when it was made.
type prompt struct {
	tokens int
	blocks []uint64
	chain  chain
}

// chain hashes tokens one after the other (FNV-1a) and cuts blocks.
type chain struct {
	hash   uint64
	filled int
	size   int // tokens per block
}

const (
	pieceBytes = 8
	fnvOffset  = 14695981039346656037
	fnvPrime   = 1099511628211
)

func newPrompt(blockTokens int, salt string) *prompt {
	p := &prompt{chain: chain{hash: fnvOffset, size: blockTokens}}
	p.chain.mix(salt)
	return p
}

func (c *chain) mix(text string) {
	for i := range len(text) {
		c.hash = (c.hash ^ uint64(text[i])) * fnvPrime
	}
	c.hash = (c.hash ^ 0xff) * fnvPrime // a separator: no UTF-8 text holds it
}

// token adds one token and returns the block's key when that fills it.
func (c *chain) token(text string) (key uint64, full bool) {
	c.mix(text)
	if c.filled++; c.filled < c.size {
		return 0, false
	}
	c.filled = 0
	return c.hash, true
}

func (p *prompt) token(text string) {
	p.tokens++
	if key, full := p.chain.token(text); full {
		p.blocks = append(p.blocks, key)
	}
}

func (p *prompt) text(text string) {
	for word := range strings.FieldsSeq(text) {
		for len(word) > pieceBytes {
			p.token(word[:pieceBytes])
			word = word[pieceBytes:]
		}
		p.token(word)
	}
}

// chatPrompt applies a chat template: role, content, and what calls tools.
func chatPrompt(p *prompt, body gjson.Result) {
	if tools := body.Get("tools"); tools.Exists() {
		p.text(tools.Raw)
	}
	body.Get("messages").ForEach(func(_, message gjson.Result) bool {
		p.token("<" + message.Get("role").String() + ">")
		switch content := message.Get("content"); {
		case content.IsArray():
			content.ForEach(func(_, part gjson.Result) bool {
				if text := part.Get("text"); text.Exists() {
					p.text(text.String())
				} else {
					p.text(part.Raw)
				}
				return true
			})
		case content.Type == gjson.String:
			p.text(content.String())
		}
		if calls := message.Get("tool_calls"); calls.Exists() {
			p.text(calls.Raw)
		}
		return true
	})
	p.token("<assistant>")
}

// textPrompts reads the four shapes of a completions prompt: a text, texts,
// token ids, lists of token ids.
func textPrompts(fresh func() *prompt, value gjson.Result) []*prompt {
	ids := func(list gjson.Result) *prompt {
		p := fresh()
		list.ForEach(func(_, id gjson.Result) bool { p.token("#" + id.Raw); return true })
		return p
	}
	if !value.IsArray() {
		p := fresh()
		p.text(value.String())
		return []*prompt{p}
	}
	elements := value.Array()
	if len(elements) > 0 && elements[0].Type == gjson.Number {
		return []*prompt{ids(value)}
	}
	var prompts []*prompt
	for _, element := range elements {
		if element.IsArray() {
			prompts = append(prompts, ids(element))
			continue
		}
		p := fresh()
		p.text(element.String())
		prompts = append(prompts, p)
	}
	return prompts
}

// lastUserText is the text of the last message of role user.
func lastUserText(body gjson.Result) string {
	text := ""
	body.Get("messages").ForEach(func(_, message gjson.Result) bool {
		if message.Get("role").String() != "user" {
			return true
		}
		text = ""
		content := message.Get("content")
		if !content.IsArray() {
			text = content.String()
			return true
		}
		content.ForEach(func(_, part gjson.Result) bool { text += part.Get("text").String() + " "; return true })
		return true
	})
	return text
}

// wordAfter is the word that directly follows mark in text, "" without one.
func wordAfter(text, mark string) string {
	_, after, found := strings.Cut(text, mark)
	if !found {
		return ""
	}
	end := strings.IndexFunc(after, func(r rune) bool {
		return !(r == '_' || r == '-' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z')
	})
	if end < 0 {
		end = len(after)
	}
	return after[:end]
}
