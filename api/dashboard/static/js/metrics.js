// The panels of one run, or of several overlaid, with the controls that apply to all.

import { Chart } from "./chart.js";
import { RunData } from "./data.js";
import { debounced, fill, h, ready, searchField, trouble } from "./dom.js";
import { bindKeys } from "./keyboard.js";
import { keysOf, MATCHES, matchOf, panelOf, PANELS, SECTIONS, seriesOf } from "./panels.js";
import { onTheme } from "./theme.js";

const SETTINGS = "ratchet.view";
const LONG = 300;
const GAUGES_MS = 8000;
const MOST_MATCHES = 12;
let serial = 0;

export class Metrics {
	/** `runs`: RunData of each run shown, the first of them the page's own. */
	constructor(root, runs) {
		this.runs = runs;
		this.stop = new AbortController();
		const kept = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
		this.view = { axis: kept.axis ?? "step", smooth: kept.smooth ?? 0, log: kept.log ?? false, range: null };
		this.chose = kept.smooth !== undefined;
		this.picked = kept.picked ?? [];
		this.sync = `sync-${serial++}`;
		this.gauged = 0;
		this.charts = [];
		this.said = h("p", { class: "sub", role: "status" });
		this.sections = new Map(SECTIONS.map((name) => [name, this.#section(name, h("div", { class: "panels" }))]));
		this.evals = h("div", {});
		this.state = h("div", {});
		this.damage = h("p", { class: "wrong", role: "status" });
		const evals = this.#section("Evals", this.evals).element;
		evals.open = false;
		this.evalsFold = evals;
		fill(root, this.#toolbar(), this.said, this.state, this.damage, [...this.sections.values()].map((section) => section.element), evals);
		this.panels = [...PANELS, ...this.picked.map(panelOf)];
		this.panels.forEach((panel) => this.#addChart(panel));
		this.unbind = bindKeys({
			l: ["Log scale", () => this.log.click()],
			a: ["Step or time axis", () => this.#axis(this.view.axis === "step" ? "time" : "step")],
			"]": ["Smooth more", () => this.#smooth(this.view.smooth + 0.1)],
			"[": ["Smooth less", () => this.#smooth(this.view.smooth - 0.1)],
			z: ["Reset zoom", () => this.zoom(null)],
			"/": ["Find a panel", () => this.finder.focus()],
		});
		this.offTheme = onTheme(() => this.paint());
		this.refine = debounced(() => this.#refine(), 250);
	}

	#toolbar() {
		const { view } = this;
		this.axisButtons = ["step", "time"].map((axis) => h("button", { "aria-pressed": view.axis === axis, dataset: { axis }, onclick: () => this.#axis(axis) }, axis === "step" ? "Step" : "Time"));
		this.slider = h("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: String(view.smooth), oninput: (e) => this.#smooth(Number(e.target.value)) });
		this.log = h("button", { "aria-pressed": view.log, onclick: () => this.#log() }, "Log");
		this.reset = h("button", { hidden: true, onclick: () => this.zoom(null) }, "Reset zoom");
		this.options = h("datalist", { id: "metric-names" });
		this.search = debounced(() => this.#search(), 250);
		this.finder = searchField("Find or add a panel: name or regex", () => this.search(), { list: "metric-names", onchange: (e) => this.#pick(e.target) });
		this.group = h("select", { "aria-label": "Group", hidden: this.runs.length < 2, onchange: () => this.paint() });
		return h(
			"div",
			{ class: "tools view", role: "toolbar", "aria-label": "Charts" },
			h("span", { class: "switch", role: "group", "aria-label": "Axis" }, this.axisButtons),
			h("label", { class: "inline" }, "Smoothing", this.slider),
			this.log,
			this.reset,
			this.group,
			h("span", { class: "grow" }),
			h("button", { title: "The visible steps of the visible panels, as CSV", onclick: () => this.#download() }, "Download"),
			this.finder,
			this.options,
		);
	}

	#keep() {
		const { axis, smooth, log } = this.view;
		const chosen = this.chose ? { smooth } : {};
		localStorage.setItem(SETTINGS, JSON.stringify({ axis, log, picked: this.picked, ...chosen }));
		this.paint();
	}
	#axis(axis) {
		this.view.axis = axis;
		this.view.range = null;
		this.reset.hidden = true;
		this.axisButtons.forEach((b) => b.setAttribute("aria-pressed", b.dataset.axis === axis));
		this.#keep();
	}
	#show(factor) {
		this.view.smooth = Math.min(0.98, Math.max(0, factor));
		this.slider.value = String(this.view.smooth);
	}
	#smooth(factor) {
		this.#show(factor);
		this.chose = true;
		this.#keep();
	}
	#log() {
		this.view.log = !this.view.log;
		this.log.setAttribute("aria-pressed", this.view.log);
		this.#keep();
	}

	#addChart(panel) {
		const chart = new Chart(panel, {
			sync: this.sync,
			onZoom: (range) => this.zoom(range),
			onRemove: (it) => {
				this.picked = this.picked.filter((key) => key !== it.panel.title);
				this.charts = this.charts.filter((c) => c !== it);
				this.panels = this.panels.filter((p) => p !== it.panel);
				it.destroy();
				this.#keep();
			},
		});
		this.charts.push(chart);
		this.sections.get(panel.section).place.append(chart.element);
		return chart;
	}

	#section(name, place) {
		return { place, element: h("details", { class: "section", open: true }, h("summary", {}, h("h2", {}, name)), place) };
	}

	get names() {
		return [...new Set(this.runs.flatMap((run) => run.names))].sort();
	}

	/** Adds a panel for the metric with that name; other text is a search. */
	async #pick(input) {
		const key = input.value;
		if (!this.names.includes(key)) return;
		input.value = "";
		this.#search();
		let chart = this.charts.find((it) => it.panel.picked && it.panel.title === key);
		if (!chart) {
			this.picked.push(key);
			const panel = panelOf(key);
			this.panels.push(panel);
			chart = this.#addChart(panel);
			await this.#fetch([key]);
			this.#keep();
		}
		this.sections.get(chart.panel.section).element.open = true;
		chart.element.scrollIntoView({ block: "center" });
	}

	#fetch(keys) {
		return Promise.all(this.runs.map((run) => run.loadSteps(keys, run.range, this.stop.signal)));
	}

	/** Shows the panels whose title or metrics match the search, and matching metrics without a panel. */
	#search() {
		const text = this.finder.value;
		let pattern = null;
		try {
			pattern = new RegExp(text, "i");
		} catch {
			this.said.textContent = `${text} is not a valid regular expression yet.`;
			return;
		}
		for (const chart of this.charts.filter((it) => it.panel.section === MATCHES)) chart.destroy();
		this.charts = this.charts.filter((it) => it.panel.section !== MATCHES);
		this.panels = this.panels.filter((panel) => panel.section !== MATCHES);
		const shown = new Set();
		for (const { panel, element } of this.charts) {
			const keys = keysOf([panel], this.runs[0]);
			element.hidden = Boolean(text) && ![panel.title, ...keys].some((name) => pattern.test(name));
			if (!element.hidden) keys.forEach((key) => shown.add(key));
		}
		const found = text ? this.names.filter((name) => pattern.test(name) && !shown.has(name)) : [];
		for (const key of found.slice(0, MOST_MATCHES)) {
			const panel = matchOf(key);
			this.panels.push(panel);
			this.#addChart(panel);
		}
		const nothing = text && !found.length && this.charts.every((it) => it.element.hidden);
		const more = found.length > MOST_MATCHES ? ` The first ${MOST_MATCHES} of ${found.length} metrics without a panel are shown.` : "";
		this.said.textContent = nothing ? `No panel and no metric of ${this.runs.length > 1 ? "these runs" : "this run"} matches ${text}.` : more;
		this.#fold();
		if (found.length) this.#fetch(found.slice(0, MOST_MATCHES)).then(() => this.paint(), (error) => error.name === "AbortError" || this.#trouble(error));
		else this.paint();
	}

	/** Hides sections without a panel. */
	#fold() {
		for (const { element, place } of this.sections.values()) element.hidden = [...place.children].every((it) => it.hidden);
	}

	/** Downloads what is shown: visible steps, metrics of panels that are not hidden or folded. */
	async #download() {
		const shown = this.charts.filter((it) => it.element.checkVisibility()).map((it) => it.panel);
		const keys = [...new Set(this.runs.flatMap((run) => keysOf(shown, run)))];
		const { range, axis } = this.view;
		const steps = (run) => (!range ? [0, Infinity] : axis === "step" ? range : range.map((x) => run.stepOf(x + run.began)));
		const { csvOf, save } = await import("./extracts.js");
		save(csvOf(this.runs, keys, steps), `${this.runs.map((run) => run.id).join("+")}.csv`);
	}

	/** Shows [from, to] of the x axis in every panel; null: the whole axis. */
	zoom(range) {
		this.view.range = range;
		this.reset.hidden = !range;
		this.paint();
		this.refine();
	}

	/** Fetches the steps of the zoomed range in full detail. */
	async #refine() {
		const { range, axis } = this.view;
		await Promise.all(
			this.runs.map((run) => {
				if (!range) return run.range ? run.loadSteps([], null, this.stop.signal) : null;
				const steps = axis === "step" ? range : range.map((x) => run.stepOf(x + run.began));
				return run.loadSteps([], steps, this.stop.signal);
			}),
		).catch((error) => error.name === "AbortError" || this.#trouble(error));
		this.paint();
	}

	#trouble(error) {
		fill(this.state, trouble(error, h("button", { onclick: () => this.load() }, "Try again")));
	}

	/** Loads everything; step metrics first, since they matter most. */
	async load() {
		const { signal } = this.stop;
		try {
			await Promise.all(this.runs.map((run) => this.#loadSteps(run, signal)));
			fill(this.state);
			this.#names();
			// In a long run the trend matters first; single steps stay faint behind it.
			if (!this.chose && this.runs.some((run) => run.table.steps.length > LONG)) this.#show(0.9);
			this.paint();
			ready("metrics");
			await Promise.all(this.runs.map((run) => Promise.all([run.loadEvals(signal), run.loadGauges(signal)])));
			this.loaded = true;
			this.paint();
			ready("all");
		} catch (error) {
			if (error.name === "AbortError") return;
			this.#trouble(error);
			ready("error");
		}
	}

	async #loadSteps(run, signal) {
		if (!run.run) await run.loadRun(signal);
		await run.loadNames(signal);
		run.nameSet = new Set(run.names);
		await run.loadSteps(keysOf(this.panels, run), run.range, signal);
	}

	#names() {
		fill(this.options, this.names.map((name) => h("option", { value: name })));
		if (this.runs.length < 2) return;
		const keys = [...new Set(this.runs.flatMap(({ run }) => Object.keys(run.metadata)))].sort();
		const chosen = this.group.value;
		fill(this.group, h("option", { value: "" }, "Each run"), h("option", { value: "all" }, "Mean ± deviation of all"), keys.map((key) => h("option", { value: `by ${key}` }, `Mean ± deviation by ${key}`)));
		this.group.value = chosen;
	}

	/** Adds what was recorded since the last call. */
	async update() {
		const { signal } = this.stop;
		if (!this.loaded) return;
		let fresh = 0;
		for (const run of this.runs) {
			if (!run.names.length && run.run?.step) await this.#loadSteps(run, signal).then(() => this.#names());
			fresh += await run.loadNewer(signal);
			if (Date.now() - this.gauged > GAUGES_MS) fresh += await run.loadGauges(signal);
			const evals = JSON.stringify(run.run?.eval);
			if (evals !== run.evalsSeen) {
				await run.loadEvals(signal);
				run.evalsSeen = evals;
				fresh++;
			}
		}
		if (Date.now() - this.gauged > GAUGES_MS) this.gauged = Date.now();
		if (fresh) this.paint();
	}

	paint() {
		// Data that charts do not need is loaded after them.
		if (!this.extracts) {
			this.extracts = {};
			import("./extracts.js").then((module) => ((this.extracts = module), this.paint()));
		}
		const { evalsTable, pooled } = this.extracts;
		const many = this.runs.length > 1;
		fill(this.damage, this.runs.map(({ id, damage }) => damage && `${many ? `${id}: ` : ""}${damage} `));
		this.#fold();
		if (this.evalsFold && this.runs.every(({ run }) => run)) {
			// An evaluation has nothing else to show; after that it is the reader's.
			this.evalsFold.open ||= this.runs.every(({ run }) => run.kind === "eval");
			this.evalsFold = null;
		}
		fill(this.evals, evalsTable?.(this.runs) ?? h("p", { class: "sub" }, this.loaded ? "No evals yet." : "Loading…"));
		for (const chart of this.charts) {
			const series = this.group.value && pooled ? this.#grouped(chart.panel) : this.runs.flatMap((run, r) => {
				const own = seriesOf(chart.panel, run);
				// Of several runs each panel shows the first two series, the run by colour, the series by dash.
				return (many ? own.slice(0, chart.panel.id === "reward" ? 1 : 2) : own).map((s, i) => {
					const [xs, ys, found] = run.points(s, this.view.axis);
					const said = found?.map((e) => e.versions);
					const label = many ? `${run.id} · ${s.label}` : s.label;
					return { label, xs, ys, said, color: many ? r : i, dash: many ? i : 0 };
				});
			});
			chart.show(series, this.view, { loading: !this.loaded });
		}
	}

	/** The first series of a panel, or of rewards that of all environments, over each group of runs. */
	#grouped(panel) {
		const groups = new Map();
		for (const run of this.runs) {
			const key = this.group.value.slice(3);
			const name = this.group.value === "all" ? "all" : `${key}: ${run.run.metadata[key] ?? "–"}`;
			groups.set(name, [...(groups.get(name) ?? []), run]);
		}
		return [...groups].map(([name, runs], color) => {
			const curves = runs.flatMap((run) => seriesOf(panel, run).slice(0, 1).map((s) => run.points(s, this.view.axis)));
			return { label: `${name} (${runs.length})`, color, dash: 0, ...this.extracts.pooled(curves) };
		});
	}

	destroy() {
		this.stop.abort();
		this.unbind();
		this.offTheme();
		this.charts.forEach((chart) => chart.destroy());
	}
}

/** RunData of `ids`, those that exist. */
export async function runsOf(ids, signal) {
	const runs = ids.map((id) => new RunData(id));
	const found = await Promise.all(runs.map((run) => run.loadRun(signal).then(() => run, (error) => (error.status === 404 ? null : Promise.reject(error)))));
	return found.filter(Boolean);
}

/** The tab of one run. */
export function show(root, data) {
	const view = new Metrics(root, [data]);
	view.load();
	return view;
}
