// Package bfcd asks bfcd over its lease socket (docs/protocol.md).
//
// SPDX-License-Identifier: Apache-2.0
package bfcd

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	"bfcd/integrations/kubernetes/internal/wire"
)

const (
	protocolVersion = 1
	maxFrame        = 65536
	timeout         = 20 * time.Second // of a whole session: the kubelet waits for 45 s
)

// Granularity of limits, in bytes.
const Granularity = 2 << 20

// Refusal is bfcd's answer to a request that it does not serve.
type Refusal struct {
	Errno   syscall.Errno
	Message string
}

func (r *Refusal) Error() string { return r.Message }

// Is makes errors.Is(err, syscall.ENOENT) true for a refusal with ENOENT.
func (r *Refusal) Is(target error) bool { return target == r.Errno }

// Session is one connection. A session is short, so a restart of bfcd ends none that waits.
type Session struct {
	Hello *wire.HelloReply
	conn  net.Conn
	in    *bufio.Reader
	id    uint64
}

// Open begins a session without memory.
func Open(ctx context.Context, path string) (*Session, error) {
	return Join(ctx, path, &wire.Hello{NoMemory: true})
}

// Join connects and says this hello.
func Join(ctx context.Context, path string, hello *wire.Hello) (*Session, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("cannot reach bfcd: %w", err)
	}
	deadline := time.Now().Add(timeout)
	if at, ok := ctx.Deadline(); ok && at.Before(deadline) {
		deadline = at
	}
	s := &Session{conn: conn, in: bufio.NewReader(conn)}
	_ = conn.SetDeadline(deadline)
	hello.Version, hello.Name = protocolVersion, "bfcd-dra"
	reply, err := s.call(&wire.Request{Body: &wire.Request_Hello{Hello: hello}})
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("hello at %s: %w", path, err)
	}
	s.Hello = reply.GetHello()
	return s, nil
}

// Close ends the session. Without a goodbye it would last until the process ends.
func (s *Session) Close() {
	_, _ = s.call(&wire.Request{Body: &wire.Request_Goodbye{Goodbye: &wire.Goodbye{}}})
	_ = s.conn.Close()
}

func (s *Session) call(request *wire.Request) (*wire.Reply, error) {
	s.id++
	request.Id = s.id
	payload, err := proto.Marshal(request)
	if err != nil {
		return nil, err
	}
	if len(payload) == 0 || len(payload) > maxFrame {
		return nil, fmt.Errorf("a request of %d bytes does not fit into a frame", len(payload))
	}
	frame := binary.LittleEndian.AppendUint32(nil, uint32(len(payload)))
	if _, err := s.conn.Write(append(frame, payload...)); err != nil {
		return nil, fmt.Errorf("bfcd closed the connection: %w", err)
	}
	reply, err := s.read()
	if err != nil {
		return nil, err
	}
	if refusal := reply.GetRefusal(); refusal != nil {
		return nil, &Refusal{syscall.Errno(refusal.Error), refusal.Message}
	}
	if reply.Id != s.id {
		return nil, fmt.Errorf("bfcd answered request %d instead of %d", reply.Id, s.id)
	}
	return reply, nil
}

func (s *Session) read() (*wire.Reply, error) {
	var length [4]byte
	if _, err := io.ReadFull(s.in, length[:]); err != nil {
		return nil, fmt.Errorf("bfcd closed the connection: %w", err)
	}
	n := binary.LittleEndian.Uint32(length[:])
	if n == 0 || n > maxFrame {
		return nil, fmt.Errorf("bfcd sent a frame of %d bytes", n)
	}
	payload := make([]byte, n)
	if _, err := io.ReadFull(s.in, payload); err != nil {
		return nil, fmt.Errorf("bfcd closed the connection: %w", err)
	}
	reply := &wire.Reply{}
	if err := proto.Unmarshal(payload, reply); err != nil {
		return nil, fmt.Errorf("bfcd sent a frame that is no reply: %w", err)
	}
	return reply, nil
}

