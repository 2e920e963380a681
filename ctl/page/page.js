/* What page.html shows: the lists of /api, asked for once a second while the page is visible.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Names and commands come from clients that may be hostile. They reach the document by textContent, setAttribute() of
 * harmless attributes and encodeURIComponent() only. A row is built once; later its texts are replaced where they
 * changed. What is kept between two polls is bounded. */
'use strict';

const POLL_MS = 1000;
const FETCH_MS = 10000;  // of one answer
const STALE_MS = 5000;   // data of this age is announced as old
const NEW_MS = 10000;    // a refusal is marked as new
const MERGE_MS = 60000;  // refusals of one quota are one entry
const MAX_EVENTS = 20;
const MAX_ROWS = 2000;   // of a table; the filter finds the others
const MAP_MS = 5000;     // between two maps
const NO_MAP_MS = 30000; // until a missing map is asked for again
const LISTS = ['status', 'partitions', 'tenants', 'sessions', 'keep'];

const byId = (id) => document.getElementById(id);

// ---- text ----

const UNITS = ['KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB'];

function size(bytes) {
    let value = bytes / 1024, unit = 0;

    if (bytes < 1024)
        return bytes + ' B';
    for (; value >= 1023.95 && unit + 1 < UNITS.length; unit++)
        value /= 1024;
    return value.toFixed(1) + ' ' + UNITS[unit];
}

function duration(ms) {
    const s = Math.floor(Math.max(0, ms) / 1000);
    const two = (n) => String(n).padStart(2, '0');

    if (s < 60)
        return s + ' s';
    if (s < 3600)
        return Math.floor(s / 60) + 'm ' + two(s % 60) + 's';
    if (s < 86400)
        return Math.floor(s / 3600) + 'h ' + two(Math.floor(s / 60) % 60) + 'm';
    return Math.floor(s / 86400) + 'd ' + two(Math.floor(s / 3600) % 24) + 'h';
}

function percent(part, whole) {
    return whole > 0 ? Math.round(100 * part / whole) + ' %' : '-';
}

function plural(n, word) {
    return n + ' ' + word + (n === 1 ? '' : 's');
}

// Characters without a glyph are written as escapes, as in bfcctl: they could reorder or hide the text beside them.
function visible(text) {
    return text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => '\\u' + c.codePointAt(0).toString(16).padStart(4, '0'));
}

// ---- nodes ----

function make(parent, tag, className, text) {
    const node = document.createElement(tag);

    if (className)
        node.className = className;
    if (text !== undefined)
        node.textContent = text;
    parent.append(node);
    return node;
}

const shown = new WeakMap();  // the text of a node, which is cheaper to compare than the node's own

function setText(node, text) {
    if (shown.get(node) !== text) {
        node.textContent = text;
        shown.set(node, text);
    }
}

function setClass(node, name, on) {
    if (node.classList.contains(name) !== on)
        node.classList.toggle(name, on);
}

// ---- tables ----

// A column: title, text(row), and optionally value(row) to sort by, right, long (a line of its own on a narrow screen)
// and mark(row), the class of a cell or ''.
class Table {
    constructor(id, columns, key, sortBy, onSort) {
        this.node = byId(id);
        this.columns = columns;
        this.key = key;
        this.rows = new Map();
        this.filter = '';
        this.onSort = onSort;
        this.makeHead();
        this.body = make(this.node, 'tbody');
        this.body.setAttribute('role', 'rowgroup');
        this.sortBy(columns.findIndex((c) => c.title === sortBy));
    }

    // The roles stay where the narrow screen's style makes cards of rows.
    makeHead() {
        const head = make(this.node, 'thead'), line = make(head, 'tr');

        this.node.setAttribute('role', 'table');
        head.setAttribute('role', 'rowgroup');
        line.setAttribute('role', 'row');
        this.heads = this.columns.map((column, i) => {
            const th = make(line, 'th', column.right ? 'right' : '');
            const button = make(th, 'button', '', column.title);

            th.scope = 'col';
            th.setAttribute('role', 'columnheader');
            button.type = 'button';
            button.addEventListener('click', () => {
                this.sortBy(i);
                this.place();
            });
            return th;
        });
    }

