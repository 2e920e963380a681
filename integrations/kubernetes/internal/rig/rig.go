// Package rig runs a real bfcd for tests, with host memory.
//
// SPDX-License-Identifier: Apache-2.0
package rig

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"bfcd/integrations/kubernetes/internal/bfcd"
)

// Limit is how long a test waits for a condition; it never depends on the speed of the machine.
const Limit = 2 * time.Minute

const configuration = `
socket: {path: %[1]s/client/bfcd.sock}
admin_socket: {path: %[1]s/admin.sock}
lease_socket: {path: %[1]s/lease.sock}
devices:
  - id: host
    size: 512MiB
    partitions:
      - {name: Train_1, limit: 256MiB, growth: on-demand}
      - {name: serve, limit: 64MiB, growth: on-demand}
      - {name: fixed, limit: 32MiB, growth: preallocate}
tenants:
  - name: vision
    match: {uid: [%[2]d]}
    quotas: [{partition: Train_1, limit: 192MiB}, {partition: serve, limit: 64MiB}, {partition: fixed, limit: 32MiB}]
  - name: speech
    match: {uid: [%[2]d]}
    quotas: [{partition: Train_1, limit: 96MiB}]
  - name: house
    match: {uid: [%[2]d]}
    quotas: [{partition: Train_1, limit: 64MiB, reserve: 32MiB}]
`

// Rig is a bfcd in a folder of its own.
type Rig struct {
	Folder, Socket string // Socket: the lease socket
	t              *testing.T
	command        *exec.Cmd
	keeps          string
}

// Start runs the program of $BFCD. keeps: what bfcd has outlives it, as in a restart, until the end of the test.
func Start(t *testing.T, keeps bool) *Rig {
	t.Helper()
	program := os.Getenv("BFCD")
	if program == "" {
		t.Skip("BFCD is not set to the program bfcd: use scripts/test-kubernetes")
	}
	folder, err := os.MkdirTemp("/tmp", "bfcd-dra-") // paths of sockets are short
	Must(t, err)
	r := &Rig{Folder: folder, Socket: folder + "/lease.sock", t: t, keeps: "0"}
	if keeps {
		r.keeps = "1"
	}
	Must(t, os.Chmod(folder, 0o755))
	Must(t, os.Mkdir(folder+"/client", 0o755))
	Must(t, os.WriteFile(folder+"/bfcd.yaml", fmt.Appendf(nil, configuration, folder, os.Getuid()), 0o644))
	t.Cleanup(func() {
		r.Kill()
		if log, err := os.ReadFile(folder + "/log"); err == nil && t.Failed() {
			t.Logf("the log of bfcd:\n%s", log)
		}
		Must(t, os.RemoveAll(folder)) // ends keepers
	})
	r.Run()
	return r
}

// Run starts bfcd, and waits until it answers.
func (r *Rig) Run() {
	r.t.Helper()
	log, err := os.OpenFile(filepath.Join(r.Folder, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	Must(r.t, err)
	defer log.Close()
	r.command = exec.Command(os.Getenv("BFCD"), "--config", r.Folder+"/bfcd.yaml")
	r.command.Env = append(os.Environ(), "BFCD_KEEP="+r.keeps)
	r.command.Stderr = log
	Must(r.t, r.command.Start())
	r.Wait("bfcd answers", func() bool {
		s, err := bfcd.Open(context.Background(), r.Socket)
		if err == nil {
			s.Close()
		}
		return err == nil
	})
}

// Kill ends it by SIGKILL.
func (r *Rig) Kill() {
	if r.command != nil {
		_ = r.command.Process.Kill()
		_ = r.command.Wait()
		r.command = nil
	}
}

// Session is open until the test ends.
func (r *Rig) Session() *bfcd.Session {
	r.t.Helper()
	s, err := bfcd.Open(context.Background(), r.Socket)
	Must(r.t, err)
	r.t.Cleanup(s.Close)
	return s
}

// Leases are the names of those that schedulers made.
func (r *Rig) Leases() []string {
	r.t.Helper()
	s, err := bfcd.Open(context.Background(), r.Socket)
	Must(r.t, err)
	defer s.Close()
	rows, err := s.Leases("")
	Must(r.t, err)
	names := []string{}
	for _, row := range rows {
		names = append(names, row.Name)
	}
	return names
}

// Wait waits for a condition.
func (r *Rig) Wait(what string, is func() bool) {
	r.t.Helper()
	for end := time.Now().Add(Limit); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("not in time: %s", what)
		}
	}
}

// Must fails the test on an error.
func Must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