// list reads all pages.
func (s *Session) list(kind wire.List_Kind, add func(*wire.ListReply)) error {
	for cursor := uint64(0); ; {
		reply, err := s.call(&wire.Request{Body: &wire.Request_List{List: &wire.List{Kind: kind, Cursor: cursor}}})
		if err != nil {
			return err
		}
		page := reply.GetList()
		if page == nil {
			return errors.New("bfcd answered a list with something else")
		}
		add(page)
		if page.NextCursor == 0 {
			return nil
		}
		if page.NextCursor <= cursor {
			return errors.New("bfcd answered a list with a page that it had sent before")
		}
		cursor = page.NextCursor
	}
}

// State is what bfcd has: devices, their partitions, and the quotas of tenants there.
type State struct {
	Devices    []*wire.DeviceRow
	Partitions []*wire.PartitionRow
	Tenants    []*wire.TenantRow
}

// State asks for all of it.
func (s *Session) State() (*State, error) {
	state := &State{}
	err := s.list(wire.List_STATUS, func(page *wire.ListReply) {
		state.Devices = append(state.Devices, page.GetStatus().GetDevices()...)
	})
	if err == nil {
		err = s.list(wire.List_PARTITIONS, func(page *wire.ListReply) {
			state.Partitions = append(state.Partitions, page.Partitions...)
		})
	}
	if err == nil {
		err = s.list(wire.List_TENANTS, func(page *wire.ListReply) {
			state.Tenants = append(state.Tenants, page.Tenants...)
		})
	}
	return state, err
}

// Lease is a quota for the processes that connect to a socket of bfcd, within the quota of a tenant in a partition.
type Lease struct {
	Name      string `json:"name"`
	Tenant    string `json:"tenant"`
	Partition string `json:"partition"`
	Socket    string `json:"socket"` // its name: a folder in bfcd's folder of such sockets
	Limit     uint64 `json:"limit"`  // bytes
}

// Leases are those that schedulers made and whose names contain the part, also those that are ending.
func (s *Session) Leases(part string) ([]*wire.LeaseRow, error) {
	var rows []*wire.LeaseRow
	err := s.list(wire.List_LEASES, func(page *wire.ListReply) {
		for _, row := range page.Leases {
			if row.MadeBy == "scheduler" && strings.Contains(row.Name, part) {
				rows = append(rows, row)
			}
		}
	})
	return rows, err
}

// Ensure makes the lease if there is none like it. An error: one of its name differs, or has ended.
func (s *Session) Ensure(l *Lease) error {
	create := &wire.LeaseCreate{Name: l.Name, Tenant: l.Tenant, Partition: l.Partition, BytesLimit: l.Limit,
		Match: &wire.LeaseCreate_Socket{Socket: l.Socket}}
	_, err := s.call(&wire.Request{Body: &wire.Request_LeaseCreate{LeaseCreate: create}})
	if err == nil || !errors.Is(err, syscall.EEXIST) {
		return err
	}
	rows, listErr := s.Leases(l.Name)
	if listErr != nil {
		return listErr
	}
	for _, row := range rows {
		if row.Name == l.Name && row.State == "active" && row.Tenant == l.Tenant && row.Partition == l.Partition &&
			row.MatchKind == "socket" && row.Match == l.Socket && row.GetStats().GetBytesLimit() == l.Limit {
			return nil
		}
	}
	return err
}

// End ends all leases whose names contain the part, and evicts the sessions that are left in them. None: nothing to do.
func (s *Session) End(part string) error {
	rows, err := s.Leases(part)
	if err != nil {
		return err
	}
	for _, row := range rows {
		end := &wire.LeaseEnd{Name: row.Name, Evicts: true}
		_, err := s.call(&wire.Request{Body: &wire.Request_LeaseEnd{LeaseEnd: end}})
		if err != nil && !errors.Is(err, syscall.ENOENT) {
			return err
		}
	}
	return nil
}
