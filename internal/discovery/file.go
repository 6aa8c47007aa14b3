// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"fmt"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/filewatch"
)

// fileSource finds what a file lists.
type fileSource struct{ path string }

func (s fileSource) Run(ctx context.Context, report func(Report)) {
	filewatch.Watcher{Path: s.path}.Run(ctx, func(data []byte, err error) {
		if err != nil {
			report(Report{Err: err})
			return
		}
		list, err := config.ParseEndpoints(s.path, data)
		if err != nil {
			report(Report{Err: first(err)})
			return
		}
		all := make([]Found, len(list))
		for i, e := range list {
			all[i] = found(e)
		}
		report(Report{Endpoints: all})
	})
}

// first is the first problem of several: a file that is no list at all has one
// on each line.
func first(err error) error {
	var problems config.Problems
	if errors.As(err, &problems) && len(problems) > 1 {
		return fmt.Errorf("%s (and %d more)", problems[0], len(problems)-1)
	}
	return err
}
