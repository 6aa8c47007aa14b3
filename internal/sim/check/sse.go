// SPDX-License-Identifier: Apache-2.0

package check

import "bytes"

// An event is what a client of an event stream gets to see of one event.
type event struct {
	name string
	data []byte
}

// splitEvents reads an event stream (WHATWG HTML §9.2.6). rest is what follows
// the last whole event: a client throws it away.
func splitEvents(body []byte) (list []event, rest []byte) {
	body = bytes.TrimPrefix(body, []byte("\ufeff"))
	var ev event
	var has bool
	start := body // of the current event
	for len(body) > 0 {
		at := bytes.IndexAny(body, "\r\n")
		if at < 0 {
			break
		}
		line, next := body[:at], body[at+1:]
		if body[at] == '\r' && len(next) > 0 && next[0] == '\n' {
			next = next[1:]
		}
		body = next
		if len(line) == 0 {
			if has {
				list = append(list, ev)
			}
			ev, has, start = event{}, false, body
			continue
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(name) {
		case "data":
			if has {
				ev.data = append(ev.data, '\n')
			}
			ev.data, has = append(ev.data, value...), true
		case "event":
			ev.name = string(value)
		case "": // a comment
			if !has && ev.name == "" {
				start = body
			}
		}
	}
	return list, start
}