    // Numbers begin with the largest, texts with the first. The same column again: the other way.
    sortBy(i) {
        this.down = i === this.sorted ? !this.down : Boolean(this.columns[i].value);
        this.sorted = i;
        this.heads.forEach((th, k) => th.setAttribute(
            'aria-sort', k !== i ? 'none' : this.down ? 'descending' : 'ascending'));
    }

    newRow(key) {
        const tr = document.createElement('tr');

        tr.setAttribute('role', 'row');
        const cells = this.columns.map((column, i) => {
            const cell = make(tr, i === 0 ? 'th' : 'td', column.right ? 'right' : column.long ? 'long' : '');

            if (i === 0)
                cell.scope = 'row';
            cell.setAttribute('role', i === 0 ? 'rowheader' : 'cell');
            cell.setAttribute('data-title', column.title);
            return {node: cell, text: '', mark: ''};
        });
        return {key, tr, cells, data: null, seen: 0};
    }

    fill(row, data) {
        row.data = data;
        this.columns.forEach((column, i) => {
            const cell = row.cells[i], text = column.text(data), mark = column.mark ? column.mark(data) : '';

            if (cell.text !== text)
                cell.node.textContent = cell.text = text;
            if (cell.mark !== mark) {
                if (cell.mark)
                    cell.node.classList.remove(cell.mark);
                if (mark)
                    cell.node.classList.add(mark);
                cell.mark = mark;
            }
        });
    }

    update(list) {
        this.turn = (this.turn || 0) + 1;
        for (const data of list) {
            const key = this.key(data);
            let row = this.rows.get(key);

            if (!row)
                this.rows.set(key, row = this.newRow(key));
            row.seen = this.turn;
            this.fill(row, data);
        }
        for (const [key, row] of this.rows) {
            if (row.seen !== this.turn)
                this.rows.delete(key);
        }
        this.place();
    }

    matches(row) {
        return this.filter === '' || row.cells.some((cell) => cell.text.toLowerCase().includes(this.filter));
    }

    compare(a, b) {
        const column = this.columns[this.sorted];
        const x = column.value ? column.value(a.data) : column.text(a.data);
        const y = column.value ? column.value(b.data) : column.text(b.data);

        return x < y ? -1 : x > y ? 1 : 0;
    }

    // Puts the rows that match into the document, in their order. Array.sort() is stable.
    place() {
        const way = this.down ? -1 : 1;
        const rows = [...this.rows.values()].filter((row) => this.matches(row));
        let at = this.body.firstChild;

        rows.sort((a, b) => way * this.compare(a, b));
        this.matching = rows.length;
        this.placed = Math.min(rows.length, MAX_ROWS);
        for (let i = 0; i < this.placed; i++) {
            if (rows[i].tr === at)
                at = at.nextSibling;
            else
                this.body.insertBefore(rows[i].tr, at);
        }
        while (at) {
            const next = at.nextSibling;

            at.remove();
            at = next;
        }
        if (this.onSort)
            this.onSort();
    }
}

// ---- refusals ----

