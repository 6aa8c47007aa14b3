// SPDX-License-Identifier: Apache-2.0

package plugin

// Factory makes a plugin from its options. What it returns implements Filter,
// Scorer, Picker or several of them.
type Factory func(o Options) (any, error)

// Options decodes a plugin's part of the configuration into a struct with json
// tags. A field that the struct does not have is an error.
type Options func(into any) error

// None are the options of a plugin that was given none.
func None(any) error { return nil }
