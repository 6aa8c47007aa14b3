// SPDX-License-Identifier: Apache-2.0

package prefix

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/openai"
)

func keysOf(t testing.TB, d dialect.Dialect, body string, model ...string) []uint64 {
	t.Helper()
	r, err := d.Inspect("application/json", []byte(body))
	if err != nil {
		t.Fatalf("%v in %.200s", err, body)
	}
	name := r.Model
	if len(model) > 0 {
		name = model[0]
	}
	var h Hasher
	keys, _ := h.Request([]byte(body), r, name)
	return keys
}

func chat(messages ...string) string {
	return `{"model":"m","messages":[` + strings.Join(messages, ",") + `],"stream":true}`
}

func message(role, text string) string {
	return `{"role":"` + role + `","content":` + strconv.Quote(text) + `}`
}

// common is how many leading keys two prompts share.
func common(a, b []uint64) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

var (
	long  = strings.Repeat("All work and no play makes Jack a dull boy. ", 200)
	other = strings.Repeat("It was the best of times, it was the worst of times. ", 200)
)

func TestNextTurnExtendsThePrompt(t *testing.T) {
	first := keysOf(t, openai.Chat, chat(message("system", long), message("user", "hello")))
	second := keysOf(t, openai.Chat, chat(message("system", long), message("user", "hello"), message("assistant", other), message("user", "and?")))
	if n := common(first, second); n != len(first) || n < len(long)/BlockBytes {
		t.Errorf("%d of %d keys are kept by the next turn", n, len(first))
	}
}

// The bytes around the messages differ, what engines see does not.
func TestOnlyThePromptCounts(t *testing.T) {
	want := keysOf(t, openai.Chat, chat(message("system", long), message("user", other)))
	for name, body := range map[string]string{
		"order of members": `{"stream":false,"messages":[` + message("system", long) + `,` + message("user", other) + `],"temperature":0.2,"model":"m"}`,
		"white space": `{ "model" : "m", "messages" : [ { "role" : "system" , "content" : ` + strconv.Quote(long) + ` } , 
			{"role":"user", "content": ` + strconv.Quote(other) + `} ] }`,
		"strings that look like structure": `{"metadata":{"messages":"[{\"role\":\"\\","x":"]}"},` + chat(message("system", long), message("user", other))[1:],
	} {
		if got := keysOf(t, openai.Chat, body); !slices.Equal(got, want) {
			t.Errorf("%s: %d keys, %d shared, want %d", name, len(got), common(got, want), len(want))
		}
	}
}

func TestWhatTheEngineSeesCounts(t *testing.T) {
	base := chat(message("system", long), message("user", other))
	want := keysOf(t, openai.Chat, base)
	split := len(long) / BlockBytes
	for name, c := range map[string]struct {
		body string
		max  int
	}{
		"role":       {chat(message("developer", long), message("user", other)), 0},
		"later role": {chat(message("system", long), message("tool", other)), split + 1},
		"text":       {chat(message("system", long+"!"), message("user", other)), split + 1},
		"one part":   {chat(`{"role":"system","content":[{"type":"text","text":`+strconv.Quote(long)+`}]}`, message("user", other)), 0},
		"tools":      {`{"tools":[{"type":"function","function":{"name":"f"}}],` + base[1:], 0},
		"name":       {chat(`{"name":"x",`+message("system", long)[1:], message("user", other)), 0},
	} {
		if n := common(keysOf(t, openai.Chat, c.body), want); n > c.max {
			t.Errorf("%s: %d keys are the same, at most %d may be", name, n, c.max)
		}
	}
	// Wherever the tools stand in the body, templates write them first.
	tools := `"tools":[{"type":"function","function":{"name":"f","description":` + strconv.Quote(long) + `}}]`
	before := keysOf(t, openai.Chat, `{`+tools+`,`+base[1:])
	after := keysOf(t, openai.Chat, base[:len(base)-1]+`,`+tools+`}`)
	if !slices.Equal(before, after) {
		t.Error("tools before and after the messages give other keys")
	}
}

