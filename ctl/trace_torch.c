/* Traces from PyTorch's memory snapshots (torch.cuda.memory._dump_snapshot()), which are pickles of plain data.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * {"segments": [{"device", "blocks": [{"address", "size", "state", "frames"}]}],
 *  "device_traces": [[{"action", "addr", "size", "frames"}]]}
 *
 * The events of a device are in order, and an event's number is its time. A block is live from `alloc` to
 * `free_completed`. The recording has a bounded length, so it may begin late: a block that is freed without
 * having been allocated, or is in the segments at the end only, is live from time 0. Blocks that are in the
 * segments at the end, or were never freed, have no end.
 *
 * An `oom` event is a request that the GPU refused. If no allocation follows, it has ended the job: then it is a
 * buffer that is live for one moment. Else the job did without that memory, and it is left out.
 *
 * One device is read: that with the most events, or without any, that with the most blocks. The tag of a
 * buffer is the innermost frame in a file of Python.
 *
 * A pickle can refer to one list many times in two bytes each. PyTorch does so with frames only: each list of frames is
 * read once, and no more events, segments and blocks are read than the pickle has values. */
#include <errno.h>
#include <inttypes.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/pickle.h"
#include "ctl/trace.h"

#define MAX_BYTES      (UINT64_C(1) << 30) /* of a file */
#define MAX_NAME_BYTES 4096u               /* of a file's name: its end */

/* A block that is live, by address. */
struct live {
        int64_t address; /* first: it is the key */
        uint64_t lower;
        uint64_t n_bytes;
        uint32_t tag;
        uint32_t line;
};

/* The tag of a list of frames. */
struct tagged {
        const struct pickle_value *frames; /* first: it is the key */
        uint32_t tag;
};

struct reader {
        struct trace *trace;
        void *tags;      /* a tree */
        uint64_t n_left; /* events, segments and blocks that may still be read */
        const struct pickle_value *segments, *events;
        int64_t device;
        uint32_t track;
        void *live; /* a tree */
        uint64_t now;
        struct live refused; /* the last `oom`; 0 bytes: none, or an allocation followed */
        uint64_t n_survived; /* those that an allocation followed */
        int error;           /* of a walk through the tree */
};

/* ---- frames --------------------------------------------------------------------- */

static bool ends_with(const struct pickle_value *v, const char *end)
{
        size_t n = strlen(end);

        return v && v->type == PICKLE_STRING && v->string.n >= n &&
               memcmp(v->string.text + v->string.n - n, end, n) == 0;
}

/* "file.py:12 name", with the file's last part only. */
static int label_frame(struct trace *t, const struct pickle_value *frame, uint32_t *ret)
{
        const struct pickle_value *file = pickle_get(frame, "filename"), *name = pickle_get(frame, "name");
        size_t n = file->string.n < MAX_NAME_BYTES ? file->string.n : MAX_NAME_BYTES;
        const char *path = file->string.text + file->string.n - n, *begin = memrchr(path, '/', n);
        char text[256];
        int64_t line = 0;
        int n_text;

        begin = begin ? begin + 1 : path;
        n -= (size_t)(begin - path);
        (void)pickle_integer(pickle_get(frame, "line"), &line);
        n_text = snprintf(
                text, sizeof(text), "%.*s:%" PRId64 " %.*s", (int)(n < 100 ? n : 100), begin, line,
                name && name->type == PICKLE_STRING ? (int)(name->string.n < 100 ? name->string.n : 100) : 0,
                name && name->type == PICKLE_STRING ? name->string.text : "");
        return trace_label(t, text, (size_t)n_text, ret);
}

static int find_tag(struct trace *t, const struct pickle_value *frames, uint32_t *ret)
{
        *ret = 0;
        for (size_t i = 0; i < pickle_n_items(frames); i++)
                if (ends_with(pickle_get(pickle_item(frames, i), "filename"), ".py"))
                        return label_frame(t, pickle_item(frames, i), ret);
        return 0;
}

static int compare_frames(const void *a, const void *b)
{
        const struct pickle_value *x = ((const struct tagged *)a)->frames,
                                  *y = ((const struct tagged *)b)->frames;

        return (x > y) - (x < y);
}

