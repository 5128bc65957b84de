// The measurements of one run, as columns that charts draw: steps, evals and gauges.

import { api } from "./api.js";
import { damageLine } from "./format.js";

const POINTS = 400;
const GAUGE_PAGE = 10000;
const MOST_GAUGE_PAGES = 30;
const SINCE_S = 15;

/** Columns over ascending steps. */
class StepTable {
	constructor() {
		this.steps = [];
		this.times = [];
		this.columns = new Map();
		this.damaged = new Set();
	}
	get last() {
		return this.steps.length ? this.steps[this.steps.length - 1] : -1;
	}
	column(key) {
		let column = this.columns.get(key);
		if (!column) {
			column = new Array(this.steps.length).fill(null);
			this.columns.set(key, column);
		}
		return column;
	}
	append(page) {
		page.damaged.forEach((step) => this.damaged.add(step));
		for (const record of page.data) {
			if (record.step <= this.last) continue;
			const at = this.steps.length;
			this.steps.push(record.step);
			this.times.push(typeof record.time === "number" ? record.time : Date.parse(record.time) / 1000);
			for (const key in record.metrics) {
				const column = this.column(key);
				while (column.length < at) column.push(null);
				column[at] = record.metrics[key];
			}
			for (const column of this.columns.values()) if (column.length <= at) column.push(null);
		}
	}
}

/** The position of `value` between neighbours of ascending `xs`, as their `ys`; outside: the nearest. */
function interpolated(xs, ys, value) {
	if (!xs.length || value === null || value === undefined) return null;
	let low = 0;
	let high = xs.length - 1;
	if (value <= xs[0]) return ys[0];
	if (value >= xs[high]) return ys[high];
	while (high - low > 1) {
		const middle = (low + high) >> 1;
		if (xs[middle] <= value) low = middle;
		else high = middle;
	}
	return ys[low] + ((ys[high] - ys[low]) * (value - xs[low])) / (xs[high] - xs[low]);
}

/** At most `points` of `samples`: the first of each interval, and each extreme of `value`. */
export function thinned(samples, points, value) {
	if (samples.length <= points) return samples;
	const size = Math.ceil(samples.length / (points / 3));
	const kept = [];
	for (let from = 0; from < samples.length; from += size) {
		const to = Math.min(from + size, samples.length);
		let low = from;
		let high = from;
		for (let i = from; i < to; i++) {
			if (value(samples[i]) < value(samples[low])) low = i;
			if (value(samples[i]) > value(samples[high])) high = i;
		}
		for (const i of [...new Set([from, low, high])].sort((a, b) => a - b)) kept.push(samples[i]);
	}
	return kept;
}

/** [time, `sum` or worst over sources] of samples, by intervals of ten seconds; a sum takes each source's latest. */
function joined(samples, value, sum) {
	const stretches = new Map();
	for (const sample of samples) {
		const at = Math.round(sample.time / 10) * 10;
		const said = value(sample) ?? null;
		if (said === null) continue;
		if (!stretches.has(at)) stretches.set(at, new Map());
		stretches.get(at).set(sum ? sample.source : sample, said);
	}
	return [...stretches].map(([at, said]) => [at, [...said.values()].reduce((a, b) => (sum ? a + b : Math.max(a, b)))]);
}

export class RunData {
	constructor(id) {
		this.id = id;
		this.run = null;
		this.names = [];
		this.keys = new Set();
		this.table = new StepTable();
		this.evals = [];
		this.heard = [];
		this.gauges = [];
		this.range = null;
		this.grown = 0;
	}

	get envs() {
		const found = this.names.map((n) => /^reward\/(.+)\/mean$/.exec(n)?.[1]).filter(Boolean);
		return found.filter((env) => env !== "all");
	}

	get roles() {
		return [...new Set(this.heard.map((g) => g.role))].sort();
	}

	/** Roles of workers that reported some `value` of a sample. */
	rolesWith(value) {
		return this.roles.filter((role) => this.heard.some((g) => g.role === role && value(g) != null));
	}

	/** The run object. */
	async loadRun(signal) {
		this.run = await api.run(this.id, signal);
		return this.run;
	}

	/** Names of all metrics, from the latest steps. */
	async loadNames(signal) {
		const step = this.run?.step ?? 0;
		let page = await api.metrics(this.id, { after: Math.max(-1, step - 3), limit: 3 }, signal);
		if (!page.data.length) page = await api.metrics(this.id, { after: -1, limit: 1 }, signal);
		const names = new Set(page.data.flatMap((record) => Object.keys(record.metrics)));
		this.names = [...names].sort();
		return page.data;
	}

