/* The parts of page.html: texts, curves and tables. page.js, which follows, gives them data.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Names and commands come from clients that may be hostile. They reach the document by textContent, setAttribute() of
 * harmless attributes and encodeURIComponent() only. A row is built once; later its texts are replaced where they
 * changed. */
'use strict';

const FEW_ROWS = 20;     // of a table, until its button is pressed
const MAX_ROWS = 2000;   // then; the filter finds the others

const byId = (id) => document.getElementById(id);
const saidOf = (id) => byId(id).closest('section').querySelector('.said');
let isAway = true;  // what is shown is not of now

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

// What a section says that has nothing to show.
function sayNone(text) {
    return isAway ? 'No data.' : text;
}

// ---- curves ----

const CURVE_HEIGHT = 32;

// A step for each slot, with a gap where it is unknown. An area is closed along the bottom.
function steps(values, whole, isArea) {
    const ground = isArea ? 'V' + CURVE_HEIGHT + 'Z' : '';
    let path = '', isOpen = false;

    values.forEach((n, i) => {
        const y = (CURVE_HEIGHT * (1 - n / whole)).toFixed(2);

        if (n === null)
            path += isOpen ? ground : '';
        else if (isOpen)
            path += 'V' + y + 'H' + (i + 1);
        else
            path += (isArea ? 'M' + i + ' ' + CURVE_HEIGHT + 'V' + y : 'M' + i + ' ' + y) + 'H' + (i + 1);
        isOpen = n !== null;
    });
    return isOpen ? path + ground : path;
}

function newCurve(parent) {
    const node = byId('curve').content.firstElementChild.cloneNode(true);

    parent.append(node);
    return {node, title: node.querySelector('title'), reserved: node.querySelector('.reserved'),
            used: node.querySelector('.used')};
}

// The limit is the top, unless more is reserved. Returns the curve in words.
function drawCurve(curve, series, limit) {
    if (series && (curve.series !== series || curve.limit !== limit)) {
        const used = series.bytes_in_use, reserved = series.bytes_reserved;
        const whole = Math.max(1, limit, ...reserved, ...used);

        curve.node.setAttribute('viewBox', '0 0 ' + used.length + ' ' + CURVE_HEIGHT);
        curve.reserved.setAttribute('d', steps(reserved, whole, true));
        curve.used.setAttribute('d', steps(used, whole, false));
        curve.series = series;
        curve.limit = limit;
        curve.words = 'Last hour: at most ' + size(Math.max(0, ...used)) + ' in use, ' + size(Math.max(0, ...reserved)) +
                      ' reserved';
        setText(curve.title, curve.words);
    }
    return curve.words || 'Last hour: no data';
}

// ---- tables ----

const tables = [];

// A column: title, its least width rem, and either text(row) or draw(curve, row); optionally grow, its part of the width
// that is left, value(row) to sort by, right, long (a line of its own on a narrow screen) and mark(row), the class
// of a cell or ''. All rows have the tracks that the columns say, so the browser lays out the rows in view only.
class Table {
    constructor(id, columns, key, sortBy, none) {
        this.node = byId(id);
        this.columns = columns;
        this.key = key;
        this.none = none;
        this.rows = new Map();
        this.words = [];
        this.isWhole = false;
        this.matching = this.placed = 0;
        this.said = make(saidOf(id), 'span');
        this.button = make(saidOf(id), 'button');
        this.button.type = 'button';
        this.button.addEventListener('click', () => {
            this.isWhole = !this.isWhole;
            this.place();
        });
        this.node.style.setProperty('--least', columns.reduce((sum, c) => sum + c.rem, 0) + 'rem');
        this.node.style.setProperty('--tracks', columns.map(
            (c) => c.grow ? `minmax(${c.rem}rem, ${c.grow}fr)` : c.rem + 'rem').join(' '));
        tables.push(this);
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
            const curve = column.draw ? newCurve(cell) : null;

            if (i === 0)
                cell.scope = 'row';
            cell.setAttribute('role', i === 0 ? 'rowheader' : 'cell');
            cell.setAttribute('data-title', column.title);
            return {node: cell, curve, inner: column.grow && !curve ? make(cell, 'span', 'cut') : cell, text: '', mark: ''};
        });
        return {key, tr, cells, data: null, seen: 0};
    }

    fill(row, data) {
        row.data = data;
        this.columns.forEach((column, i) => {
            const cell = row.cells[i], mark = column.mark ? column.mark(data) : '';

            if (cell.curve) {
                column.draw(cell.curve, data);
                return;
            }
            const text = column.text(data);

            if (cell.text !== text) {
                cell.inner.textContent = cell.text = text;
                if (cell.inner !== cell.node)
                    cell.node.setAttribute('title', text);
            }
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
        return this.words.every((word) => row.cells.some((cell) => cell.text.toLowerCase().includes(word)));
    }

    say() {
        const n = this.rows.size, all = Math.min(this.matching, MAX_ROWS);

        setText(this.said, n === 0 ? sayNone(this.none) : this.matching === 0 ? 'No row matches the filter.'
                : (this.placed < n ? this.placed + ' of ' : '') + plural(n, 'row') +
                  (all < this.matching && this.placed === all ? '; the filter finds the others' : ''));
        this.node.hidden = n === 0;
        this.button.hidden = all <= FEW_ROWS;
        setText(this.button, this.isWhole ? 'Show ' + FEW_ROWS : 'Show ' + all);
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
        this.placed = Math.min(rows.length, this.isWhole ? MAX_ROWS : FEW_ROWS);
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
        this.say();
    }
}