static int read_tag(struct reader *r, const struct pickle_value *frames, uint32_t *ret)
{
        struct tagged **found = tfind(&(struct tagged){ .frames = frames }, &r->tags, compare_frames), *new;
        int result;

        if (found) {
                *ret = (*found)->tag;
                return 0;
        }
        result = find_tag(r->trace, frames, ret);
        if (result < 0)
                return result;
        new = malloc(sizeof(*new));
        if (!new)
                return -ENOMEM;
        *new = (struct tagged){ .frames = frames, .tag = *ret };
        if (!tsearch(new, &r->tags, compare_frames)) {
                free(new);
                return -ENOMEM;
        }
        return 0;
}

/* ---- blocks ----------------------------------------------------------------------- */

static int compare(const void *a, const void *b)
{
        int64_t x = ((const struct live *)a)->address, y = ((const struct live *)b)->address;

        return (x > y) - (x < y);
}

static int add(struct reader *r, const struct live *l, uint64_t upper)
{
        struct trace_buffer b = { .lower = l->lower,
                                  .upper = upper > l->lower ? upper : l->lower + 1,
                                  .n_bytes = l->n_bytes,
                                  .line = l->line,
                                  .tag = l->tag,
                                  .track = r->track };

        return trace_add(r->trace, &b);
}

/* A block is live from now on. One that was there and was not seen to go has gone. */
static int begin(struct reader *r, const struct live *from)
{
        struct live *l = malloc(sizeof(*l)), **found;
        int result = 0;

        if (!l)
                return -ENOMEM;
        *l = *from;
        found = tsearch(l, &r->live, compare);
        if (!found) {
                free(l);
                return -ENOMEM;
        }
        if (*found != l) {
                result = add(r, *found, r->now);
                **found = *l;
                free(l);
        }
        return result;
}

static int end(struct reader *r, const struct live *from)
{
        struct live **found = tfind(from, &r->live, compare), *l;
        int result;

        if (!found)
                return add(r,
                           &(struct live){ .n_bytes = from->n_bytes, .tag = from->tag, .line = from->line },
                           r->now);
        l = *found;
        result = add(r, l, r->now);
        tdelete(l, &r->live, compare);
        free(l);
        return result;
}

/* Of an event or a block, whose keys have these names. 1: there is no size or no address. */
static int read_live(struct reader *r, const struct pickle_value *v, const char *address, struct live *ret)
{
        int64_t n_bytes;

        *ret = (struct live){ .lower = r->now };
        if (!pickle_integer(pickle_get(v, address), &ret->address) ||
            !pickle_integer(pickle_get(v, "size"), &n_bytes) || n_bytes <= 0)
                return 1;
        ret->n_bytes = (uint64_t)n_bytes;
        return read_tag(r, pickle_get(v, "frames"), &ret->tag);
}

/* Before an event, a segment or a block is read. */
static int count(struct reader *r)
{
        if (r->n_left == 0)
                return -ELOOP;
        r->n_left--;
        return 0;
}

static void forget_refusal(struct reader *r)
{
        r->n_survived += r->refused.n_bytes > 0;
        r->refused.n_bytes = 0;
}

/* It has no address. */
static int read_refusal(struct reader *r, const struct pickle_value *v, size_t number)
{
        int64_t n_bytes;

        if (!pickle_integer(pickle_get(v, "size"), &n_bytes) || n_bytes <= 0)
                return -EINVAL;
        forget_refusal(r);
        r->refused = (struct live){ .lower = ++r->now,
                                    .n_bytes = (uint64_t)n_bytes,
                                    .line = (uint32_t)number + 1 };
        return read_tag(r, pickle_get(v, "frames"), &r->refused.tag);
}

static int read_event(struct reader *r, const struct pickle_value *v, size_t number)
{
        const struct pickle_value *action = pickle_get(v, "action");
        bool is_alloc = pickle_is_string(action, "alloc");
        int result = count(r);
        struct live l;

        if (result < 0)
                return result;
        if (pickle_is_string(action, "oom"))
                return read_refusal(r, v, number);
        if (!is_alloc && !pickle_is_string(action, "free_completed"))
                return 0;
        result = read_live(r, v, "addr", &l);
        if (result != 0)
                return result > 0 ? -EINVAL : result;
        l.line = (uint32_t)number + 1;
        r->now++; /* 0 is before the first one */
        l.lower = r->now;
        if (is_alloc)
                forget_refusal(r);
        return is_alloc ? begin(r, &l) : end(r, &l);
}

