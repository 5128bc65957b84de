// The panels of one run, or of several over each other, with the controls that hold for all.

import { Chart } from "./chart.js";
import { api } from "./api.js";
import { RunData } from "./data.js";
import { debounced, fill, h, ready, searchField, trouble } from "./dom.js";
import { bindKeys } from "./keyboard.js";
import { keysOf, panelOf, PANELS, seriesOf } from "./panels.js";
import { onTheme } from "./theme.js";

const SETTINGS = "ratchet.view";
const LONG = 300;
const GAUGES_MS = 8000;
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
		this.grid = h("div", { class: "panels" });
		this.state = h("div", {});
		this.damage = h("p", { class: "wrong", role: "status" });
		fill(root, this.#toolbar(), this.state, this.damage, this.grid);
		this.panels = [...PANELS, ...this.picked.map(panelOf)];
		this.panels.forEach((panel) => this.#addChart(panel));
		this.unbind = bindKeys({
			l: ["Log scale", () => this.log.click()],
			a: ["Step or time axis", () => this.#axis(this.view.axis === "step" ? "time" : "step")],
			"]": ["Smooth more", () => this.#smooth(this.view.smooth + 0.1)],
			"[": ["Smooth less", () => this.#smooth(this.view.smooth - 0.1)],
			z: ["Reset zoom", () => this.zoom(null)],
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
		this.finder = searchField("Add a panel: any metric", null, { list: "metric-names", onchange: (e) => this.#pick(e.target) });
		return h(
			"div",
			{ class: "tools view", role: "toolbar", "aria-label": "Charts" },
			h("span", { class: "switch", role: "group", "aria-label": "Axis" }, this.axisButtons),
			h("label", { class: "inline" }, "Smoothing", this.slider),
			this.log,
			this.reset,
			h("span", { class: "grow" }),
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
		this.grid.append(chart.element);
		return chart;
	}

	async #pick(input) {
		const key = input.value;
		if (!this.runs.some((run) => run.names.includes(key)) || this.picked.includes(key)) return;
		input.value = "";
		this.picked.push(key);
		const panel = panelOf(key);
		this.panels.push(panel);
		const chart = this.#addChart(panel);
		await Promise.all(this.runs.map((run) => run.loadSteps([key], run.range, this.stop.signal)));
		this.#keep();
		chart.element.scrollIntoView({ block: "center" });
	}

	/** Shows [from, to] of the x axis in every panel; null: all of it. */
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

	/** Loads everything; step metrics first, since they are what one looks at first. */
	async load() {
		const { signal } = this.stop;
		try {
			await Promise.all(this.runs.map((run) => this.#loadSteps(run, signal)));
			fill(this.state);
			this.#names();
			// Of a long run the trend is what one looks for first; single steps stay faint behind it.
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
		const names = [...new Set(this.runs.flatMap((run) => run.names))].sort();
		fill(this.options, names.map((name) => h("option", { value: name })));
	}

	/** Takes in what was recorded since. */
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
		const many = this.runs.length > 1;
		fill(this.damage, this.runs.map(({ id, damage }) => damage && `${many ? `${id}: ` : ""}${damage} `));
		for (const chart of this.charts) {
			const series = this.runs.flatMap((run, r) => {
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

/** A dialog's list of other runs to lay over `id`. */
export async function otherRuns(id) {
	const page = await api.runs({ limit: 100 });
	return page.data.filter((run) => run.id !== id);
}