// The API has counts and the time of the last refusal, by tenant and partition. The difference of two polls is an
// event. A daemon that was restarted counts from 0.
const refusals = {
    known: new Map(),  // a quota: its counts
    events: [],        // the newest first
    fresh: new Map(),  // a quota: how many came in the last NEW_MS

    sentence(e) {
        const why = [];

        if (e.over > 0)
            why.push(e.over + ' over the limit (EDQUOT)');
        if (e.memory > 0)
            why.push(e.memory + ' out of memory (ENOMEM)');
        return 'tenant ' + e.tenant + ' in partition ' + e.partition + ': ' + plural(e.n, 'request') + ' refused' +
               (e.old ? ' before this page was opened' : '') + (why.length > 0 ? ', ' + why.join(', ') : '') + '; ' +
               size(e.reserved) + ' of ' + size(e.limit) + ' reserved.';
    },

    add(t, old, n, over, memory) {
        const tenant = visible(t.tenant), i = this.events.findIndex(
            (e) => e.key === quotaKey(t) && e.old === old && t.last_refusal_time_ms - e.time < MERGE_MS);
        const e = i < 0 ? {key: quotaKey(t), tenant, partition: visible(t.partition), old, n: 0, over: 0, memory: 0}
                        : this.events.splice(i, 1)[0];

        e.n += n;
        e.over += over;
        e.memory += memory;
        e.time = t.last_refusal_time_ms;
        e.reserved = t.bytes_reserved;
        e.limit = t.bytes_limit;
        this.events.unshift(e);
        if (!old) {
            e.came = performance.now();
            this.fresh.set(e.key, {n: n + (this.fresh.get(e.key)?.n || 0), came: e.came});
            setText(byId('spoken'), 'Refused: ' + this.sentence(e));
        }
    },

    update(tenants, now) {
        const first = this.known.size === 0, known = new Map();

        for (const [key, f] of this.fresh) {
            if (performance.now() - f.came > NEW_MS)
                this.fresh.delete(key);
        }
        for (const t of tenants) {
            const before = this.known.get(quotaKey(t)), restarted = before && before.n > t.num_refusals;
            const b = before && !restarted ? before : {n: 0, over: 0, memory: 0};

            known.set(quotaKey(t), {n: t.num_refusals, over: t.num_over_quota, memory: t.num_out_of_memory});
            if (t.num_refusals > b.n)
                this.add(t, first, t.num_refusals - b.n, Math.max(0, t.num_over_quota - b.over),
                         Math.max(0, t.num_out_of_memory - b.memory));
        }
        this.known = known;
        this.events.sort((a, b) => b.time - a.time);
        this.events.length = Math.min(this.events.length, MAX_EVENTS);
        this.show(now);
    },

    show(now) {
        const list = byId('refusals');

        byId('no-refusals').hidden = this.events.length > 0;
        while (list.children.length > this.events.length)
            list.lastChild.remove();
        this.events.forEach((e, i) => {
            const li = list.children[i] || make(list, 'li');
            const isNew = e.came !== undefined && performance.now() - e.came < NEW_MS;

            if (!li.firstChild) {
                make(li, 'span', 'ago');
                make(li, 'span');
            }
            setClass(li, 'new', isNew);
            setText(li.firstChild, (isNew ? 'New, ' : '') + duration(now - e.time) + ' ago: ');
            setText(li.lastChild, this.sentence(e));
        });
    },
};

function quotaKey(t) {
    return JSON.stringify([t.tenant, t.partition]);
}

// ---- the tables ----

function ofLimit(t) {
    const text = percent(t.bytes_reserved, t.bytes_limit);

    if (t.removed)
        return 'removed';
    return t.bytes_reserved > t.bytes_limit ? text + ', over' : isNear(t) ? text + ', near' : text;
}

function isNear(t) {
    return !t.removed && t.bytes_reserved > t.bytes_limit * 0.9;
}

function refusedText(t) {
    const fresh = refusals.fresh.get(quotaKey(t));

    return t.num_refusals + (fresh ? ' (+' + fresh.n + ' new)' : '');
}

// A client that does not report its usage: the daemon has the statistics of its blocks only.
function hasUsage(s) {
    return s.bytes_in_use === 0 || s.client_bytes_reserved > 0;
}

const text = (title, member, more) => ({title, text: (row) => visible(row[member] || '-'), ...more});
const count = (title, member, more) => (
    {title, text: (row) => String(row[member]), value: (row) => row[member], right: true, ...more});
const bytes = (title, member, more) => (
    {title, text: (row) => size(row[member]), value: (row) => row[member], right: true, ...more});