/* What the segments have in use and no event told of. */
static int read_block(struct reader *r, const struct pickle_value *v, int64_t address)
{
        int result = count(r);
        struct live l;

        if (result < 0 || pickle_is_string(pickle_get(v, "state"), "inactive"))
                return result;
        result = read_live(r, v, "address", &l);
        if (result < 0)
                return result;
        if (result > 0) { /* older snapshots have no addresses of blocks */
                int64_t n_bytes;

                if (!pickle_integer(pickle_get(v, "size"), &n_bytes) || n_bytes <= 0)
                        return -EINVAL;
                l.address = address;
                l.n_bytes = (uint64_t)n_bytes;
        }
        l.lower = 0;
        return tfind(&l, &r->live, compare) ? 0 : begin(r, &l);
}

static int read_segment(struct reader *r, const struct pickle_value *segment)
{
        const struct pickle_value *blocks = pickle_get(segment, "blocks");
        int64_t device = 0, at = 0, n_bytes;
        int result = count(r);

        (void)pickle_integer(pickle_get(segment, "device"), &device);
        (void)pickle_integer(pickle_get(segment, "address"), &at);
        for (size_t i = 0; device == r->device && result == 0 && i < pickle_n_items(blocks); i++) {
                result = read_block(r, pickle_item(blocks, i), at);
                if (pickle_integer(pickle_get(pickle_item(blocks, i), "size"), &n_bytes) &&
                    __builtin_add_overflow(at, n_bytes, &at))
                        result = -EINVAL;
        }
        return result;
}

/* ---- the snapshot ------------------------------------------------------------------- */

static void choose_device(struct reader *r, const struct pickle_value *traces)
{
        for (size_t i = 0; i < pickle_n_items(traces); i++) {
                if (pickle_n_items(pickle_item(traces, i)) <= pickle_n_items(r->events))
                        continue;
                r->events = pickle_item(traces, i);
                r->device = (int64_t)i;
        }
        if (!r->events && pickle_n_items(r->segments) > 0)
                (void)pickle_integer(pickle_get(pickle_item(r->segments, 0), "device"), &r->device);
}

static void add_endless(const void *node, VISIT visit, void *reader)
{
        struct reader *r = reader;

        if ((visit == postorder || visit == leaf) && r->error == 0)
                r->error = add(r, *(struct live *const *)node, TRACE_NO_END);
}

static int leave_out(struct reader *r, const struct pickle_value *traces)
{
        uint64_t n_events = 0, others = 0; /* a bit for each GPU */
        int result = 0;

        for (size_t i = 0; i < pickle_n_items(traces); i++)
                if ((int64_t)i != r->device && pickle_n_items(pickle_item(traces, i)) > 0) {
                        n_events += pickle_n_items(pickle_item(traces, i));
                        others |= UINT64_C(1) << i % 64;
                }
        for (size_t i = 0; i < pickle_n_items(r->segments); i++) {
                int64_t device = 0;

                (void)pickle_integer(pickle_get(pickle_item(r->segments, i), "device"), &device);
                if (device != r->device)
                        others |= UINT64_C(1) << (uint64_t)device % 64;
        }
        if (others)
                result = trace_leave_out(r->trace, "other GPUs: %d, with %" PRIu64 " events",
                                         __builtin_popcountll(others), n_events);
        if (result == 0 && r->n_survived > 0)
                result = trace_leave_out(r->trace, "refused requests after which the job went on: %" PRIu64,
                                         r->n_survived);
        return result;
}