	/** The columns `keys` over all steps or over `range` [from, to]; null: the whole run. */
	async loadSteps(keys, range = null, signal) {
		keys.forEach((key) => this.keys.add(key));
		const wanted = { keys: [...this.keys], points: POINTS };
		if (range) Object.assign(wanted, { after: Math.max(-1, Math.floor(range[0]) - 2), until: Math.ceil(range[1]) + 1 });
		const page = await api.metrics(this.id, wanted, signal);
		const table = new StepTable();
		table.append(page);
		this.table = table;
		this.range = range;
		this.grown = 0;
	}

	/** Loads steps recorded since the last call, and retries the last damaged ones; returns how many. */
	async loadNewer(signal) {
		if (this.range) return 0;
		if (this.grown > 2 * POINTS) {
			await this.loadSteps([], null, signal);
			return 1;
		}
		const page = await api.metrics(this.id, { keys: [...this.keys], after: this.table.last, points: POINTS }, signal);
		this.table.append(page);
		this.grown += page.data.length;
		return page.data.length + page.damaged.length;
	}

	/** One line about the steps that charts leave out. */
	get damage() {
		const evals = this.evals.filter((e) => e.problem).map((e) => `${e.env} at step ${e.step} (${e.problem})`);
		return `${damageLine("steps", [...this.table.damaged])} ${damageLine("evals", evals)}`.trim();
	}

	async loadEvals(signal) {
		this.evals = (await api.evals(this.id, signal)).data;
	}

	/**
	 * Loads gauges later than the known ones; a worker's sample may appear a while after it was taken.
	 * `heard` holds all of them, `gauges` only rollout workers'; other roles report lag and usage only.
	 */
	async loadGauges(signal) {
		const known = this.heard.at(-1)?.time ?? 0;
		let after = Math.max(0, known - SINCE_S);
		const fresh = [];
		for (let i = 0; i < MOST_GAUGE_PAGES; i++) {
			const page = await api.gauges(this.id, { role: "all", after, limit: GAUGE_PAGE }, signal);
			fresh.push(...page.data);
			if (!page.has_more || !page.data.length) break;
			after = page.data[page.data.length - 1].time;
		}
		const seen = new Set(this.heard.slice(-1000).map((g) => `${g.time} ${g.source}`));
		const added = fresh.filter((g) => !seen.has(`${g.time} ${g.source}`));
		this.heard = this.heard.concat(added);
		if (added.length < fresh.length || known) this.heard.sort((a, b) => a.time - b.time);
		this.gauges = this.heard.filter((g) => g.role === "rollout");
		return added.length;
	}

	timeOf(step) {
		return interpolated(this.table.steps, this.table.times, step);
	}
	stepOf(time) {
		return interpolated(this.table.times, this.table.steps, time);
	}

	/** Points [xs, ys] of a series; `axis` is 'step' or 'time' (seconds since the run began). */
	points(series, axis) {
		if (series.from === "evals") return this.#evalPoints(series, axis);
		if (series.from === "gauges") return this.#gaugePoints(series, axis);
		const { steps, columns } = this.table;
		const ys = columns.get(series.key) ?? [];
		return [axis === "step" ? steps : this.#sinceStart(this.table.times), ys];
	}

	get began() {
		const start = this.run?.started_at ?? this.run?.created_at;
		const began = start ? Date.parse(start) / 1000 : Infinity;
		return Math.min(began, this.table.times[0] ?? Infinity, this.gauges[0]?.time ?? Infinity);
	}

	#sinceStart(times) {
		const { began } = this;
		return times.map((time) => time - began);
	}

	#evalPoints(series, axis) {
		const found = this.evals.filter((e) => e.env === series.env);
		const xs = found.map((e) => (axis === "step" ? e.step : (this.timeOf(e.step) ?? this.began) - this.began));
		return [xs, found.map((e) => e.reward_mean ?? null), found];
	}

	#gaugePoints(series, axis) {
		const own = series.role ? this.heard.filter((g) => g.role === series.role) : this.gauges;
		const all = series.sum || series.worst ? joined(own, series.value, series.sum) : own.map((g) => [g.time, series.value(g) ?? null]);
		const some = thinned(all, 1500, ([, value]) => value ?? 0);
		const xs = some.map(([time]) => (axis === "step" ? this.stepOf(time) : time - this.began));
		return [xs, some.map(([, value]) => value)];
	}
}

/** A dialog's list of other runs to lay over `id`. */
export async function otherRuns(id) {
	const page = await api.runs({ limit: 100 });
	return page.data.filter((run) => run.id !== id);
}