const usage = (title, member) => (
    {title, text: (s) => hasUsage(s) ? size(s[member]) : '-', value: (s) => s[member], right: true});

const tenants = new Table('tenants', [
    text('Tenant', 'tenant', {long: true}),
    text('Partition', 'partition'),
    bytes('In use', 'bytes_in_use'),
    bytes('Reserved', 'bytes_reserved'),
    bytes('Peak reserved', 'peak_bytes_reserved'),
    bytes('Guaranteed', 'bytes_guaranteed'),
    bytes('Limit', 'bytes_limit', {text: (t) => t.removed ? '-' : size(t.bytes_limit)}),
    {title: 'Of limit', text: ofLimit, value: (t) => t.bytes_limit > 0 ? t.bytes_reserved / t.bytes_limit : 0,
     right: true, mark: (t) => isNear(t) ? 'alarm' : ''},
    {title: 'Refused', text: refusedText, value: (t) => t.num_refusals, right: true,
     mark: (t) => refusals.fresh.has(quotaKey(t)) ? 'new' : ''},
    {title: 'Waiting', text: (t) => t.num_waiting + (t.num_waiting > 0 ? ' for ' + size(t.bytes_waiting) : ''),
     value: (t) => t.num_waiting, right: true},
    bytes('Kept', 'bytes_kept'),
    count('Sessions', 'num_sessions'),
], quotaKey, 'Tenant');

const sessions = new Table('sessions', [
    count('Session', 'session_id'),
    text('Tenant', 'tenant'),
    text('Name', 'name', {long: true}),
    text('User', 'user'),
    count('Process', 'pid'),
    text('State', 'state', {mark: (s) => s.state === 'live' ? '' : 'alarm'}),
    {title: 'Age', text: (s) => duration(s.age_ms), value: (s) => s.age_ms, right: true},
    count('Blocks', 'num_blocks'),
    bytes('Held', 'bytes_in_use'),
    bytes('Peak held', 'peak_bytes_in_use'),
    usage('Used', 'client_bytes_in_use'),
    usage('Idle', 'client_bytes_idle'),
    bytes('Outside', 'client_bytes_outside'),
    text('Command', 'command', {long: true}),
], (s) => s.session_id, 'Held', () => {
    const n = sessions.rows.size;

    setText(byId('sessions-count'), (sessions.placed < n ? sessions.placed + ' of ' : '') + plural(n, 'session') +
            (sessions.placed < sessions.matching ? '; the filter finds the others' : ''));
});

const keepTime = (ms) => ms === null ? 'no limit' : duration(ms);

const kept = new Table('kept', [
    text('Name', 'name', {long: true}),
    text('Tenant', 'tenant'),
    text('Partition', 'partition'),
    bytes('Size', 'n_bytes'),
    count('References', 'num_references'),
    {title: 'Keep', text: (k) => keepTime(k.keep_ms), value: (k) => k.keep_ms === null ? Infinity : k.keep_ms, right: true},
    {title: 'Left', text: (k) => k.num_references > 0 ? '-' : keepTime(k.left_ms),
     value: (k) => k.left_ms === null ? Infinity : k.left_ms, right: true},
], (k) => k.block_id, 'Name');

const devices = new Table('devices', [
    text('Device', 'device'),
    text('Name', 'name', {long: true}),
    text('State', 'state', {mark: (d) => d.state === 'ok' ? '' : 'alarm'}),
    bytes('Reserved', 'bytes_reserved'),
    bytes('Total', 'bytes_total'),
    bytes('Standby', 'bytes_standby'),
    bytes('Unreclaimed', 'bytes_unreclaimed', {mark: (d) => d.bytes_unreclaimed > 0 ? 'alarm' : ''}),
], (d) => d.device, 'Device');

// ---- partitions ----