static int read_all(struct reader *r, const struct pickle_value *top)
{
        char track[32];
        int result;

        r->segments = pickle_get(top, "segments");
        if (!r->segments)
                return -EINVAL;
        choose_device(r, pickle_get(top, "device_traces"));
        result = trace_label(r->trace, track,
                             (size_t)snprintf(track, sizeof(track), "cuda:%" PRId64, r->device), &r->track);
        for (size_t i = 0; result == 0 && i < pickle_n_items(r->events); i++)
                result = read_event(r, pickle_item(r->events, i), i);
        for (size_t i = 0; result == 0 && i < pickle_n_items(r->segments); i++)
                result = read_segment(r, pickle_item(r->segments, i));
        if (result == 0 && r->refused.n_bytes > 0)
                result = add(r, &r->refused, r->refused.lower + 1);
        if (result == 0)
                result = leave_out(r, pickle_get(top, "device_traces"));
        if (result < 0)
                return result;
        twalk_r(r->live, add_endless, r);
        return r->error;
}

/* In the order in which they begin, as in a file. */
static int compare_buffers(const void *a, const void *b)
{
        const struct trace_buffer *x = a, *y = b;

        if (x->lower != y->lower)
                return x->lower < y->lower ? -1 : 1;
        return (x->line > y->line) - (x->line < y->line);
}

static int read_snapshot(const struct pickle *p, struct trace *t, const char **ret_why)
{
        struct reader r = { .trace = t, .n_left = pickle_n_values(p) };
        int result = read_all(&r, pickle_top(p));

        tdestroy(r.live, free);
        tdestroy(r.tags, free);
        *ret_why = result == -EINVAL  ? "it is no memory snapshot of PyTorch, or an older kind of one"
                   : result == -E2BIG ? "it has too many buffers"
                   : result == -ELOOP ? "it has the same events or blocks several times"
                   : result < 0       ? "out of memory"
                                      : "it has no allocations";
        if (result == 0 && t->n_buffers == 0)
                result = -EINVAL;
        if (result < 0)
                return result;
        qsort(t->buffers, t->n_buffers, sizeof(*t->buffers), compare_buffers);
        result = trace_order(t);
        *ret_why = "out of memory";
        return result;
}

/* The whole file, its first byte included. */
static int slurp(FILE *in, char **ret, size_t *ret_n, const char **ret_why)
{
        size_t n = 1, n_room = 1 << 16;
        char *bytes = malloc(n_room), *more;

        *ret_why = "out of memory";
        if (!bytes)
                return -ENOMEM;
        bytes[0] = (char)TRACE_PICKLE_BYTE;
        for (;;) {
                n += fread(bytes + n, 1, n_room - n, in);
                if (n < n_room)
                        break;
                more = n_room < MAX_BYTES ? realloc(bytes, n_room * 2) : NULL;
                if (!more) {
                        *ret_why = n_room < MAX_BYTES ? *ret_why : "it has more than 1 GiB";
                        free(bytes);
                        return n_room < MAX_BYTES ? -ENOMEM : -E2BIG;
                }
                bytes = more;
                n_room *= 2;
        }
        *ret = bytes;
        *ret_n = n;
        *ret_why = "the file cannot be read";
        return ferror(in) ? -EIO : 0;
}

static int read_bytes(const char *bytes, size_t n, struct trace *t, const char **ret_why, size_t *ret_at)
{
        struct pickle *p = NULL;
        int r = pickle_read(bytes, n, &p, ret_why, ret_at);

        if (r < 0)
                return r;
        *ret_at = 0;
        r = read_snapshot(p, t, ret_why);
        pickle_free(p);
        return r;
}

static void say(char **ret_error, const char *name, size_t at, const char *why)
{
        char *error;
        int n = at ? asprintf(&error, "%s: byte %zu: %s", name, at, why)
                   : asprintf(&error, "%s: %s", name, why);

        *ret_error = n < 0 ? NULL : error;
}

int trace_read_torch(FILE *in, const char *name, struct trace **ret, char **ret_error)
{
        struct trace *t = trace_new();
        const char *why = "out of memory";
        char *bytes = NULL;
        size_t n = 0, at = 0;
        int r = t ? slurp(in, &bytes, &n, &why) : -ENOMEM;

        if (r == 0)
                r = read_bytes(bytes, n, t, &why, &at);
        free(bytes);
        if (r < 0) {
                say(ret_error, name, at, why ? why : "out of memory");
                trace_free(t);
                return r == -ENOMEM || r == -EIO ? r : -EINVAL;
        }
        *ret = t;
        return 0;
}
