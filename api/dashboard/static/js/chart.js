// One panel's chart: title, legend with values under the cursor, and a uPlot canvas.

import { fill, h } from "./dom.js";
import { duration, num, tick } from "./format.js";
import { cssVar, resolved, seriesColor } from "./theme.js";

const HEIGHT = 190;
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];

const faded = (color, share) => `color-mix(in srgb, ${color} ${share}%, transparent)`;

/**
 * A chart of `panel`. `sync` names the charts whose cursors move together; `onZoom(range)` is called
 * with [from, to] of the x axis, or null for the whole axis.
 */
export class Chart {
	constructor(panel, { sync, onZoom, onRemove }) {
		this.panel = panel;
		this.sync = sync;
		this.onZoom = onZoom;
		this.legend = h("div", { class: "legend" });
		this.place = h("div", { class: "plot" });
		this.empty = h("p", { class: "no-data" }, "Loading…");
		this.hidden = new Set();
		this.shown = false;
		this.plot = null;
		this.series = [];
		this.element = h(
			"figure",
			{ class: `panel${panel.wide ? " wide" : ""}`, id: `panel-${panel.id}` },
			h(
				"figcaption",
				{},
				h("h3", {}, panel.title, panel.unit && h("small", {}, panel.unit)),
				h("p", { class: "note" }, panel.note),
				panel.picked && h("button", { class: "icon small", title: "Remove panel", "aria-label": `Remove panel ${panel.title}`, onclick: () => onRemove(this) }, "×"),
			),
			this.legend,
			this.place,
			this.empty,
		);
		this.watching = new IntersectionObserver((entries) => {
			if (entries.some((e) => e.isIntersecting) && !this.shown) {
				this.shown = true;
				this.#draw();
			} else if (!entries.some((e) => e.isIntersecting)) {
				this.shown = false;
			}
		}, { rootMargin: "300px" });
		this.watching.observe(this.element);
		this.sizing = new ResizeObserver(() => this.#fit());
		this.sizing.observe(this.place);
	}

	/**
	 * Shows `series`: {label, xs, ys, color index, dash index, said} each, with `low` and `high` where
	 * they are a mean over runs. `view` is {axis, smooth,
	 * log, range}. Drawn once the chart is on screen.
	 */
	show(series, view, { loading = false } = {}) {
		this.next = { series, view, loading };
		if (this.shown) this.#draw();
	}

	#draw() {
		if (!this.next) return;
		const { series, view, loading } = this.next;
		this.next = null;
		const any = series.some(({ ys }) => ys.some((y) => y !== null && y !== undefined));
		this.empty.hidden = any;
		this.empty.textContent = loading ? "Loading…" : "Not measured in this run.";
		this.place.hidden = !any;
		this.lone = series.every(({ ys }) => ys.filter((y) => y !== null && y !== undefined).length < 2);
		const form = JSON.stringify([series.map((s) => [s.label, s.color, s.dash, s.said?.length > 0, Boolean(s.low)]), view.axis, view.log, view.smooth > 0, document.documentElement.dataset.theme, any, this.lone]);
		this.series = series;
		this.view = view;
		if (!any) {
			fill(this.legend);
			this.form = null;
			this.plot?.destroy();
			this.plot = null;
			return;
		}
		const data = this.#data();
		if (form !== this.form || !this.plot) {
			this.form = form;
			this.#build(data);
		} else {
			this.plot.setData(data, false);
		}
		this.#range();
		this.#values(null);
	}

	/** Evals are few and each matters, so their points are not smoothed. */
	get smoothing() {
		return this.panel.points ? 0 : this.view.smooth;
	}

