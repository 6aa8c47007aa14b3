// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"io"
	"mime"
	"mime/multipart"
	"strings"
	"testing"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/dialecttest"
)

const formType = "multipart/form-data; boundary=b"

// form writes fields as clients do; name=value, and file for a file.
func form(fields ...string) string {
	var b strings.Builder
	for _, f := range fields {
		name, value, _ := strings.Cut(f, "=")
		b.WriteString("--b\r\nContent-Disposition: form-data; name=\"" + name + "\"")
		if name == "file" {
			b.WriteString("; filename=\"a b;c.wav\"\r\nContent-Type: audio/wav")
		}
		b.WriteString("\r\n\r\n" + value + "\r\n")
	}
	return b.String() + "--b--\r\n"
}

func TestForm(t *testing.T) {
	sound := "\x00\xff\r\n--\r\n--a\r\n\r\n"
	body := form("file="+sound, "model=org/base:7b", "stream=True", "response_format=verbose_json", "timestamp_granularities[]=word", "timestamp_granularities[]=segment")
	r, err := Transcriptions.Inspect(formType, []byte(body))
	if err != nil || r.Model != "org/base:7b" || !r.Stream || r.ResponseFormat != "verbose_json" || r.Opaque {
		t.Fatalf("%+v, %v", r, err)
	}
	edits := Transcriptions.RequestEdits(r, []byte(body), "engine/name", true)
	if got, want := edited(body, edits), strings.Replace(body, "org/base:7b", "engine/name", 1); got != want {
		t.Errorf("%q\nwant %q", got, want)
	}
	for format, opaque := range map[string]bool{"json": false, "diarized_json": false, "text": true, "srt": true, "vtt": true} {
		r, err := Transcriptions.Inspect(formType, []byte(form("model=m", "response_format="+format)))
		if err != nil || r.Opaque != opaque {
			t.Errorf("%s: %+v, %v", format, r, err)
		}
	}
}

func TestFormsThatAreRefused(t *testing.T) {
	good := form("model=m", "file=x")
	for name, body := range map[string]string{
		"empty":              "",
		"no boundary":        "hello",
		"preamble":           "preamble\r\n" + good,
		"epilogue":           good + "more",
		"cut in the file":    good[:len(good)-10],
		"cut before the end": good[:len(good)-4],
		"no parts end":       "--b",
		"LF only":            strings.ReplaceAll(good, "\r\n", "\n"),
		"boundary goes on":   strings.Replace(good, "\r\n--b\r\n", "\r\n--bc\r\n--b\r\n", 1),
		"padded boundary":    strings.Replace(good, "\r\n--b\r\n", "\r\n--b \r\n", 1),
		"no empty line":      "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n--b--\r\n",
		"no name":            strings.Replace(good, `; name="model"`, "", 1),
		"two names":          strings.Replace(good, `; name="model"`, `; name="model"; name="x"`, 1),
		"encoded name":       strings.Replace(good, `; name="model"`, `; name*=utf-8''model`, 1),
		"two dispositions":   strings.Replace(good, "Content-Disposition", "Content-Disposition: form-data; name=\"x\"\r\nContent-Disposition", 1),
		"folded":             strings.Replace(good, "; name=", ";\r\n name=", 1),
		"space before colon": strings.Replace(good, "Content-Disposition:", "Content-Disposition :", 1),
		"encoded":            strings.Replace(good, "\r\n\r\n", "\r\nContent-Transfer-Encoding: base64\r\n\r\n", 1),
		"two models":         form("model=m", "file=x", "model=n"),
		"odd stream":         form("model=m", "stream=2"),
		"model too long":     form("model=" + strings.Repeat("m", 5000)),
		"model not text":     form("model=\xff"),
		"too many parts":     form(strings.Split(strings.Repeat("a=b,", 300), ",")...),
		"huge header":        strings.Replace(good, "; name=", "; x="+strings.Repeat("y", 9000)+"; name=", 1),
	} {
		if r, err := Transcriptions.Inspect(formType, []byte(body)); inference.AsError(err).Code != inference.InvalidRequest {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
	for name, body := range map[string]string{"none": form("file=x"), "empty": form("model="), "a file": strings.Replace(good, `name="model"`, `name="model"; filename="m"`, 1), "other case": form("Model=m")} {
		if _, err := Transcriptions.Inspect(formType, []byte(body)); inference.AsError(err).Code != inference.MissingModel {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestContentTypes(t *testing.T) {
	for contentType, ok := range map[string]bool{
		"multipart/form-data; boundary=b": true, `Multipart/Form-Data; charset=utf-8; boundary="b c"`: true,
		"multipart/form-data": false, "multipart/form-data; boundary=": false, "multipart/mixed; boundary=b": false,
		"application/json": false, "": false, "multipart/form-data; boundary=b; boundary=c": false,
	} {
		if err := Transcriptions.CheckType(contentType); (err == nil) != ok {
			t.Errorf("form %q: %v", contentType, err)
		}
	}
	for contentType, ok := range map[string]bool{
		"": true, "application/json": true, "application/json; charset=utf-8": true, "application/vnd.x+json": true,
		"text/plain": false, formType: false, "application/x-www-form-urlencoded": false, ";": false,
	} {
		for _, d := range []dialect.Dialect{Chat, Responses, Embeddings, Speech} {
			if err := d.CheckType(contentType); (err == nil) != ok {
				t.Errorf("JSON %q: %v", contentType, err)
			} else if err != nil && inference.AsError(err).Code != inference.UnsupportedMediaType {
				t.Error(err)
			}
		}
	}
}

// The form reader accepts fewer bodies than mime/multipart and never finds other
// fields in them.
func FuzzForm(f *testing.F) {
	for _, seed := range recorded(f, "testdata/*/request.form") {
		f.Add([]byte(strings.ReplaceAll(seed, "X-BOUNDARY-1", "b")))
	}
	f.Add([]byte(form("model=m", "file=\r\n--\r\n", "stream=1")))
	f.Add([]byte("--b\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n\r\n--b--"))
	f.Fuzz(func(t *testing.T, body []byte) {
		found, wrong := fields(formType, body)
		if wrong != "" {
			return
		}
		reader := multipart.NewReader(bytes.NewReader(body), "b")
		for {
			part, err := reader.NextRawPart()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("mime/multipart: %v", err)
			}
			value, err := io.ReadAll(part)
			if err != nil {
				t.Fatalf("mime/multipart: %v", err)
			}
			_, params, _ := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
			if _, file := params["filename"]; file {
				continue
			}
			if len(found) == 0 || found[0].name != part.FormName() || string(found[0].Of(body)) != string(value) {
				t.Fatalf("%+v, mime/multipart has %q = %q", found, part.FormName(), value)
			}
			found = found[1:]
		}
		if len(found) > 0 {
			t.Fatalf("%+v are no parts to mime/multipart", found)
		}
	})
}

func FuzzTranscriptionStream(f *testing.F) {
	dialecttest.FuzzStream(f, Transcriptions, &dialect.Request{}, recorded(f, "testdata/*transcription*/answer.sse")...)
}