// The parts of a bar: what is not reserved is free, less what guarantees promise to tenants that do not use it yet.
const PARTS = [
    ['use', 'In use', (p) => p.bytes_in_use],
    ['idle', 'Reserved, idle', (p) => Math.max(0, p.bytes_reserved - p.bytes_in_use)],
    ['promise', 'Guaranteed, unused', (p) => p.promised],
    ['free', 'Free', (p) => Math.max(0, p.bytes_limit - p.bytes_reserved - p.promised)],
];
const FACTS = [
    ['Limit', (p) => size(p.bytes_limit)],
    ['Guaranteed', (p) => size(p.bytes_guaranteed)],
    ['Peak reserved', (p) => size(p.peak_bytes_reserved)],
    ['Unreclaimed', (p) => size(p.bytes_unreclaimed)],
    ['Waiting requests', (p) => String(p.waiting)],
    ['Refused requests', (p) => String(p.num_refusals)],
];
const cards = new Map();

function newCard(p) {
    const node = make(byId('partitions'), 'article', 'card'), title = make(node, 'h3', '', visible(p.partition) + ' ');
    const bar = make(node, 'div', 'bar'), facts = make(node, 'dl');

    bar.setAttribute('role', 'img');
    return {
        node,
        bar,
        device: make(title, 'small'),
        parts: PARTS.map(([className, label]) => {
            const part = make(bar, 'div', className), dt = make(facts, 'dt');

            make(dt, 'span', 'key ' + className).setAttribute('aria-hidden', 'true');
            dt.append(label);
            return {part, dd: make(facts, 'dd')};
        }),
        facts: FACTS.map(([label]) => {
            make(facts, 'dt', '', label);
            return make(facts, 'dd');
        }),
    };
}

function fillCard(card, p) {
    const whole = PARTS.reduce((sum, [, , value]) => sum + value(p), 0), words = [];

    setText(card.device, 'on ' + visible(p.device));
    PARTS.forEach(([, label, value], i) => {
        const n = value(p), said = size(n) + ', ' + percent(n, whole);

        card.parts[i].part.style.width = whole > 0 ? 100 * n / whole + '%' : '0';
        setText(card.parts[i].dd, said);
        words.push(label + ' ' + said);
    });
    card.bar.setAttribute('aria-label', words.join('; '));
    FACTS.forEach(([, value], i) => setText(card.facts[i], value(p)));
}

function updatePartitions(partitions, quotas) {
    const names = new Set(partitions.map((p) => p.partition));

    for (const [name, card] of cards) {
        if (!names.has(name)) {
            card.node.remove();
            cards.delete(name);
        }
    }
    for (const p of partitions) {
        const own = quotas.filter((t) => t.partition === p.partition);

        p.promised = own.reduce((sum, t) => sum + Math.max(0, t.bytes_guaranteed - t.bytes_reserved), 0);
        p.waiting = own.reduce((sum, t) => sum + t.num_waiting, 0);
        if (!cards.has(p.partition))
            cards.set(p.partition, newCard(p));
        fillCard(cards.get(p.partition), p);
    }
}

// ---- the memory map ----

// An image: no markup of it becomes part of this document.
const map = {
    due: 0,
    asked: 0,
    loading: false,

    updateChoice(partitions) {
        const select = byId('map-partition'), names = partitions.map((p) => p.partition);

        if (JSON.stringify(names) === this.names)
            return;
        const chosen = names.includes(select.value) ? select.value : names[0];

        this.names = JSON.stringify(names);
        select.replaceChildren();
        for (const name of names)
            make(select, 'option', '', visible(name)).value = name;
        select.value = chosen;
        this.due = 0;
    },

    load() {
        const name = byId('map-partition').value, image = new Image();

        if (this.loading || performance.now() < this.due || !name)
            return;
        this.loading = true;
        image.alt = 'Memory map of partition ' + name + ': blocks, idle and free memory by address';
        image.addEventListener('load', () => {
            this.end(MAP_MS);
            byId('map').hidden = false;
            if (name === byId('map-partition').value)
                byId('map-image').replaceChildren(image);
        });
        image.addEventListener('error', () => {
            this.end(NO_MAP_MS);
            byId('map').hidden = true;
        });
        // A document has one image for each address, whatever the server says of caching.
        image.src = 'api/map.svg?partition=' + encodeURIComponent(name) + '&n=' + ++this.asked;
    },

    end(ms) {
        this.loading = false;
        this.due = performance.now() + ms;
    },
};