	#data() {
		const { log } = this.view;
		const smooth = this.smoothing;
		const { series } = this;
		const banded = series.some((s) => s.low);
		const [x, ...all] = aligned([...series.map((s) => [s.xs, s.ys]), ...(banded ? series.flatMap((s) => [[s.xs, s.low], [s.xs, s.high]]) : [])]);
		const raw = all.slice(0, series.length);
		const positive = (ys) => (log ? ys.map((y) => (y === null || y > 0 ? y : null)) : ys);
		this.raw = raw;
		// A band replaces the single values drawn elsewhere.
		if (banded) return [x, ...all.map((ys) => positive(smoothed(ys, smooth)))];
		if (this.panel.stack && !log) return [x, ...stacked(raw.map((ys) => smoothed(ys, smooth))).reverse()];
		if (!smooth) return [x, ...raw.map(positive)];
		return [x, ...raw.map(positive), ...raw.map((ys) => positive(smoothed(ys, smooth)))];
	}

	#lines() {
		const { panel, view } = this;
		const colors = this.series.map((s) => seriesColor(s.color));
		const stack = panel.stack && !view.log;
		const points = (i, show) => ({ show, size: 6, fill: colors[i] });
		const line = (i, more) => ({ label: this.series[i].label, stroke: colors[i], width: 1.6, dash: DASHES[this.series[i].dash ?? 0], spanGaps: true, points: points(i, panel.points === true || this.lone), show: !this.hidden.has(this.series[i].label), ...more });
		const all = this.series.map((_, i) => i);
		if (this.series.some((s) => s.low)) {
			const edge = { width: 0.5, dash: [], points: { show: false } };
			return [...all.map((i) => line(i, { width: 2 })), ...all.flatMap((i) => [line(i, edge), line(i, edge)])];
		}
		if (stack) {
			return all.reverse().map((i) => line(i, { fill: resolved(faded(colors[i], 70)), width: 0.5, points: points(i, this.lone) }));
		}
		if (!this.smoothing) return all.map((i) => line(i));
		return [
			...all.map((i) => line(i, { stroke: resolved(faded(colors[i], 25)), width: 1, points: { show: false } })),
			...all.map((i) => line(i, { width: 2 })),
		];
	}

	#build(data) {
		this.plot?.destroy();
		const { view, panel } = this;
		const text = cssVar("--muted");
		const grid = { stroke: cssVar("--grid"), width: 1 };
		const font = "11px system-ui, sans-serif";
		const xValues = view.axis === "step" ? (u, ticks) => ticks.map((v) => (Number.isInteger(v) ? tick(v) : "")) : (u, ticks) => ticks.map((v) => duration(v).replace(/ 0 (s|min|h)$/, ""));
		const options = {
			width: Math.max(200, this.place.clientWidth),
			height: panel.wide ? HEIGHT + 40 : HEIGHT,
			legend: { show: false },
			padding: [8, 18, 0, 0],
			scales: {
				x: { time: false },
				y: view.log
					? { distr: 3 }
					: panel.share
						? { range: [0, 1] }
						: { range: (u, low, high) => (low === null || (low === 0 && high === 0) ? [0, 1] : window.uPlot.rangeNum(panel.zero || panel.stack ? Math.min(0, low) : low, high, 0.08, !(panel.zero || panel.stack))) },
			},
			axes: [
				{ stroke: text, grid, ticks: grid, font, values: xValues, space: view.axis === "step" ? 60 : 90, size: 28 },
				{ stroke: text, grid, ticks: grid, font, values: (u, ticks) => ticks.map((v) => (v === null ? "" : tick(v))), size: 56 },
			],
			series: [{}, ...this.#lines()],
			bands: this.series.flatMap((s, i) => (s.low ? [{ series: [this.series.length + 2 * i + 2, this.series.length + 2 * i + 1], fill: resolved(faded(seriesColor(s.color), 18)) }] : [])),
			cursor: {
				sync: { key: this.sync, scales: ["x", null], setSeries: false, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
				drag: { x: true, y: false, setScale: false },
				points: { size: 7 },
				bind: { dblclick: () => () => (this.onZoom(null), null) },
			},
			hooks: {
				setCursor: [(u) => this.#values(u.cursor.idx)],
				setSelect: [
					(u) => {
						if (u.select.width < 4) return;
						const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
						u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
						this.onZoom(range);
					},
				],
			},
		};
		fill(this.place);
		this.plot = new window.uPlot(options, data, this.place);
		this.#buildLegend();
	}

	#range() {
		const x = this.plot.data[0];
		const [min, max] = this.view.range ?? [x[0], x[x.length - 1]];
		this.plot.setScale("x", { min, max: max > min ? max : min + 1 });
	}

	#buildLegend() {
		this.values = [];
		fill(
			this.legend,
			h("span", { class: "at" }, (this.at = h("b", {}))),
			this.series.map((s, i) => {
				const value = h("b", {});
				this.values[i] = value;
				const toggle = (event) => {
					if (this.hidden.has(s.label)) this.hidden.delete(s.label);
					else this.hidden.add(s.label);
					const on = !this.hidden.has(s.label);
					event.currentTarget.setAttribute("aria-pressed", on);
					this.plot.series.forEach((line, k) => line.label === s.label && k && this.plot.setSeries(k, { show: on }));
				};
				return h("button", { class: "chip", "aria-pressed": !this.hidden.has(s.label), title: `Show or hide ${s.label}`, onclick: toggle, vars: { "--c": `var(--series-${s.color % 8})` } }, h("i", { class: `d${s.dash ?? 0}` }), s.label, " ", value);
			}),
		);
	}

	/** Puts the values at the cursor into the legend, or the latest where there is no cursor. */
	#values(index) {
		if (!this.plot || !this.values) return;
		const x = this.plot.data[0];
		const at = index ?? x.length - 1;
		const stamp = x[at];
		this.at.textContent = stamp === undefined || index === null || index === undefined ? "" : this.view.axis === "step" ? `step ${Math.round(stamp)}` : duration(stamp);
		this.series.forEach((s, i) => {
			let k = at;
			while (k > 0 && (this.raw[i][k] === undefined || this.raw[i][k] === null)) k--;
			const value = this.raw[i][k];
			const span = s.said?.[s.xs.indexOf(x[k])];
			this.values[i].textContent = num(value) + (span ? ` · v${span[0] === span[1] ? span[0] : `${span[0]}–${span[1]}`}` : "");
		});
	}

	#fit() {
		const width = this.place.clientWidth;
		if (this.plot && width > 0 && Math.abs(this.plot.width - width) > 1) this.plot.setSize({ width, height: this.plot.height });
	}

	destroy() {
		this.watching.disconnect();
		this.sizing.disconnect();
		this.plot?.destroy();
		this.element.remove();
	}
}

