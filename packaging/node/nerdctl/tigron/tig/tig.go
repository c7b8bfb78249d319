// Package tig stands in for nerdctl's own test module, which has no published version: nerdctl's go.mod
// replaces it by a folder that its module archive leaves out. nerdctl's program links one test helper, and
// that names one type of it, which nothing ever calls.
package tig

import "testing"

// T is what that helper expects of a test.
type T = testing.TB
