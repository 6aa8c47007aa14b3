// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"reflect"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt"
)

// events and effects are all there are, by name.
var (
	events = named[attempt.Event](
		attempt.Queued{}, attempt.Placed{}, attempt.Unplaced{}, attempt.FirstOutput{}, attempt.Answered{}, attempt.Delivered{},
		attempt.WriteFailed{}, attempt.CommitLost{}, attempt.ClientGone{}, attempt.Stopped{}, attempt.RetryAnswer{},
		attempt.CancelAck{}, attempt.LeaseExpired{}, attempt.Broken{}, attempt.Evidence{},
	)
	effects = named[attempt.Effect](
		attempt.Dispatch{}, attempt.Resend{}, attempt.Commit{}, attempt.Complete{}, attempt.CloseGate{}, attempt.Cancel{},
		attempt.Revoke{}, attempt.Silent{}, attempt.Report{}, attempt.AskRetry{}, attempt.Requeue{}, attempt.Respond{},
		attempt.PassThrough{}, attempt.EndStream{}, attempt.Abort{}, attempt.Finish{},
	)
)

func named[T any](all ...T) map[string]reflect.Type {
	types := map[string]reflect.Type{}
	for _, v := range all {
		types[nameOf(v)] = reflect.TypeOf(v)
	}
	return types
}

func nameOf(v any) string { return reflect.TypeOf(v).Name() }

// made makes the event or effect of a name.
func made[T any](name string, types map[string]reflect.Type, with map[string]any) (v T, err error) {
	t := types[name]
	if t == nil {
		return v, fmt.Errorf("%s is neither an event nor an effect", name)
	}
	p := reflect.New(t)
	if err := fill(p.Interface(), with); err != nil {
		return v, fmt.Errorf("%s: %w", name, err)
	}
	return p.Elem().Interface().(T), nil
}

// fields are the fields of a struct that are not zero, by name.
func fields(v any) map[string]any {
	s := reflect.Indirect(reflect.ValueOf(v))
	with := map[string]any{}
	for i := range s.NumField() {
		if f := s.Field(i); !f.IsZero() {
			with[s.Type().Field(i).Name] = plain(f)
		}
	}
	return with
}

// plain is a field as JSON can hold it. Enumerations and durations are written
// in words; an error's reason, which only the log has, is left out.
func plain(f reflect.Value) any {
	switch v := f.Interface().(type) {
	case *inference.Error:
		e := *v
		e.Err = nil
		return fields(e)
	case fmt.Stringer:
		return v.String()
	}
	if f.Kind() == reflect.Struct {
		return fields(f.Interface())
	}
	return f.Interface()
}

// fill is the reverse of fields.
func fill(p any, with map[string]any) error {
	s := reflect.ValueOf(p).Elem()
	for name, v := range with {
		f := s.FieldByName(name)
		if !f.IsValid() {
			return fmt.Errorf("there is no field %s", name)
		}
		if err := set(f, v); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func set(f reflect.Value, v any) error {
	wrong := fmt.Errorf("%v is not a value of %s", v, f.Type())
	switch v := v.(type) {
	case map[string]any:
		if f.Kind() == reflect.Pointer {
			f.Set(reflect.New(f.Type().Elem()))
			f = f.Elem()
		}
		if f.Kind() != reflect.Struct {
			return wrong
		}
		return fill(f.Addr().Interface(), v)
	case []any:
		if f.Kind() != reflect.Slice {
			return wrong
		}
		f.Set(reflect.MakeSlice(f.Type(), len(v), len(v)))
		for i := range v {
			if err := set(f.Index(i), v[i]); err != nil {
				return err
			}
		}
	case bool:
		if f.Kind() != reflect.Bool {
			return wrong
		}
		f.SetBool(v)
	case float64:
		if !f.CanInt() {
			return wrong
		}
		f.SetInt(int64(v))
	case string:
		return setWord(f, v, wrong)
	default:
		return wrong
	}
	return nil
}

func setWord(f reflect.Value, word string, wrong error) error {
	switch {
	case f.Type() == reflect.TypeFor[time.Duration]():
		d, err := time.ParseDuration(word)
		f.SetInt(int64(d))
		return err
	case f.Kind() == reflect.String:
		f.SetString(word)
		return nil
	case f.Kind() != reflect.Uint8:
		return wrong
	}
	for i := range uint64(256) {
		f.SetUint(i)
		if s, ok := reflect.TypeAssert[fmt.Stringer](f); ok && s.String() == word {
			return nil
		}
	}
	return wrong
}
