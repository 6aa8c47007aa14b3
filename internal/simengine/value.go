// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"bytes"
	"fmt"
	"mime"
	"mime/multipart"
	"net/http"
	"slices"
	"strings"

	"github.com/tidwall/gjson"
)

// valuePaths are the endpoints that answer with one value and generate nothing.
// The model has no part in them: they cost no time and no slot.
var valuePaths = []string{
	"/v1/embeddings", "/v1/rerank", "/v1/score", "/tokenize", "/detokenize", "/v1/messages/count_tokens",
	"/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations",
}

// value answers one of them. Its body names the engine and the attempt, so that
// it shows who answered.
func (x *exchange) value(path string) error {
	name, text, err := x.valueRequest(path)
	if err != nil {
		return x.refuse(http.StatusBadRequest, "BadRequestError", err.Error())
	}
	cfg := x.l.e.cfg
	switch {
	case name == "":
		name = cfg.Models[0]
	case !slices.Contains(cfg.Models, name) && !slices.Contains(cfg.Adapters, name):
		return x.refuse(http.StatusNotFound, "NotFoundError", unknownModel(name).Error())
	}
	who := fmt.Sprintf("%s%d", cfg.Name, x.attempt)
	contentType := "application/json"
	var body string
	words := len(strings.Fields(text))
	switch path {
	case "/v1/audio/speech":
		contentType, body = "audio/wav", "RIFF\x00\xff"+who+strings.Repeat("\x00\x01", 64)
	case "/v1/audio/transcriptions", "/v1/audio/translations":
		body = fmt.Sprintf(`{"text":"%s"}`, who)
	case "/v1/messages/count_tokens":
		body = fmt.Sprintf(`{"input_tokens":%d}`, words)
	case "/tokenize":
		body = fmt.Sprintf(`{"count":1,"max_model_len":%d,"tokens":[1]}`, x.l.capacity())
	case "/detokenize":
		body = fmt.Sprintf(`{"prompt":"%s"}`, who)
	default:
		body = fmt.Sprintf(`{"id":"%s","object":"list","model":%s,"data":[{"object":"embedding","index":0,"embedding":[0.5]}],"results":[{"index":0,"relevance_score":0.5}],"usage":{"prompt_tokens":%d,"total_tokens":%d}}`,
			who, quote(name), words, words)
	}
	return x.sendValue(contentType, body)
}

func (x *exchange) sendValue(contentType, body string) error {
	a := &answer{exchange: x}
	if err := a.begin(contentType, len(body)); err != nil {
		return err
	}
	if f, ok := x.script.whole("shortbody"); ok {
		x.record(Entry{Event: EventFault, Detail: f.String()})
		if err := a.put([]byte(body[:max(0, len(body)-f.number(0, 10))])); err != nil {
			return err
		}
		return a.end(Fault{Kind: "fin"})
	}
	if err := a.sendCut([]byte(body), x.script.bodyCuts(len(body))); err != nil {
		return err
	}
	if err := a.reach(Point{Name: "done"}); err != nil {
		return err
	}
	x.record(Entry{Event: EventFinished})
	return a.early()
}

// valueRequest reads the model's name and what is there to be counted.
func (x *exchange) valueRequest(path string) (model, text string, err error) {
	if path != "/v1/audio/transcriptions" && path != "/v1/audio/translations" {
		if !gjson.ValidBytes(x.body) {
			return "", "", fmt.Errorf("the body is not valid JSON")
		}
		return gjson.GetBytes(x.body, "model").String(), string(x.body), nil
	}
	_, params, err := mime.ParseMediaType(x.req.Header.Get("Content-Type"))
	if err != nil {
		return "", "", err
	}
	form, err := multipart.NewReader(bytes.NewReader(x.body), params["boundary"]).ReadForm(1 << 26)
	if err != nil {
		return "", "", err
	}
	defer func() { _ = form.RemoveAll() }()
	if len(form.File["file"]) != 1 || len(form.Value["model"]) != 1 {
		return "", "", fmt.Errorf("one file and one model are needed")
	}
	return form.Value["model"][0], "", nil
}
