// SPDX-License-Identifier: Apache-2.0

//go:build !mutate

package gateway

import "github.com/headgate/headgate/internal/attempt"

// gateless is the mutation no_gate; see mutate_on.go.
const gateless = false

func (*flight) leak() attempt.Event { return nil }