// ---- polling ----

const state = {
    busy: false,
    timer: 0,
    good: 0,       // the time of the last data
    visible: performance.now(),
    reason: '',    // '': the last poll was answered
    rendered: 0,
};

async function load(name) {
    const response = await fetch('api/' + name, {cache: 'no-store', credentials: 'omit', signal: AbortSignal.timeout(FETCH_MS)});
    const reply = await response.json();

    if (!response.ok)
        throw new Error(String(reply.error || 'bfc-exporter answered with status ' + response.status + '.'));
    return {rows: reply[name], now: Date.parse(response.headers.get('date')) || Date.now()};
}

// One after the other: the exporter asks the daemon for one at a time, and a page takes one of its connections.
async function loadAll() {
    const lists = [];

    for (const name of LISTS)
        lists.push(await load(name));
    return lists;
}

// The times are measured until the browser has drawn: User Timing, shown by its developer tools.
function measure(name, begin) {
    requestAnimationFrame(() => setTimeout(() => {
        performance.clearMeasures(name);
        performance.measure(name, {start: begin, end: performance.now()});
    }, 0));
}

function render(lists) {
    const begin = performance.now(), [status, partitions, quotas, list, keep] = lists.map((l) => l.rows);

    refusals.update(quotas, lists[2].now);
    updatePartitions(partitions, quotas);
    tenants.update(quotas);
    sessions.update(list);
    kept.update(keep);
    devices.update(status.devices);
    map.updateChoice(partitions);
    byId('no-kept').hidden = keep.length > 0;
    kept.node.hidden = keep.length === 0;
    setText(byId('summary'), 'Version ' + visible(status.version) + ', up ' + duration(status.uptime_ms) + ', ' +
            plural(status.num_tenants, 'tenant') + ', ' + status.num_sessions + ' of at most ' +
            plural(status.max_sessions, 'session'));
    measure(state.rendered++ === 0 ? 'first-render' : 'render', begin);
}

// A daemon that does not answer is announced, with the age of what is shown. role="alert" reads the reason once.
function showState() {
    const now = performance.now(), since = Math.max(state.good, state.visible);
    const reason = state.reason || (now - since > STALE_MS ? 'bfc-exporter does not answer.' : '');

    byId('banner').hidden = reason === '';
    setText(byId('reason'), reason);
    setText(byId('age'), state.good === 0 ? 'There is no data yet.'
                                          : 'The data below is ' + duration(now - state.good) + ' old.');
    document.title = reason ? 'bfcd: not reachable' : 'bfcd';
}

async function poll() {
    if (state.busy || document.hidden)
        return;
    state.busy = true;
    clearTimeout(state.timer);
    const lists = await loadAll().catch((e) => {
        state.reason = e instanceof TypeError || e.name === 'TimeoutError' ? 'bfc-exporter cannot be reached.'
                                                                           : e.message;
    });

    state.busy = false;
    state.timer = setTimeout(poll, POLL_MS);
    if (lists) {
        state.good = performance.now();
        state.reason = '';
        render(lists);
        map.load();
    }
    showState();
}

document.addEventListener('visibilitychange', () => {
    if (document.hidden)
        return;
    state.visible = performance.now();
    poll();
});
byId('filter').addEventListener('input', () => {
    sessions.filter = byId('filter').value.trim().toLowerCase();
    sessions.place();
});
byId('map-partition').addEventListener('change', () => {
    map.due = 0;
    map.load();
});
setInterval(() => {
    if (!document.hidden)
        showState();
}, POLL_MS);
poll();
