// SPDX-License-Identifier: Apache-2.0

// Command headgate is the inference gateway and its tools, with the plugins of
// plugins/standard.
package main

import "github.com/headgate/headgate"

func main() { headgate.Main(nil) }
