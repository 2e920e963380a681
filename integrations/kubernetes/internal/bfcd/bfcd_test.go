// SPDX-License-Identifier: Apache-2.0

package bfcd_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"

	"bfcd/integrations/kubernetes/internal/bfcd"
	"bfcd/integrations/kubernetes/internal/rig"
)

func lease(name string, limit uint64) *bfcd.Lease {
	return &bfcd.Lease{Name: name, Tenant: "vision", Partition: "Train_1", Socket: name, Limit: limit}
}

func TestStateHasDevicesPartitionsAndQuotas(t *testing.T) {
	state, err := rig.Start(t, false).Session().State()
	rig.Must(t, err)
	if len(state.Devices) != 1 || state.Devices[0].State != "ok" || len(state.Partitions) != 3 || len(state.Tenants) != 5 {
		t.Fatalf("state is %v", state)
	}
}

func TestEnsureMakesALeaseOnce(t *testing.T) {
	s := rig.Start(t, false).Session()
	for range 2 {
		rig.Must(t, s.Ensure(lease("job", 4<<20)))
	}
	rows, err := s.Leases("jo")
	rig.Must(t, err)
	if len(rows) != 1 || rows[0].MatchKind != "socket" || rows[0].Match != "job" || rows[0].GetStats().GetBytesLimit() != 4<<20 {
		t.Fatalf("leases are %v", rows)
	}
	if err := s.Ensure(lease("job", 6<<20)); !errors.Is(err, syscall.EEXIST) {
		t.Fatalf("another lease of that name: %v", err)
	}
	for range 2 {
		rig.Must(t, s.End("job"))
	}
	if rows, err := s.Leases(""); err != nil || len(rows) != 0 {
		t.Fatalf("leases are %v, %v", rows, err)
	}
}

func TestARefusalHasItsSentence(t *testing.T) {
	err := rig.Start(t, false).Session().Ensure(lease("job", 1<<40))
	var refusal *bfcd.Refusal
	if !errors.As(err, &refusal) || refusal.Errno != syscall.EINVAL ||
		!strings.Contains(refusal.Message, "is more than the limit of tenant 'vision'") {
		t.Fatalf("error is %v", err)
	}
}

func TestListsHaveAllPages(t *testing.T) {
	const n = 90
	s := rig.Start(t, false).Session()
	for i := range n {
		rig.Must(t, s.Ensure(lease(fmt.Sprintf("job-%d", i), 2<<20)))
	}
	rows, err := s.Leases("job-")
	rig.Must(t, err)
	names := map[string]bool{}
	for _, row := range rows {
		names[row.Name] = true
	}
	if len(rows) != n || len(names) != n {
		t.Fatalf("%d leases, %d names", len(rows), len(names))
	}
}

// What answers at the path is not trusted.
func TestBadAnswersAreErrors(t *testing.T) {
	for name, c := range map[string]struct{ answer, sentence string }{
		"nothing":        {"", "closed the connection"},
		"no bytes":       {"\x00\x00\x00\x00", "a frame of 0 bytes"},
		"too many bytes": {"\x01\x00\x01\x00", "a frame of 65537 bytes"},
		"half a frame":   {"\x08\x00\x00\x00\x08", "closed the connection"},
		"no message":     {"\x02\x00\x00\x00\xff\xff", "no reply"},
		"another id":     {"\x02\x00\x00\x00\x08\x63", "request 99 instead of 1"},
		"a refusal":      {"\x0c\x00\x00\x00\x08\x01\x12\x08\x08\x0d\x12\x04why!", "why!"},
	} {
		t.Run(name, func(t *testing.T) {
			path := t.TempDir() + "/s"
			listener, err := net.Listen("unix", path)
			rig.Must(t, err)
			defer listener.Close()
			go func() {
				conn, err := listener.Accept()
				if err == nil {
					var request [4]byte
					_, _ = io.ReadFull(conn, request[:])
					_, _ = conn.Write([]byte(c.answer))
					_ = conn.(*net.UnixConn).CloseWrite()
					_, _ = io.Copy(io.Discard, conn)
					_ = conn.Close()
				}
			}()
			_, err = bfcd.Open(context.Background(), path)
			if err == nil || !strings.Contains(err.Error(), c.sentence) {
				t.Fatalf("error is %v", err)
			}
		})
	}
}
