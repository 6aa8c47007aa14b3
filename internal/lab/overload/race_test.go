// SPDX-License-Identifier: Apache-2.0

//go:build race

package overload

// racing: the package has no goroutines, so the detector has nothing to find in
// the long runs and makes them ten times as long.
const racing = true