// SCH-6: engines keep the caches of salts and adapters apart.
func TestSaltAndAdapterPartPrompts(t *testing.T) {
	body := func(salt string) string {
		return `{"cache_salt":"` + salt + `",` + chat(message("user", long))[1:]
	}
	seen := map[uint64]string{}
	for _, salt := range []string{"s1", "s2", ""} {
		for _, model := range []string{"x", "y"} {
			for _, key := range keysOf(t, openai.Chat, body(salt), model) {
				if who, taken := seen[key]; taken {
					t.Fatalf("%s/%s shares a key with %s", salt, model, who)
				}
				seen[key] = salt + "/" + model
			}
		}
	}
}

// SCH-11: names are taken whole, whatever is in them.
func TestNamesAreTakenWhole(t *testing.T) {
	names := []string{"org/base", "org/base:lora", "gpt:120b", "gpt", "org/adapter@v2", "a b", "модель", ""}
	seen := map[uint64]string{}
	var h Hasher
	for _, model := range names {
		for _, salt := range names {
			h.Start(model, salt)
			h.Text([]byte(long))
			keys, _ := h.Keys()
			if who, taken := seen[keys[0]]; taken {
				t.Errorf("%q with salt %q is taken for %s", model, salt, who)
			}
			seen[keys[0]] = fmt.Sprintf("%q/%q", model, salt)
		}
	}
}

// SCH-8: images count, and cost little however large they are.
func TestImagesCountByDigest(t *testing.T) {
	image := func(seed uint64, size int) string {
		rnd := rand.New(rand.NewPCG(seed, 1))
		b := make([]byte, size)
		for i := range b {
			b[i] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ012345"[rnd.IntN(32)]
		}
		return `{"type":"image_url","image_url":{"url":"data:image/png;base64,` + string(b) + `"}}`
	}
	turn := func(img string) string {
		return chat(`{"role":"user","content":[{"type":"text","text":`+strconv.Quote(long)+`},`+img+`]}`, message("assistant", other))
	}
	for _, size := range []int{300, 5 << 10, 200 << 10, 3 << 20} {
		a, b := keysOf(t, openai.Chat, turn(image(1, size))), keysOf(t, openai.Chat, turn(image(2, size)))
		n, before := common(a, b), len(long)/BlockBytes
		if n < before || n > before+1 || n == len(a) {
			t.Errorf("%d bytes: %d of %d keys are the same, want those %d before the image", size, n, len(a), before)
		}
		if same := keysOf(t, openai.Chat, turn(image(1, size))); !slices.Equal(a, same) {
			t.Errorf("%d bytes: the same image gives other keys", size)
		}
		if size >= digestMin && len(a) > (len(long)+len(other))/BlockBytes+2 {
			t.Errorf("%d bytes: %d keys: the image was hashed like text", size, len(a))
		}
	}
	// What ends in the last, partial block has no key; five more images fill it.
	last := func(img string) string {
		return chat(`{"role":"user","content":[{"type":"text","text":"look"},` + img + strings.Repeat(","+image(3, 9000), 5) + `]}`)
	}
	a, b := keysOf(t, openai.Chat, last(image(1, 9000))), keysOf(t, openai.Chat, last(image(2, 9000)))
	if len(a) == 0 || slices.Equal(a, b) {
		t.Error("images that end the prompt do not count")
	}
}

func TestTokenIDsAreStable(t *testing.T) {
	ids := make([]string, 500)
	for i := range ids {
		ids[i] = strconv.Itoa(i * 37 % 32000)
	}
	body := func(sep string, ids []string) string {
		return `{"model":"m","prompt":[` + strings.Join(ids, sep) + `]}`
	}
	want := keysOf(t, openai.Completions, body(",", ids))
	if got := keysOf(t, openai.Completions, body(" ,\n ", ids)); len(want) < 5 || !slices.Equal(got, want) {
		t.Errorf("white space changes the keys of token ids: %d of %d shared", common(got, want), len(want))
	}
	if n := common(keysOf(t, openai.Completions, body(",", ids[:400])), want); n < 6 {
		t.Errorf("a prompt that another one extends shares %d keys with it", n)
	}
	text := keysOf(t, openai.Completions, `{"model":"m","prompt":`+strconv.Quote(long)+`}`)
	if n := common(text, keysOf(t, openai.Completions, `{"model":"m","prompt":`+strconv.Quote(long+other)+`}`)); n < len(text)-1 {
		t.Errorf("of a text prompt %d of %d keys are kept", n, len(text))
	}
}

