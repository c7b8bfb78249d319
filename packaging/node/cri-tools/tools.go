//go:build tools

// Package tools keeps in go.mod and go.sum what critest needs: its program is the test of a package.
package tools

import _ "sigs.k8s.io/cri-tools/cmd/critest"
