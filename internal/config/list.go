// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"reflect"
)

// ParseEndpoints reads and checks the content of a file with a list of engines,
// in YAML or JSON, as strictly as Parse does. The name stands in messages.
// Content without a list is a problem, so that a file cut short is not taken
// for an empty one; [] is a list.
func ParseEndpoints(name string, data []byte) ([]Endpoint, error) {
	if json.Valid(data) {
		// Tabs in JSON are white space, and in YAML often an error.
		data = bytes.ReplaceAll(data, []byte("\t"), []byte(" "))
	}
	root, problems := document(name, data)
	if len(problems) > 0 {
		return nil, problems
	}
	if root == nil || isNull(root) {
		return nil, Problems{{File: name, Line: 1, Message: "the file is empty: write [] for no engines"}}
	}
	list := []Endpoint{}
	d := newDecoder(name)
	d.decode(root, root, field{}, reflect.ValueOf(&list).Elem())
	if d.nodes <= nodesMax {
		k := &checker{}
		k.endpoints("", "", list)
		d.addChecks(k.problems)
	}
	if err := d.problems.sorted().err(); err != nil {
		return nil, err
	}
	return list, nil
}