func TestPiecesDoNotChangeKeys(t *testing.T) {
	whole := []byte(long + other)
	var h Hasher
	h.Start("m", "")
	h.Text(whole)
	keys, total := h.Keys()
	want := slices.Clone(keys)
	rnd := rand.New(rand.NewPCG(1, 1))
	for range 50 {
		h.Start("m", "")
		for rest := whole; len(rest) > 0; {
			n := min(rnd.IntN(700), len(rest))
			h.Text(rest[:n])
			rest = rest[n:]
		}
		got, n := h.Keys()
		if n != total || !slices.Equal(got, want) {
			t.Fatalf("%d keys of %d bytes, want %d of %d", len(got), n, len(want), total)
		}
	}
}

func TestHashingAllocatesNothing(t *testing.T) {
	body := []byte(chat(message("system", long), message("user", other)))
	r, err := openai.Chat.Inspect("application/json", body)
	if err != nil {
		t.Fatal(err)
	}
	var h Hasher
	h.Request(body, r, "m")
	if n := testing.AllocsPerRun(100, func() { h.Request(body, r, "m") }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzRequest: whatever a dialect accepts, hashing ends, is the same twice, and
// a text that goes on never changes the keys of what came before it.
func FuzzRequest(f *testing.F) {
	for _, body := range []string{
		chat(message("system", "a"), message("user", "b")),
		`{"model":"m","tools":[{"a":"]}"}],"messages":[{"content":[{"text":"x"},{"image_url":{"url":"data:,\\\""}}],"tool_calls":[{"a":["b"]}]}]}`,
		`{"messages":[],"model":"m"}`, ` { "tools":[1] , "model":"m","messages":[{"content":""}]} `,
	} {
		f.Add([]byte(body), true)
	}
	f.Add([]byte(`{"model":"m","prompt":[[1,2],[3]]}`), false)
	f.Add([]byte(`{"model":"m","prompt":["a","b",[1,2]],"suffix":"x"}`), false)
	f.Fuzz(func(t *testing.T, body []byte, isChat bool) {
		d := openai.Completions
		if isChat {
			d = openai.Chat
		}
		r, err := d.Inspect("application/json", body)
		if err != nil {
			return
		}
		var h, again Hasher
		keys, total := h.Request(body, r, r.Model)
		keys2, total2 := again.Request(body, r, r.Model)
		if total != total2 || !slices.Equal(keys, keys2) {
			t.Fatal("the same request has two sets of keys")
		}
		if len(keys) != min(total/BlockBytes, BlocksMax) {
			t.Fatalf("%d keys for %d bytes", len(keys), total)
		}
		if total > len(body)+16*len(body)/digestMin+16 {
			t.Fatalf("a canonical prompt of %d bytes from a body of %d", total, len(body))
		}
		if n := len(r.Prompt); n > 0 && !r.Prompt[n-1].Empty() && body[r.Prompt[n-1].Start-1] == '"' {
			at := r.Prompt[n-1].End
			longer := slices.Concat(body[:at], []byte(strings.Repeat("more ", 100)), body[at:])
			r2, err := d.Inspect("application/json", longer)
			if err != nil {
				return // a key written in the same way as the prompt, or a limit
			}
			more, _ := again.Request(longer, r2, r2.Model)
			// The text ends in the block that holds its last byte; the ones before
			// it must stay. What follows the text is at most the rest of the body.
			if keep := len(keys) - (len(body)-at)/BlockBytes - 2; keep > 0 && common(keys, more) < keep {
				t.Fatalf("%d of %d keys are kept when the text goes on, want %d", common(keys, more), len(keys), keep)
			}
		}
	})
}

func BenchmarkHash(b *testing.B) {
	for _, tokens := range []int{1 << 10, 32 << 10, 128 << 10} {
		b.Run(fmt.Sprintf("%dk", tokens>>10), func(b *testing.B) {
			text := strings.Repeat(long, 4*tokens/len(long)+1)[:4*tokens]
			body := []byte(chat(message("system", text), message("user", "hello")))
			r, err := openai.Chat.Inspect("application/json", body)
			if err != nil {
				b.Fatal(err)
			}
			var h Hasher
			b.ReportAllocs()
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				h.Request(body, r, "m")
			}
		})
	}
}
