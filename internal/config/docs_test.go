// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"encoding"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/headgate/headgate/internal/config"
)

// docs/config.md is written from the comments in config.go and the defaults in
// defaults.go: go test ./internal/config -update
func TestReferenceIsCurrent(t *testing.T) {
	const page = "../../docs/config.md"
	w := reference{comments: comments(t)}
	want := w.page(t)
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("run go test ./internal/config -update (-want +got):\n%s", diff)
	}
	if w.missing != "" {
		t.Errorf("fields without comment:%s", w.missing)
	}
}

// A reference writes the page.
type reference struct {
	comments map[string]string // by Type or Type.Field
	missing  string
	b        strings.Builder
}

const preface = `# headgate.yaml

<!-- Written by go test ./internal/config -update from the comments in internal/config/config.go. -->

Every field, with its default. Every field may be left out, and a key without a value keeps its default. A field, a unit or a value that is not on this page is an error; ` + "`headgate check`" + ` shows all of them at once, with their places.

- A **duration** has its unit: ` + "`250ms`, `60s`, `10m`, `1h30m`" + `.
- A **size** is ` + "`512KiB`, `64MiB`, `10MB`" + ` or bare bytes.
- An **address** is ` + "`host:port`, `[::1]:8080` or `:8080`" + `.
- Aliases and merge keys (` + "`<<: *name`" + `) work; one file holds one document of at most 4 MiB.
- Secrets are never printed, and a file name is relative to the folder of the configuration file.
`

func (w *reference) page(t *testing.T) string {
	t.Helper()
	with, err := config.Parse("x.yaml", []byte(`
routes: [{backends: [{pool: x}]}]
keys: [{id: x, secret_sha256: "`+config.NewDigest("x").Hex()+`"}]
objectives: {x: {}}
pools: {x: {discovery: {static: [{url: "http://x:1"}]}, flow: {bands: [{}]}, routing: {plugins: [{plugin: x}], fallbacks: [{plugins: [{plugin: x}]}]}}}`))
	if err != nil {
		t.Fatal(err)
	}
	with.Gateway.ID = ""
	w.b.WriteString(preface)
	w.block("", reflect.ValueOf(*with))
	return w.b.String()
}

// block writes a struct's own fields, then the blocks in it.
func (w *reference) block(path string, v reflect.Value) {
	title := "Top level"
	if path != "" {
		title = "`" + path + "`"
	}
	fmt.Fprintf(&w.b, "\n## %s\n\n%s\n\n| field | holds | default | meaning |\n|---|---|---|---|\n", title, w.comment(v.Type().Name()))
	type inner struct {
		path string
		v    reflect.Value
	}
	var blocks []inner
	for i := range v.NumField() {
		f, fv := v.Type().Field(i), v.Field(i)
		name := f.Tag.Get("yaml")
		at := strings.TrimPrefix(path+"."+name, ".")
		holds, def := holds(f.Type), ""
		switch {
		case fv.Kind() == reflect.Slice && f.Type.Elem().Kind() == reflect.Struct:
			blocks = append(blocks, inner{at + "[]", fv.Index(0)})
		case fv.Kind() == reflect.Map && f.Type.Elem().Kind() == reflect.Struct:
			blocks = append(blocks, inner{at + ".NAME", fv.MapIndex(fv.MapKeys()[0])})
		case fv.Kind() == reflect.Struct && !isText(fv):
			blocks = append(blocks, inner{at, fv})
		default:
			def = value(name, fv)
			if at == "keys[].id" {
				def = "required"
			}
		}
		fmt.Fprintf(&w.b, "| `%s` | %s | %s | %s |\n", name, holds, def, w.comment(v.Type().Name()+"."+f.Name))
	}
	for _, b := range blocks {
		w.block(b.path, b.v)
	}
}

func (w *reference) comment(name string) string {
	text := w.comments[name]
	if text == "" {
		w.missing += " " + name
	}
	return strings.ReplaceAll(text, "|", `\|`)
}

func isText(v reflect.Value) bool {
	_, ok := reflect.TypeAssert[encoding.TextMarshaler](v)
	return ok
}

func holds(t reflect.Type) string {
	switch t {
	case reflect.TypeFor[config.Secret]():
		return "text, secret"
	case reflect.TypeFor[config.Digest]():
		return "64 hexadecimal digits"
	case reflect.TypeFor[config.URL](), reflect.TypeFor[config.HookURL]():
		return "URL"
	case reflect.TypeFor[config.File]():
		return "file name"
	case reflect.TypeFor[config.Options]():
		return "block"
	case reflect.TypeFor[config.Duration](), reflect.TypeFor[config.Size](), reflect.TypeFor[config.Address](), reflect.TypeFor[config.Ratio]():
		return strings.ToLower(t.Name())
	}
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Float64:
		return "number"
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Struct {
			return "list of blocks"
		}
		return "list of texts"
	case reflect.Map:
		if t.Elem().Kind() == reflect.Struct {
			return "named blocks"
		}
		return "named texts"
	case reflect.Struct:
		return "block"
	}
	return "text"
}

// value shows a default; where it is none or depends, the comment says so.
func value(name string, v reflect.Value) string {
	if slices.Contains([]string{"pool", "url", "secret_sha256", "plugin"}, name) {
		return "required"
	}
	if v.IsZero() && (v.Kind() == reflect.String || v.Kind() == reflect.Slice || v.Kind() == reflect.Map || v.Kind() == reflect.Struct || name == "max_body" || name == "port") {
		return ""
	}
	if v.Kind() == reflect.Slice {
		return fmt.Sprintf("`[%s]`", strings.Join(v.Interface().([]string), ", "))
	}
	return fmt.Sprintf("`%v`", v.Interface())
}

// comments reads what config.go says about its types and their fields.
func comments(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "config.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, decl := range file.Decls {
		gen, ok := decl.(*ast.GenDecl)
		if !ok || gen.Tok != token.TYPE {
			continue
		}
		spec := gen.Specs[0].(*ast.TypeSpec)
		all[spec.Name.Name] = oneLine(gen.Doc)
		for _, f := range spec.Type.(*ast.StructType).Fields.List {
			all[spec.Name.Name+"."+f.Names[0].Name] = oneLine(f.Doc)
		}
	}
	return all
}

func oneLine(doc *ast.CommentGroup) string {
	return strings.Join(strings.Fields(doc.Text()), " ")
}