/** Exponential moving average without the pull to zero at its start; gaps stay gaps. */
function smoothed(ys, factor) {
	if (!factor) return ys;
	let average = 0;
	let weight = 0;
	return ys.map((y) => {
		if (y === null || y === undefined) return null;
		average = average * factor + y * (1 - factor);
		weight = weight * factor + (1 - factor);
		return average / weight;
	});
}

/** Series [xs, ys] on one ascending axis: [x, ys of the first, ys of the second, …]. */
function aligned(series) {
	const first = series[0]?.[0];
	if (series.every(([xs]) => xs === first)) return [first ?? [], ...series.map(([, ys]) => ys)];
	const all = new Set();
	for (const [xs] of series) for (const x of xs) if (x !== null) all.add(x);
	const x = [...all].sort((a, b) => a - b);
	const at = new Map(x.map((value, i) => [value, i]));
	const columns = series.map(([xs, ys]) => {
		const column = new Array(x.length).fill(undefined);
		xs.forEach((value, i) => {
			if (value !== null) column[at.get(value)] = ys[i];
		});
		return column;
	});
	return [x, ...columns];
}

/** Each column plus all columns before it, for stacked areas. */
function stacked(columns) {
	const sums = [];
	return columns.map((ys) => {
		// Thinned columns have values at different places; in between the previous one counts.
		let last = 0;
		return ys.map((y, i) => {
			last = y ?? last;
			sums[i] = (sums[i] ?? 0) + last;
			return sums[i];
		});
	});
}
