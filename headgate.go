// SPDX-License-Identifier: Apache-2.0

// Package headgate is the headgate program as a function, so that a build with
// plugins of its own is a main of ten lines:
//
//	package main
//
//	import (
//		"github.com/headgate/headgate"
//		"github.com/headgate/headgate/plugin"
//
//		"example.com/mine"
//	)
//
//	func main() { headgate.Main(map[string]plugin.Factory{"mine": mine.New}) }
//
// It owns what a process has once: its arguments, its signals and its exit. What
// plugins are given and may answer is in package plugin; everything else is
// internal.
package headgate

import (
	"context"
	"maps"
	"os"
	"os/signal"
	"syscall"

	"github.com/headgate/headgate/internal/command"
	"github.com/headgate/headgate/plugin"
	"github.com/headgate/headgate/plugins/standard"
)

// Main runs the program and does not return. plugins are added to those of
// plugins/standard, by the names that a configuration uses; one of the same name
// takes the place of theirs.
func Main(plugins map[string]plugin.Factory) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	known := maps.Clone(standard.Plugins)
	maps.Copy(known, plugins)
	os.Exit(command.Run(ctx, known, os.Args[1:], os.Stderr))
}
