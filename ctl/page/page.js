/* What page.html shows: the lists of /api, asked for once a second while the page is visible, and the curves of /api/hour.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * What is kept between two polls is bounded. */
const POLL_MS = 1000;
const FETCH_MS = 10000;  // of one answer
const STALE_MS = 5000;   // data of this age is announced as old
const NEW_MS = 10000;    // a refusal is marked as new
const MERGE_MS = 60000;  // refusals of one quota are one entry
const MAX_EVENTS = 20;
const HOUR_MS = 15000;   // between two of /api/hour
const MAP_MS = 5000;     // between two maps
const NO_MAP_MS = 30000; // until a missing map is asked for again
const MAP_PIXELS = [240, 1000];
const LISTS = ['status', 'partitions', 'tenants', 'sessions', 'keep', 'waiting', 'leases'];

// ---- the last hour ----

// The last hour of partitions and quotas: numbers of bytes by slots of time, the newest last; null is unknown.
const hour = {
    series: new Map(),
    due: 0,

    async load() {
        if (performance.now() < this.due)
            return;
        const {rows} = await load('hour');

        this.series = new Map(rows.series.map((s) => [quotaKey(s), s]));
        this.due = performance.now() + HOUR_MS;
    },

    of(row) {
        return this.series.get(quotaKey(row));
    },

    draw(curve, row) {
        return drawCurve(curve, this.of(row), row.bytes_limit);
    },

    peak(row) {
        return Math.max(0, ...(this.of(row)?.bytes_reserved || []));
    },
};

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

    say() {
        setText(saidOf('refusals'), this.events.length > 0 ? '' : sayNone('No request has been refused.'));
    },

    show(now) {
        const list = byId('refusals');

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

// Of a partition, which has no tenant, too.
function quotaKey(t) {
    return JSON.stringify([t.tenant ?? null, t.partition]);
}

// ---- the tables ----

function ofLimitText(t) {
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

const known = (value, words) => value === null ? '-' : words(value);
const text = (title, member, more) => (
    {title, text: (row) => visible(row[member] || '-'), rem: 6, grow: 1, ...more});
const count = (title, member, more) => (
    {title, text: (row) => known(row[member], String), value: (row) => row[member], right: true, rem: 4.4, ...more});
const bytes = (title, member, more) => (
    {title, text: (row) => known(row[member], size), value: (row) => row[member], right: true, rem: 5.3, ...more});
const time = (title, member, more) => (
    {title, text: (row) => known(row[member], duration), value: (row) => row[member], right: true, rem: 4.6, ...more});
const usage = (title, member) => (
    {title, text: (s) => hasUsage(s) ? size(s[member]) : '-', value: (s) => s[member], right: true, rem: 5.3});
const lastHour = {title: 'Last hour', draw: (curve, row) => hour.draw(curve, row), value: (row) => hour.peak(row), long: true,
                  rem: 7, grow: 1.5};
const ofLimit = {title: 'Of limit', text: ofLimitText, value: (t) => t.bytes_limit > 0 ? t.bytes_reserved / t.bytes_limit : 0,
                 right: true, rem: 5.6, grow: 0.4, mark: (t) => isNear(t) ? 'alarm' : ''};
const waitingFor = {title: 'Waiting', text: (t) => t.num_waiting + (t.num_waiting > 0 ? ' for ' + size(t.bytes_waiting) : ''),
                    value: (t) => t.num_waiting, right: true, rem: 5.6, grow: 0.4};

let tenants, leases, facts;  // by /api/columns

// The columns of a list, as ctl/statistics.c has them. `special` has what else is known of some, by their keys: more of the column,
// or the columns in its place.
function columnsOf(list, special) {
    return list.flatMap((c) => Array.isArray(special[c.key]) ? special[c.key]
                                                             : {text, count, bytes, time}[c.type](c.title, c.key, special[c.key]));
}

function useColumns(lists) {
    tenants = new Table('tenants', columnsOf(lists.tenants, {
        tenant: {long: true, rem: 5.5, grow: 2},
        partition: [text('Partition', 'partition', {rem: 4.6}), {...lastHour, rem: 5.2}],
        bytes_guaranteed: {rem: 6.1},
        bytes_limit: [bytes('Limit', 'bytes_limit', {text: (t) => t.removed ? '-' : size(t.bytes_limit)}), ofLimit],
        num_refusals: [{title: 'Refused', text: refusedText, value: (t) => t.num_refusals, right: true, rem: 5, grow: 0.4,
                        mark: (t) => refusals.fresh.has(quotaKey(t)) ? 'new' : ''}, waitingFor],
        num_leases: {rem: 3.8},
        num_sessions: {rem: 4.6},
    }), quotaKey, 'Reserved', 'There is no tenant.');
    leases = new Table('leases', columnsOf(lists.leases, {
        name: {long: true, rem: 8, grow: 2},
        tenant: {rem: 7},
        partition: [text('Partition', 'partition', {rem: 5}), text('For', 'match', {
            long: true, rem: 7, grow: 2, text: (l) => visible(l.match_kind + ' ' + l.match)})],
        state: {rem: 4.6, mark: (l) => l.state === 'active' ? '' : 'alarm'},
        bytes_limit: [bytes('Limit', 'bytes_limit'), ofLimit],
        num_refusals: [count('Refused', 'num_refusals', {rem: 4.6}), waitingFor],
        num_sessions: {rem: 4.8},
        ttl_ms: {text: (l) => l.ttl_ms > 0 ? duration(l.ttl_ms) : '-'},
    }), (l) => JSON.stringify([l.tenant, l.name, l.partition]), 'Reserved', 'There is no lease.');
    facts = columnsOf(lists.partitions, {
        num_refusals: [count('Waiting requests', 'waiting'), count('Refused requests', 'num_refusals')],
    });
}

const waiting = new Table('waiting', [
    text('Partition', 'partition'),
    text('Tenant', 'tenant', {rem: 7}),
    text('Lease', 'lease', {long: true, rem: 7}),
    count('Place', 'partition_position'),
    count('In its queue', 'position', {rem: 5}),
    count('Session', 'session_id'),
    count('Process', 'pid', {rem: 5}),
    bytes('Requested', 'n_bytes', {rem: 5.8}),
    bytes('Lacking', 'bytes_lacking'),
    time('Waited', 'waited_ms', {rem: 5}),
    time('Left', 'left_ms', {rem: 5}),
    time('Estimate', 'estimate_ms', {rem: 5}),
], (w) => JSON.stringify([w.partition, w.tenant, w.lease, w.position, w.session_id]), 'Waited', 'No request is waiting.');

const sessions = new Table('sessions', [
    count('Session', 'session_id'),
    text('Tenant', 'tenant', {rem: 5.5}),
    text('Name', 'name', {long: true, rem: 6}),
    text('User', 'user', {rem: 4.6}),
    count('Process', 'pid', {rem: 4.6}),
    text('State', 'state', {rem: 4.4, mark: (s) => s.state === 'live' ? '' : 'alarm'}),
    time('Age', 'age_ms'),
    count('Blocks', 'num_blocks', {rem: 4}),
    bytes('Held', 'bytes_in_use'),
    bytes('Peak held', 'peak_bytes_in_use'),
    usage('Used', 'client_bytes_in_use'),
    usage('Idle', 'client_bytes_idle'),
    bytes('Direct', 'bytes_direct'),
    bytes('Outside', 'bytes_outside'),
    text('Command', 'command', {long: true, rem: 8, grow: 3}),
], (s) => s.session_id, 'Held', 'There is no session.');

const keepTime = (ms) => ms === null ? 'no limit' : duration(ms);

const kept = new Table('kept', [
    text('Tenant', 'tenant'),
    text('Partition', 'partition'),
    bytes('Size', 'n_bytes', {rem: 6}),
    bytes('Metadata', 'n_metadata_bytes', {rem: 6}),
    count('References', 'num_references', {rem: 6}),
    {title: 'Keep', text: (k) => keepTime(k.keep_ms), value: (k) => k.keep_ms === null ? Infinity : k.keep_ms, right: true,
     rem: 6},
    {title: 'Left', text: (k) => k.num_references > 0 ? '-' : keepTime(k.left_ms),
     value: (k) => k.left_ms === null ? Infinity : k.left_ms, right: true, rem: 6},
], (k) => k.block_id, 'Size', 'No block is kept.');

const devices = new Table('devices', [
    text('Device', 'device'),
    text('Name', 'name', {long: true, grow: 3}),
    text('State', 'state', {mark: (d) => d.state === 'ok' ? '' : 'alarm'}),
    bytes('Reserved', 'bytes_reserved', {rem: 6}),
    bytes('Total', 'bytes_total', {rem: 6}),
    bytes('Standby', 'bytes_standby', {rem: 6}),
    bytes('Unreclaimed', 'bytes_unreclaimed', {rem: 7, mark: (d) => d.bytes_unreclaimed > 0 ? 'alarm' : ''}),
], (d) => d.device, 'Device', 'There is no device.');

// ---- partitions ----

// The parts of a bar: what is not reserved is free, less what guarantees promise to tenants that do not use it yet.
const PARTS = [
    ['use', 'In use', (p) => p.bytes_in_use + p.bytes_direct],
    ['idle', 'Reserved, idle', (p) => Math.max(0, p.bytes_reserved - p.bytes_in_use - p.bytes_direct)],
    ['promise', 'Guaranteed, unused', (p) => p.promised],
    ['free', 'Free', (p) => Math.max(0, p.bytes_limit - p.bytes_reserved - p.promised)],
];
const cards = new Map();

function newCard(p) {
    const node = make(byId('partitions'), 'article', 'card'), title = make(node, 'h3', '', visible(p.partition) + ' ');
    const bar = make(node, 'div', 'bar'), curve = newCurve(node), words = make(node, 'p'), list = make(node, 'dl');

    bar.setAttribute('role', 'img');
    return {
        node,
        bar,
        curve,
        words,
        device: make(title, 'small'),
        parts: PARTS.map(([className, label]) => {
            const part = make(bar, 'div', className), dt = make(list, 'dt');

            make(dt, 'span', 'key ' + className).setAttribute('aria-hidden', 'true');
            dt.append(label);
            return {part, dd: make(list, 'dd')};
        }),
        facts: facts.map((fact) => {
            make(list, 'dt', '', fact.title);
            return make(list, 'dd');
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
    setText(card.words, hour.draw(card.curve, p));
    facts.forEach((fact, i) => setText(card.facts[i], fact.text(p)));
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
    askedWidth: 0,
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

    // Its text is as large as the page's: it is drawn as wide as there is room.
    width() {
        return Math.min(Math.max(byId('map-image').clientWidth - 40, MAP_PIXELS[0]), MAP_PIXELS[1]);
    },

    load() {
        const name = byId('map-partition').value, width = this.width(), image = new Image();

        if (this.loading || !name || (performance.now() < this.due && width === this.askedWidth))
            return;
        this.loading = true;
        this.askedWidth = width;
        image.alt = 'Memory map of partition ' + name + ': blocks, idle and free memory by address';
        image.addEventListener('load', () => {
            this.end(MAP_MS);
            if (name === byId('map-partition').value)
                byId('map-image').replaceChildren(image);
        });
        image.addEventListener('error', () => {
            this.end(NO_MAP_MS);
            byId('map-image').replaceChildren();
        });
        // A document has one image for each address, whatever the server says of caching.
        image.src = 'api/map.svg?partition=' + encodeURIComponent(name) + '&width=' + width + '&n=' + ++this.asked;
    },

    end(ms) {
        this.loading = false;
        this.due = performance.now() + ms;
    },

    say() {
        setText(saidOf('map-image'), byId('map-image').firstChild ? '' : 'No data.');
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

    if (!facts)
        useColumns((await load('columns')).rows);
    for (const name of LISTS)
        lists.push(await load(name));
    await hour.load();
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
    const begin = performance.now(), [status, partitions, quotas, ...others] = lists.map((l) => l.rows);

    refusals.update(quotas, lists[2].now);
    updatePartitions(partitions, quotas);
    tenants.update(quotas);
    [sessions, kept, waiting, leases].forEach((table, i) => table.update(others[i]));
    devices.update(status.devices);
    map.updateChoice(partitions);
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
    isAway = reason !== '' || state.good === 0;
    if (isAway)
        setText(byId('summary'), 'No data.');
    setText(saidOf('partitions'), cards.size > 0 ? '' : sayNone('There is no partition.'));
    [refusals, map, ...tables].forEach((section) => section.say());
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
    const words = byId('filter').value.toLowerCase().split(/\s+/).filter(Boolean);

    for (const table of tables) {
        table.words = words;
        table.place();
    }
});
for (const heading of document.querySelectorAll('main h2'))
    make(document.querySelector('nav'), 'a', '', heading.textContent).setAttribute('href', '#' + heading.id);
byId('map-partition').addEventListener('change', () => {
    map.due = 0;
    map.load();
});
setInterval(() => {
    if (!document.hidden)
        showState();
}, POLL_MS);
poll();
